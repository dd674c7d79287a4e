"""Documents that are alike: a model mixes them up if each of them was computed as the first one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Literal

from kvmosaic.prompt import Prompt
from kvmosaic.prompt.companions import NUM_COMPANIONS

TokenIds = Sequence[int]
Companion = tuple[int, ...]
Likeness = Literal["", "apart", "met"]
"""Of documents: they differ; some are alike, and none has met another; or they have, as companions of their kind."""

MIXED_UP = "documents are alike, and may be mixed up"
IN_FULL = "documents are alike, so they are read in full; companions of their kind, or a repair, let them be reused"

_MIN_SHARE, _MIN_PAIRS = 0.36, 8
_COMPARED = 128
"""Tokens that are compared, at the start and at the end of each document."""
_NEIGHBOURS = 3
"""How far apart in a prompt documents are compared."""


def alike_pair(documents: Sequence[TokenIds]) -> tuple[int, int] | None:
    """The numbers of two documents that are alike, in start and end: many of their pairs of tokens are the same.

    Records of one kind have 34% to 95% of these pairs in common in six languages (`kvmosaic eval --tasks similar`),
    paragraphs of one article 0% to 32% (XQuAD), source files of one project 0% to 28%.
    """
    known = [_Form(ids) for ids in documents]
    return next((near for near in _near(documents) if known[near[0]].is_like(known[near[1]])), None)


def alike_companions(documents: Sequence[TokenIds], companions: Iterable[Companion]) -> Iterator[Companion]:
    """The companions that are like one of the documents, or are one of them."""
    known = [_Form(ids) for ids in documents]
    for companion in companions:
        form = _Form(companion)
        if any(form.is_like(other) for other in known):
            yield companion


def likeness_of(documents: Sequence[TokenIds], companions: Iterable[Companion]) -> Likeness:
    """Whether documents are alike, and have met others of their kind."""
    pair = alike_pair(documents)
    if pair is None:
        return ""
    return "met" if any(alike_companions([documents[pair[0]]], companions)) else "apart"


def with_kin(prompt: Prompt) -> Prompt:
    """A prompt with the few of its companions that are like its documents, or with the first few."""
    if len(prompt.companions) <= 1 or not prompt.chunks:
        return prompt
    kin = alike_companions([chunk.token_ids or () for chunk in prompt.chunks], prompt.companions)
    return replace(prompt, companions=tuple(islice(kin, NUM_COMPANIONS)) or prompt.companions[:NUM_COMPANIONS])


def _near(documents: Sequence[TokenIds]) -> Iterator[tuple[int, int]]:
    """Pairs of documents that are near each other and are not the same."""
    count = len(documents)
    for first in range(count):
        for second in range(first + 1, min(first + 1 + _NEIGHBOURS, count)):
            if documents[first] != documents[second]:
                yield first, second


class _Form:
    """Which tokens follow one another in a document."""

    def __init__(self, ids: TokenIds) -> None:
        self._ids = ids
        self._start = frozenset(pairwise(ids[:_COMPARED]))

    def is_like(self, other: _Form) -> bool:
        return _have_in_common(self._start, other._start) and _have_in_common(self._end, other._end)

    @cached_property
    def _end(self) -> frozenset[tuple[int, int]]:
        return frozenset(pairwise(self._ids[-_COMPARED:]))


def _have_in_common(one: frozenset[tuple[int, int]], other: frozenset[tuple[int, int]]) -> bool:
    return len(one & other) >= _MIN_SHARE * max(min(len(one), len(other)), _MIN_PAIRS)
