"""Preemption order: scores that select which running sequences are preempted first."""

from __future__ import annotations

from collections.abc import Iterable

from kvmosaic.engine.sequence import Sequence

AGE_SECONDS = 60.0
"""Age at which the age score of a request is one half."""
SIZE_TOKENS = 4_096
"""Own tokens from which on the size score of a sequence is 1."""


def preemption_score(sequence: Sequence, now: float) -> float:
    """Scores how much a running sequence should keep running; the lowest is preempted first.

        score = 0.4 priority + 0.3 progress + 0.2 age - 0.1 size          each from 0 to 1

        priority    of the request: 0 is 0.5, higher ones go towards 1, lower ones towards 0
        progress    computed fraction of its tokens, including the max_tokens of its answer: a sequence that is nearly
                    done soon frees its blocks anyway
        age         since the request arrived
        size        tokens of question and answer (or of the plain prompt), which a preemption frees

    The eviction policy `priority` has the same weights for chunks. There, age is time without use.
    """
    allocation = sequence.allocation
    assert allocation is not None
    priority = sequence.request.priority
    wanted = 0.5 + 0.5 * priority / (1 + abs(priority))
    computed = sum(span.num_computed for span in allocation.spans)
    total = sum(span.num_tokens for span in allocation.spans) + sequence.num_tokens_left
    waited = max(now - sequence.request.arrival_time, 0.0)
    size = min(allocation.last.num_tokens / SIZE_TOKENS, 1.0)
    return 0.4 * wanted + 0.3 * computed / total + 0.2 * waited / (waited + AGE_SECONDS) - 0.1 * size


def in_order(sequences: Iterable[Sequence], now: float) -> list[Sequence]:
    """Running sequences in preemption order; among equal scores, the largest sort key first.

    Sequences that compute a chunk which others wait for come last: it would have to be started again.
    """

    def place(sequence: Sequence) -> tuple[float, ...]:
        return (computes_for_others(sequence), preemption_score(sequence, now), *(-part for part in sequence.sort_key))

    return sorted(sequences, key=place)


def computes_for_others(sequence: Sequence) -> bool:
    """Whether a running sequence computes a chunk that another one waits for."""
    assert sequence.allocation is not None
    return any(
        span.is_owner and span.chunk is not None and not span.chunk.is_ready and span.chunk.ref_count > 1
        for span in sequence.allocation.spans
    )


def in_cooldown(sequence: Sequence) -> bool:
    """Whether a sequence may not be preempted for a higher priority now.

    It may once it has been computed for twice as many tokens as at its last preemption, counting recomputation. So
    each time it gets twice as far, and however many requests of high priority arrive, at most about two thirds of all
    its computation is wasted.
    """
    return sequence.num_worked < 2 * sequence.num_worked_before
