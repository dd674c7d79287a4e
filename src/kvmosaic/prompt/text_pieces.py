"""Pieces: text with its origin."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A run of text from one author."""

    text: str
    trusted: bool
    """Whether control tokens written in it count. True for the chat template and the operator of the system."""
    message: int | None = None
    """The message that it is the content of, if any."""


def template(text: str) -> TextPiece:
    """Text of the chat template."""
    return TextPiece(text, trusted=True)


def foreign(text: str, message: int | None = None) -> TextPiece:
    """Text of a user or a document: always ordinary text, without control tokens."""
    return TextPiece(text, trusted=False, message=message)


def joined(pieces: Iterable[TextPiece]) -> str:
    """The concatenated text of all pieces."""
    return "".join(piece.text for piece in pieces)


def merged(pieces: Iterable[TextPiece]) -> tuple[TextPiece, ...]:
    """The same text with neighbours of the same origin joined; empty ones stay only for a message."""
    result: list[TextPiece] = []
    for piece in pieces:
        if result and result[-1].trusted and piece.trusted:
            result[-1] = template(result[-1].text + piece.text)
        elif piece.text or piece.message is not None:
            result.append(piece)
    return tuple(result)


def split_pieces(pieces: Sequence[TextPiece], place: int) -> tuple[tuple[TextPiece, ...], tuple[TextPiece, ...]]:
    """The pieces before and after a place in their joined text; a piece around it is cut in two."""
    before, after, start = list[TextPiece](), list[TextPiece](), 0
    for piece in pieces:
        cut = min(max(place - start, 0), len(piece.text))
        if cut or not piece.text:
            before.append(replace(piece, text=piece.text[:cut]))
        if cut < len(piece.text):
            after.append(replace(piece, text=piece.text[cut:]))
        start += len(piece.text)
    return merged(before), merged(after)


def foreign_intervals(pieces: Sequence[TextPiece]) -> list[tuple[int, int]]:
    """Untrusted intervals of the joined text: (start, end) in ascending order."""
    intervals, start = [], 0
    for piece in pieces:
        end = start + len(piece.text)
        if not piece.trusted and piece.text:
            intervals.append((start, end))
        start = end
    return intervals


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of leading items that two sequences share; compares slices, so that long texts take no loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
