"""Wrappers: a template's text around each document, derived from its text around all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

NUMBER = None
"""Placeholder of a number that changes from document to document."""
Atoms = tuple[str | None, ...]
"""Text as single characters and `NUMBER`s."""


def unify(texts: Sequence[str]) -> Atoms | None:
    """The common text, if the texts differ in numbers only; otherwise None."""
    rows = [re.split(r"(\d+)", text) for text in texts]
    if len({len(row) for row in rows}) != 1:
        return None
    atoms: list[str | None] = []
    for index, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) == 1:
            atoms += column[0]
        elif index % 2:
            atoms.append(NUMBER)
        else:
            return None
    return tuple(atoms)


def written(atoms: Atoms) -> str:
    """The text without the changing numbers."""
    return "".join(atom for atom in atoms if atom is not NUMBER)


@dataclass(frozen=True, slots=True)
class GapCut:
    """Cuts of the text between two documents, and of the texts around all of them.

    head text | prefix  DOCUMENT  suffix | prefix  DOCUMENT  suffix | tail text
              ^head_end                  ^place                     ^tail_start
    """

    place: int
    """Number of atoms of the gap that belong to the document before it."""
    head_end: int
    tail_start: int


def cut_gap(gap: Atoms, before: str, after: str) -> GapCut:
    """Finds the wrapper of a single document from the gap between two and the text before and after all.

    The end of the gap that also ends `before` is written before a document, the beginning that also begins `after`
    after it. Often several cuts agree with both; then a cut right after a line break is taken, and never one inside a
    word or a tag. Text that agrees with neither is only between documents: it goes after every document, the last one
    included.
    """
    ends = _backward(gap, before)
    starts = _forward(gap, after)
    lowest, highest = len(gap) - (len(ends) - 1), len(starts) - 1
    place = _best(gap, range(lowest, (highest if lowest <= highest else len(gap)) + 1))
    return GapCut(place, ends[len(gap) - place], starts[min(place, highest)])


def _backward(gap: Atoms, text: str) -> list[int]:
    """For each number of last atoms that end the text: where in the text they begin."""
    positions = [len(text)]
    for atom in reversed(gap):
        end = positions[-1]
        if atom is NUMBER:
            start = len(text[:end].rstrip("0123456789"))
        else:
            start = end - 1 if text[:end].endswith(atom) else end
        if start == end:
            break
        positions.append(start)
    return positions


def _forward(gap: Atoms, text: str) -> list[int]:
    """For each number of first atoms that begin the text: where in the text they end."""
    positions = [0]
    for atom in gap:
        start = positions[-1]
        if atom is NUMBER:
            end = len(text) - len(text[start:].lstrip("0123456789"))
        else:
            end = start + 1 if text.startswith(atom, start) else start
        if start == end:
            break
        positions.append(end)
    return positions


def _best(gap: Atoms, places: range) -> int:
    """The most natural of several equally correct cuts."""
    text = "".join("0" if atom is NUMBER else atom for atom in gap)
    inside = {
        place
        for match in re.finditer(r"<[^<>\n]*>|\[[^\[\]\n]*\]|\w+", text)
        for place in range(match.start() + 1, match.end())
    }
    allowed = [place for place in places if place not in inside] or list(places)
    lines = [place for place in allowed if place and text[place - 1] == "\n"]
    if lines:
        return lines[-1]
    return next((place for place in allowed if place), allowed[0])
