"""Marks: unforgeable placeholders for contents, to see where a chat template puts them and how it edits them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

_PROBE = "\"'\\\n\t<>&é☃{{%"
"""Characters changed by the usual escapes, each in its own way."""
_PAD = "\v \t\v"
"""White space that no template writes itself; shows whether a template trims."""


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ascii_json(text: str) -> str:
    return json.dumps(text)[1:-1]


def _html_json(text: str) -> str:
    safe = _ascii_json(text)
    for character in "<>&'":
        safe = safe.replace(character, f"\\u{ord(character):04x}")
    return safe


Escape = Callable[[str], str]
_ESCAPES: tuple[Escape, ...] = (str, _json, _ascii_json, _html_json)


@dataclass(frozen=True, slots=True)
class MarkPlace:
    """A place in rendered text where a template put a marked value."""

    index: int
    """Index of the mark."""
    escape: Escape | None
    """The template's escaping of the value; None if unknown."""
    left_kept: bool = True
    """Whether white space before the value survives."""
    right_kept: bool = True

    def fill(self, value: str) -> str:
        """The template's text for this value here."""
        value = value if self.left_kept else value.lstrip()
        value = value if self.right_kept else value.rstrip()
        return self.escape(value) if self.escape else value


class Marks:
    """Factory of marks, and finder of marks in rendered text.

    A mark is `open probe close`, with random numbers in `open` and `close` that the author of a message or a document
    cannot know. The text between them after rendering shows how the template escapes.
    """

    def __init__(self) -> None:
        self._secret = "kv" + secrets.token_hex(12)
        self._is_padded: list[bool] = []

    def mark(self, *, padded: bool = False) -> str:
        """The next mark; `padded` with white space, to detect trimming."""
        index, pad = len(self._is_padded), _PAD if padded else ""
        self._is_padded.append(padded)
        return f"{pad}{self._secret}o{index}x{_PROBE}{self._secret}c{index}x{pad}"

    def end_mark(self, index: int) -> str:
        """A mark after a real value, to find its end."""
        return f"{self._secret}e{index}x"

    def is_in(self, text: str) -> bool:
        """Whether a text contains part of a mark: its beginning, also in capitals, or its padding."""
        return self._secret[:8] in text.lower() or _PAD in text

    def split(self, text: str) -> list[str | MarkPlace]:
        """Splits rendered text into template text and places of marks, alternating; text is first and last."""
        first, *rest = text.split(self._secret + "o")
        items: list[str | MarkPlace] = [first]
        for part in rest:
            number, _, body = part.partition("x")
            shown, found, after = body.partition(f"{self._secret}c{number}x")
            if found:
                escape = next((escape for escape in _ESCAPES if escape(_PROBE) == shown), None)
                items += [MarkPlace(int(number), escape), after]
            else:
                items[-1] = f"{items[-1]}{self._secret}o{part}"  # half a mark: the template split it
        for index, place in enumerate(items):
            if isinstance(place, MarkPlace) and self._is_padded[place.index]:
                _take_pads(items, index, place)
        return items


def _take_pads(items: list[str | MarkPlace], index: int, place: MarkPlace) -> None:
    """Removes the padding of a mark from the template's text and notes in its place whether it was there."""
    pad = place.escape(_PAD) if place.escape else _PAD
    before, after = items[index - 1], items[index + 1]
    assert isinstance(before, str) and isinstance(after, str)
    items[index - 1] = before.removesuffix(pad)
    items[index + 1] = after.removeprefix(pad)
    items[index] = replace(place, left_kept=before.endswith(pad), right_kept=after.startswith(pad))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Maps every text inside lists and mappings; keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value
