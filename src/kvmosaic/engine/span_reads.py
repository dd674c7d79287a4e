"""Span reads: the runs of stored keys that a view of a span reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvmosaic.attention import Piece, PoolName
from kvmosaic.cache import BlockTable
from kvmosaic.layout import Span, View
from kvmosaic.prompt import SegmentKind

_MAX_STRETCHES = 8
"""max_stretches of keys between hidden ones that are read one by one; more are read at once, with a mask."""


def pool_of(span: Span) -> PoolName:
    """The pool that holds a span's tokens."""
    return "chunk_cache" if span.segment.kind is SegmentKind.CHUNK else "request"


def run_reads(span: Span, table: BlockTable, distance: int, num_tokens: int) -> tuple[Piece, ...]:
    """Reads of the first `num_tokens` tokens of a span, moved by `distance`."""
    return tuple(_between(span, table, distance, 0, num_tokens))


def view_reads(
    span: Span, table: BlockTable, view: View, first_row: int = 0, num_rows: int | None = None
) -> tuple[Piece, ...]:
    """Reads of a span through a view: without hidden tokens, and each row as far as it sees.

    Args:
        span: the span that is read.
        table: its block table.
        view: what is visible of it.
        first_row: number of the first reading token, in its own span.
        num_rows: number of reading tokens; None: the view shows all of them the same.
    """
    if view.is_plain:
        return run_reads(span, table, view.distance, span.num_tokens)
    ends = view.ends[first_row : first_row + num_rows] if view.ends and num_rows is not None else ()
    if ends and min(ends) == max(ends):
        kept, ends = ends[0], ()
    else:
        kept = max(ends, default=span.num_tokens)
    stretches = list(_stretches(view.hidden, kept))
    if ends or len(stretches) > _MAX_STRETCHES:
        return tuple(_masked(run_reads(span, table, view.distance, kept), view, ends))
    return tuple(
        _weighted(read, view) for first, last in stretches for read in _between(span, table, view.distance, first, last)
    )


def _between(span: Span, table: BlockTable, distance: int, first: int, last: int) -> Iterator[Piece]:
    """Reads of tokens `first` to `last`, exclusive."""
    number = first
    for run in table.runs_between(first, last) if first else table.runs(last):
        positions = tuple(position + distance for position in span.positions[number : number + run.num_tokens])
        position = positions[0] if positions else span.start + distance + number
        yield Piece(pool_of(span), run.first_slot, run.num_tokens, position, distance, positions=positions)
        number += run.num_tokens


def _stretches(hidden: tuple[int, ...], num_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens between hidden ones, as (first, last + 1)."""
    first = 0
    for token in (*hidden, num_tokens):
        token = min(token, num_tokens)
        if first < token:
            yield first, token
        first = token + 1


def _masked(reads: tuple[Piece, ...], view: View, ends: tuple[int, ...]) -> Iterator[Piece]:
    number = 0
    for read in reads:
        last = number + read.num_tokens
        yield replace(
            _weighted(read, view),
            hidden=tuple(token - number for token in view.hidden if number <= token < last),
            ends=tuple(min(max(end - number, 0), read.num_tokens) for end in ends),
        )
        number = last


def _weighted(read: Piece, view: View) -> Piece:
    return replace(read, factor=view.weight.factor, bias=view.weight.bias)
