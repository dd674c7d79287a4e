"""Text that is safe to print: file names and answers must not steer the terminal; tables of it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")


def printable(text: str) -> str:
    """Replaces control characters (escape sequences, direction marks) by a visible mark; keeps tabs and new lines."""
    return "".join(_mark(character) for character in text)


def _mark(character: str) -> str:
    if character in "\n\t":
        return character
    steers = character in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs")
    return "\N{REPLACEMENT CHARACTER}" if steers else character


_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


def one_line(text: str, limit: int = 100) -> str:
    """The beginning of a text on one line, for headings."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def shrinking(text: str) -> Text:
    """Returns a one-line cell that shrinks in favour of numeric cells when the terminal is narrow."""
    return Text(one_line(text), no_wrap=True, overflow="ellipsis")


def ends(items: Sequence[Item], limit: int) -> list[Item]:
    """Returns the first items and the last one, at most `limit`, for lists too long for a screen."""
    return list(items) if len(items) <= limit else [*items[: limit - 1], items[-1]]


def size_text(num_bytes: int) -> str:
    """A number of bytes for people: "640 B", "2.5 KiB", "2.00 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"


def duration_text(seconds: float | None) -> str:
    """A duration for people: "0.42 ms", "35 ms", "1.24 s"; a dash when it is unknown."""
    if seconds is None:
        return "–"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.2f} ms"


def fact_table() -> Table:
    """A table of two columns: what it is, and a fact about it."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    return table


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
