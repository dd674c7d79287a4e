"""A process that reads one file from standard input and writes its text to standard output, within limits."""

from __future__ import annotations

import codecs
import ctypes
import os
import re
import signal
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from typing import Any

from bs4 import BeautifulSoup, Tag
from bs4.dammit import EncodingDetector
from bs4.element import PreformattedString

from kvmosaic.extraction import REFUSED, REFUSED_LIMITS

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


MAX_MEMORY_BYTES = 2**30
MAX_CPU_SECONDS = 30
MAX_TEXT_BYTES = 2**27
MAX_UNPACKED_BYTES = 2**26
"""Maximum bytes of all files in a DOCX archive."""
MAX_TITLE_CHARACTERS = 300
MAX_PAGES = 20_000
MAX_RECURSION = 5_000
"""Enough for elements that are nested a thousand deep."""
_PR_SET_PDEATHSIG = 1


class Unreadable(Exception):
    """A file that cannot be read; the message says why."""


def read_pdf(content: bytes) -> tuple[str, str]:
    """Returns the text of a PDF, with a line before each page."""
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        raise Unreadable(f"not a PDF, or one with a password ({error})") from None
    if len(pdf) > MAX_PAGES:
        raise Unreadable(f"it has {len(pdf)} pages; at most {MAX_PAGES} are read, split it")
    texts, num_characters = [], 0
    for number in range(len(pdf)):
        page = pdf[number]
        text = page.get_textpage().get_text_bounded().replace("\r\n", "\n").replace("\0", "").strip()
        page.close()
        num_characters += len(text)
        if num_characters > MAX_TEXT_BYTES:
            raise Unreadable(f"it has more than {MAX_TEXT_BYTES} characters; split it")
        if text:
            texts.append(f"[page {number + 1}]\n{text}")
    return "", "\n\n".join(texts)


_BESIDE = re.compile(
    r"(^|[-_ ])((doc|site|page|top)?nav(bar|header|footer|igation)?|breadcrumbs?|menu|banner|footer|cookies?)($|[-_ ])",
    re.IGNORECASE,
)
"""Names of classes and ids of what is beside the text of a page."""
_MAX_KEPT = 16
"""Elements with such a name that hold most of the page; then no more are looked at, so that it takes linear time."""


def _is_beside(tag: Tag) -> bool:
    names = f"{' '.join(tag.get('class') or ())} {tag.get('id') or ''}"[:1_024]
    return tag.name not in ("html", "body", "main", "article") and (
        tag.get("role") in ("navigation", "banner", "contentinfo", "search") or _BESIDE.search(names) is not None
    )


_MIN_MAIN_CHARACTERS = 200
_LAYOUT = ["table", "h1", "h2", "h3"]
"""A table with one of these in it is no table of data, but the layout of a page."""
_PARTS_OF_TABLES = frozenset({"tbody", "thead", "tfoot", "tr", "td", "th"})
_MIN_LINKS = 5
_MENU_SHARE = 0.6
"""A cell of a layout with so many links, which have so much of its text, is a menu."""


def _has_columns(table: Tag) -> bool:
    return table.th is not None or any(len(row(["td", "th"], recursive=False, limit=2)) > 1 for row in table("tr"))


def _unfold_layout(soup: BeautifulSoup, num_characters: int) -> None:
    """Makes tables that lay out a page plain blocks, and drops their menus, unless one is most of the page."""
    budget = _MAX_KEPT * num_characters  # cells in cells are looked at again
    for table in soup("table"):
        if table.decomposed or (table.find(_LAYOUT) is None and _has_columns(table)):
            continue
        table.name, parts = "div", [each for each in table.contents if isinstance(each, Tag)]
        while parts:
            part = parts.pop()
            if part.name not in _PARTS_OF_TABLES:
                continue
            parts += (each for each in part.contents if isinstance(each, Tag))
            is_cell = part.name in _CELLS
            part.name = "div"
            if is_cell and budget > 0:
                text, links = len(part.get_text()), [len(each.get_text()) for each in part("a")]
                budget -= text
                if len(links) >= _MIN_LINKS and _MENU_SHARE * text < sum(links) and 2 * text < num_characters:
                    parts = [each for each in parts if each.parent is not part]
                    part.decompose()


def _keep_text(soup: BeautifulSoup) -> None:
    """Drops declarations, scripts, images, and what is beside the text, unless that is most of the page."""
    for node in soup(string=lambda text: isinstance(text, PreformattedString)):
        node.extract()
    for tag in soup(["head", "script", "style", "template", "noscript", "svg", "img", "nav", "footer"]):
        tag.decompose()
    mains = [*soup("main"), *soup("div", role="main")]
    if len(mains) == 1 and len(mains[0].get_text()) >= _MIN_MAIN_CHARACTERS:
        main = mains[0].extract()
        soup.clear()
        soup.append(main)
    _unfold_layout(soup, len(soup.get_text()))
    num_characters, num_kept = len(soup.get_text()), 0
    for tag in soup(_is_beside):
        if tag.decomposed:
            continue
        if 2 * len(tag.get_text()) < num_characters:
            tag.decompose()
        elif (num_kept := num_kept + 1) == _MAX_KEPT:
            return


def _encoding_of(content: bytes) -> str:
    """The encoding that a page says; else UTF-8 if it can be that, or that of old pages: guesses on short ones fail."""
    said = EncodingDetector.find_declared_encoding(content, is_html=True)
    with suppress(LookupError):
        if said:
            return codecs.lookup(said).name
    try:
        content.decode()
    except UnicodeDecodeError:
        return "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "windows-1252"
    return "utf-8"


def read_html(content: bytes) -> tuple[str, str]:
    """Returns title and text of a web page as Markdown, without navigation, scripts, images and addresses of links."""
    from markdownify import MarkdownConverter

    from kvmosaic.extraction.worker import WebPage

    soup = WebPage(content, "html.parser", from_encoding=_encoding_of(content))
    title = " ".join(soup.title.get_text().split())[:MAX_TITLE_CHARACTERS] if soup.title else ""
    _keep_text(soup)
    text: str = MarkdownConverter(heading_style="ATX", strip=["a"], escape_misc=False).convert_soup(soup)
    lines = (line.rstrip() for line in text.splitlines())
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    return title, "\n".join(kept)


def read_docx(content: bytes) -> tuple[str, str]:
    """Returns the text of a Word document as Markdown, without images."""
    import mammoth

    try:
        archive = zipfile.ZipFile(BytesIO(content))
        num_bytes = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError) as error:
        raise Unreadable(f"not a DOCX file ({error})") from None
    if num_bytes > MAX_UNPACKED_BYTES:
        raise Unreadable(f"it unpacks to {num_bytes} bytes; at most {MAX_UNPACKED_BYTES} are read, split it")
    try:
        page = mammoth.convert_to_html(BytesIO(content), convert_image=mammoth.images.img_element(lambda image: {}))
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise Unreadable(f"not a DOCX file ({type(error).__name__})") from None
    return read_html(page.value.encode())


READERS: dict[str, Callable[[bytes], tuple[str, str]]] = {
    ".pdf": read_pdf,
    ".html": read_html,
    ".htm": read_html,
    ".docx": read_docx,
}


def main(suffix: str) -> int:
    """Reads one file; returns the exit code."""
    _limit()
    try:
        code, text = 0, "\n".join(READERS[suffix](sys.stdin.buffer.read()))
    except Unreadable as error:
        code, text = REFUSED, str(error)
    except MemoryError:
        return REFUSED_LIMITS
    except RecursionError:
        code, text = REFUSED, "its parts are nested too deeply; send its text"
    except Exception as error:  # whatever a library raises for a damaged file
        code, text = REFUSED, f"it is damaged ({type(error).__name__})"
    output = text.encode("utf-8", "replace")
    if len(output) > MAX_TEXT_BYTES:
        code, output = REFUSED, f"it has more than {MAX_TEXT_BYTES} bytes of text; split it".encode()
    sys.stdout.buffer.write(output)
    sys.stdout.buffer.flush()
    return code


def _limit() -> None:
    """Sets the limits of this process, where the system has them."""
    sys.setrecursionlimit(MAX_RECURSION)
    with suppress(ImportError):
        import resource

        for kind, limit in (
            (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
            (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
            (resource.RLIMIT_FSIZE, MAX_TEXT_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, highest = resource.getrlimit(kind)
            resource.setrlimit(kind, (limit if highest == resource.RLIM_INFINITY else min(limit, highest), highest))
    with suppress(AttributeError, OSError):
        os.nice(10)
    with suppress(AttributeError, OSError):  # Linux: it ends with the server
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
