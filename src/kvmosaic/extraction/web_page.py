"""A parsed web page, in which elements end where HTML lets their end tags be left out."""

from __future__ import annotations

from typing import Any

from bs4 import BeautifulSoup, Tag

MAX_LOOK = 200
"""Open elements that are looked at for each tag, so that a page is read in linear time."""
_CELLS = frozenset({"td", "th"})
_ROWS = _CELLS | {"tr"}
_PARAGRAPH = frozenset({"p"})
_ENDED: dict[str, frozenset[str]] = {
    "li": frozenset({"li"}),
    **dict.fromkeys(("dt", "dd"), frozenset({"dt", "dd"})),
    **dict.fromkeys(_CELLS, _CELLS),
    "tr": _ROWS,
    **dict.fromkeys(("thead", "tbody", "tfoot"), _ROWS | {"thead", "tbody", "tfoot"}),
    **dict.fromkeys(("option", "optgroup"), frozenset({"option"})),
    **dict.fromkeys(
        ("p", "address", "article", "aside", "blockquote", "details", "div", "dl", "figure", "footer", "form", "h1"),
        _PARAGRAPH,
    ),
    **dict.fromkeys(
        ("h2", "h3", "h4", "h5", "h6", "header", "hr", "main", "menu", "nav", "ol", "pre", "section", "table", "ul"),
        _PARAGRAPH,
    ),
}
"""Open elements that a start tag ends (13.1.2.4 of the HTML standard)."""
_BORDERS: dict[str, frozenset[str]] = {
    "li": frozenset({"ul", "ol", "menu", "table"}),
    **dict.fromkeys(("dt", "dd"), frozenset({"dl", "table"})),
    **dict.fromkeys(("option", "optgroup"), frozenset({"select"})),
    **dict.fromkeys((*_ROWS, "thead", "tbody", "tfoot"), frozenset({"table"})),
}
"""Elements outside of which nothing is ended."""
_BORDERS_OF_PARAGRAPHS = frozenset({"table", "td", "th", "li", "dd", "caption", "object", "button"})


class WebPage(BeautifulSoup):
    """A page, as the standard library parses it; by itself it nests each `<p>` without an end tag in the one before."""

    def handle_starttag(self, name: str, *args: Any, **kwargs: Any) -> Tag | None:
        """Opens an element, after the end of the open elements that it ends."""
        if ended := _ENDED.get(name):
            self._end(ended, _BORDERS.get(name, _BORDERS_OF_PARAGRAPHS))
        return super().handle_starttag(name, *args, **kwargs)

    def _end(self, names: frozenset[str], borders: frozenset[str]) -> None:
        last, place = None, self.currentTag
        for _ in range(MAX_LOOK):
            if place is None or place.name in borders:
                break
            last = place if place.name in names else last
            place = place.parent
        if last is not None:
            self.endData()
            while self.currentTag is not last:
                self.popTag()
            self.popTag()
