"""Packed rows: a prompt with several continuations as one causal forward without moved keys.

    layout    system | chunk 1 | chunk 2, moved by d | question a
                                                     | question b
    rows      system | chunk 1 | system, d later | chunk 2 there | question a | question b

A chunk that is moved takes what it saw along: keys depend on distances only, so both together, d positions later, are
what it was computed from. Nothing is rotated twice and nothing of the engine's attention is used, so the same rows are
a reference of it, too. Questions after the same documents see these and themselves, not each other, so reading the
documents is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.layout import Layout
from kvmosaic.prompt import Prompt


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of one forward.

    token_ids, positions: [T]
    mask: [T, T], True where the row token sees the column token
    continuations: rows of each continuation
    documents: rows of each document as the questions see it
    """

    token_ids: Tensor
    positions: Tensor
    mask: Tensor
    continuations: tuple[slice, ...]
    documents: tuple[slice, ...]


def composed_rows(layout: Layout, continuations: Sequence[Sequence[int]]) -> PackedRows:
    """Rows of a composed prompt, whose last span is replaced by each continuation (a question and its answer)."""
    rows = _Rows()
    places: dict[tuple[int, int], slice] = {}

    def add(index: int, shift: int) -> slice:
        if (index, shift) not in places:
            span = layout.spans[index]
            assert not span.positions and all(view.visibility is None for view in span.views), "nothing is repaired"
            seen = [add(view.span, view.distance + shift) for view in span.views]
            places[index, shift] = rows.add(span.token_ids, span.start + shift, seen)
        return places[index, shift]

    last = layout.last
    seen = [add(view.span, view.distance) for view in last.views]
    documents = [rows_of for view, rows_of in zip(last.views, seen, strict=True) if layout.spans[view.span].is_chunk]
    return rows.packed([rows.add(each, last.start, seen) for each in continuations], documents)


def ordinary_rows(prompt: Prompt, continuations: Sequence[Sequence[int]]) -> PackedRows:
    """Rows of ordinary causal attention over the same segments, one after the other."""
    rows = _Rows()
    seen: list[slice] = []
    documents = []
    for segment in prompt.segments[:-1]:
        seen.append(rows.add(segment.token_ids or (), rows.num_rows, list(seen)))
        if segment.kind == "chunk":
            documents.append(seen[-1])
    end = rows.num_rows
    return rows.packed([rows.add(each, end, seen) for each in continuations], documents)


class _Rows:
    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._seen: list[tuple[slice, Sequence[slice]]] = []

    @property
    def num_rows(self) -> int:
        return len(self._token_ids)

    def add(self, token_ids: Sequence[int], start: int, seen: Sequence[slice]) -> slice:
        rows = slice(len(self._token_ids), len(self._token_ids) + len(token_ids))
        self._token_ids.extend(token_ids)
        self._positions.extend(range(start, start + len(token_ids)))
        self._seen.append((rows, tuple(seen)))
        return rows

    def packed(self, continuations: Sequence[slice], documents: Sequence[slice]) -> PackedRows:
        count = len(self._token_ids)
        mask = torch.zeros(count, count, dtype=torch.bool)
        for rows, seen in self._seen:
            mask[rows, rows] = torch.ones(rows.stop - rows.start, rows.stop - rows.start, dtype=torch.bool).tril()
            for columns in seen:
                mask[rows, columns] = True
        return PackedRows(
            torch.tensor(self._token_ids),
            torch.tensor(self._positions),
            mask,
            tuple(continuations),
            tuple(documents),
        )
