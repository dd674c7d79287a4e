"""Text that is safe to print: file names and answers must not steer the terminal."""

from __future__ import annotations

import unicodedata


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
