"""Sections of a long document: borders at headings and blank lines that an edit elsewhere does not move."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

_HEADING = re.compile(r"^ {0,3}(?:(#{1,6})[ \t]|<h([1-6])[ >\t])", re.MULTILINE | re.IGNORECASE)
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*")
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^\n]*)", re.MULTILINE)
_NUM_LEVELS = 6
_NEARBY_CHARACTERS = 64


def section_borders(text: str, starts: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens before which a document is divided into sections, in order.

        # Guide          0         a part of more than `max_tokens` is divided at its headings of the highest level,
        ## Ferries       12        those still longer at the next level, …
        ## Trains        340       and a part without headings at some of its blank lines
        ### Night trains 512

    A part is divided by its own text alone, so an edit moves borders only inside the smallest part around it. Which
    blank lines divide a part depends on the text next to them (content-defined chunking), so borders far from an edit
    stay, too. Costs O(text).

    Args:
        text: the document.
        starts: the character at which each of its tokens starts, ascending.
        max_tokens: parts with at most so many tokens are not divided. A part with too few headings and blank lines
            stays longer.
    """
    headings: list[list[int]] = [[] for _ in range(_NUM_LEVELS)]
    fenced, ends = _fenced(text)
    for found in _HEADING.finditer(text):
        block = bisect_right(fenced, found.start()) - 1
        if block < 0 or found.start() >= ends[block]:  # not a comment in a block of code
            headings[len(found[1]) - 1 if found[1] else int(found[2]) - 1].append(found.start())
    borders = [0, len(starts)]
    for places in headings:
        borders = _divided(borders, _tokens_at(places, starts), max_tokens)
    paragraphs = [found.end() for found in _BLANK_LINE.finditer(text) if found.end() < len(text)]
    marks = [_mark(text, place) for place in paragraphs]
    chosen = _local_minima(_tokens_at(paragraphs, starts), marks, max_tokens // 4)
    return _divided(borders, chosen, max_tokens)[1:-1]


def _fenced(text: str) -> tuple[list[int], list[int]]:
    """Where the fenced blocks of code begin and end, in order; a fence without an end begins none."""
    begins, ends = list[int](), list[int]()
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2].strip():
            begins.append(opened.start())
            ends.append(fence.end())
            opened = None
    return begins, ends


def _divided(borders: Sequence[int], places: Sequence[int], max_tokens: int) -> list[int]:
    """Adds the places inside parts that are too long."""
    result, index = [borders[0]], 0
    for first, end in pairwise(borders):
        while index < len(places) and places[index] < end:
            if end - first > max_tokens and places[index] > result[-1]:
                result.append(places[index])
            index += 1
        result.append(end)
    return result


def _tokens_at(places: Sequence[int], starts: Sequence[int]) -> list[int]:
    """For each character, the first token that holds it."""
    return [bisect_left(starts, starts[max(bisect_right(starts, place) - 1, 0)]) for place in places]


def _mark(text: str, place: int) -> int:
    """A number that depends on the text around a place only."""
    nearby = text[max(place - _NEARBY_CHARACTERS, 0) : place + _NEARBY_CHARACTERS]
    return crc32(nearby.encode("utf-8", "surrogatepass"))


def _local_minima(places: Sequence[int], marks: Sequence[int], distance: int) -> list[int]:
    """The places with a smaller mark than all others within a distance; of equal marks the first.

    Each of them depends on what is within the distance only. Costs O(places): the window is a queue of ascending marks.
    """
    window: deque[int] = deque()
    chosen, behind = [], 0
    for index, place in enumerate(places):
        while behind < len(places) and places[behind] <= place + distance:
            while window and marks[window[-1]] > marks[behind]:
                window.pop()
            window.append(behind)
            behind += 1
        while places[window[0]] < place - distance:
            window.popleft()
        if window[0] == index:
            chosen.append(place)
    return chosen
