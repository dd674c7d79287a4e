"""Tokenization of long texts in overlapping parts, with the same result as for the whole text.

A call that tokenizes megabytes cannot be interrupted, and makes a Python object of every number. So a long text is
cut into overlapping parts. In the middle of each overlap both parts must have the same tokens; there they are joined:

    part 1      [ t t t t t t t t t t t t ]
    part 2                    [ t t t t t t t t t t t t ]
                                  ====  the same in both
    joined      [ t t t t t t t t t t t t t t t t t t t ]

Tokenization is local: it depends on nearby characters, not on characters thousands away. Where that does not hold,
the tokens of an overlap differ, and the text is tokenized as a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

PART_CHARACTERS = 2**15
OVERLAP_CHARACTERS = 2**12
EDGE_CHARACTERS = 2**9
"""Characters at each end of an overlap where tokens may differ, because one of the parts is cut there."""


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Tokens:
    """Tokens of a text, with their character spans."""

    ids: array[int] = field(default_factory=_numbers)
    starts: array[int] = field(default_factory=_numbers)
    ends: array[int] = field(default_factory=_numbers)

    @classmethod
    def of(cls, ids: Iterable[int], spans: Iterable[tuple[int, int]], offset: int = 0) -> Tokens:
        """Tokens from a tokenizer's output; `offset` is added to its characters."""
        tokens = cls(array("q", ids))
        for start, end in spans:
            tokens.starts.append(offset + start)
            tokens.ends.append(offset + end)
        return tokens

    def between(self, first: int, last: int) -> tuple[bytes, bytes]:
        """Ids and starts of the tokens that begin in [first, last), for comparison."""
        begin, end = bisect_left(self.starts, first), bisect_left(self.starts, last)
        return self.ids[begin:end].tobytes(), self.starts[begin:end].tobytes()

    def join(self, later: Tokens, place: int) -> None:
        """Appends the tokens of a later part that begin at or after a character."""
        index, begin = bisect_left(self.starts, place), bisect_left(later.starts, place)
        for mine, its in ((self.ids, later.ids), (self.starts, later.starts), (self.ends, later.ends)):
            del mine[index:]
            mine.extend(its[begin:])


def tokenize_long(
    tokenize: Callable[[int, int], Tokens],
    start: int,
    end: int,
    *,
    part: int = PART_CHARACTERS,
    overlap: int = OVERLAP_CHARACTERS,
    edge: int = EDGE_CHARACTERS,
) -> Tokens:
    """Tokens of the characters [start, end) of a text.

    Args:
        tokenize: tokenizes a part of the text, from one character to another.
        start: the first character.
        end: one past the last character.
        part: characters per tokenizer call.
        overlap: common characters of two parts.
        edge: characters at both ends of an overlap that are not compared.
    """
    right = min(start + part, end)
    tokens = tokenize(start, right)
    while right < end:
        left = right - overlap
        later_right = min(left + part, end)
        later = tokenize(left, later_right)
        first, last = left + edge, right - edge
        common = tokens.between(first, last)
        if not common[0] or common != later.between(first, last):
            return tokenize(start, end)
        tokens.join(later, tokens.starts[bisect_left(tokens.starts, first)])
        right = later_right
    return tokens
