"""Preemption: selection of running sequences to preempt, and swapping or recomputing what they have computed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

from kvmosaic.cache import KVCache
from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.shares import HYSTERESIS, Shares
from kvmosaic.engine.step import Step
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import OutOfBlocks, QuotaInUse

PREEMPTION_GAP = 10
"""Steps of priority above a running sequence from which on a request preempts it; fewer are only order."""

TIME_SLICE_SECONDS = 60.0
"""Time slice of an answer with a rolling window: so long that restoring it is little beside it."""
FINITE_SLICES = 10
"""Time slices of an answer that is sure to end: finishing it is cheaper than recomputing it."""

AGE_SECONDS = 60.0
"""Age at which the age score of a request is one half."""
SIZE_TOKENS = 4_096
"""Own tokens from which on the size score of a sequence is 1."""

PreemptionKind = Literal["recompute", "swap"]


class Preemption:
    """Selects sequences to preempt, in two situations.

    A running answer needs a block and none is free. Sequences of its tenant with a larger sort key are preempted, and
    those of other tenants that hold more, or else it is preempted itself. So the first in order of the tenant that
    holds least is never preempted: it finishes, then the next one is first.

    A request waits and there is no room for it, neither a running slot nor blocks. If that makes room, these are
    preempted:

    - running ones whose priority is lower by `PREEMPTION_GAP` and whose sort key is larger (it may be smaller if they
      have waited long), unless they are in cooldown from their last preemption (see `in_cooldown`);
    - else those of a tenant that holds more than the waiting one would hold then (see `Shares`);
    - else those whose time slice is over and that would sort after it if they arrived now (see `TimeSlice`). They are
      requeued after it. So no request starves, however many answers never end.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        shares: Shares,
        swap: SwapSpace | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.swap = swap
        """Host memory for swapped-out blocks; None: preempted tokens are always recomputed."""
        self.counts: dict[PreemptionKind, int] = {"recompute": 0, "swap": 0}
        """Preempted sequences, by kind: recomputed or swapped."""
        self._kv_cache = kv_cache
        self._shares = shares
        self._clock = clock

    def save(self, sequence: Sequence) -> None:
        """Swaps out what a sequence has computed, if that is worth it; its blocks are released later."""
        assert sequence.allocation is not None
        is_saved = self.swap is not None and not sequence.allocation.is_stale and self.swap.save(sequence)
        self.counts["swap" if is_saved else "recompute"] += 1

    def victim(self, sequence: Sequence, running: Collection[Sequence], step: Step) -> Sequence | None:
        """The sequence that frees a block for a running one: one not in this step, or itself; None if it is alone."""
        busy = {id(work.sequence) for work in step.works}
        others = [other for other in running if other is not sequence and id(other) not in busy]
        tenant, blocks = sequence.tenant, Counter[str]()
        if any(other.tenant != tenant for other in others):
            blocks = self.blocks_by_tenant(running, self._kv_cache.request_pool.name)

        def is_behind(other: Sequence) -> bool:
            if other.tenant == tenant or other.request.priority != sequence.request.priority:
                return other.sort_key >= sequence.sort_key
            mine, theirs = blocks[tenant] + 1, blocks[other.tenant]
            if self._shares.is_fairer(tenant, HYSTERESIS * mine, other.tenant, theirs):
                return True
            return other.sort_key >= sequence.sort_key and not self._shares.is_fairer(
                other.tenant, HYSTERESIS * theirs, tenant, mine
            )

        behind = [other for other in others if is_behind(other)]
        if behind:
            return in_order(behind, self._clock())[0]
        return None if len(running) == 1 else sequence

    def select_victims(
        self,
        waiting: Sequence,
        running: Collection[Sequence],
        num_running: Mapping[str, int],
        *,
        is_full: bool,
        was_refused: bool,
    ) -> list[Sequence]:
        """Selects sequences to preempt for a waiting one; none, unless that makes room for it.

        Args:
            waiting: the waiting sequence.
            running: candidates for preemption.
            num_running: number of running sequences by tenant.
            is_full: whether max_num_seqs sequences run.
            was_refused: whether there were not enough blocks for it in the last step.
        """
        lower = [other for other in running if self._is_much_lower(waiting, other)]
        equal, over = [], []
        if is_full or was_refused:
            equal = [other for other in running if self._may_share(waiting, other, num_running, is_full=is_full)]
            over = [other for other in running if self._has_used_its_slice(waiting, other, num_running)]
        if not (lower or equal or over):
            return []
        prompt = waiting.request.prompt
        error = self._kv_cache.why_blocked(self._kv_cache.plan(waiting.layout, prompt.salt, prompt.tenant))
        if error is None and not is_full:
            return []
        now = self._clock()
        chosen = self._enough(in_order(lower, now), running, error)
        chosen = chosen or self._even_out(waiting, equal, running, num_running, error)
        if not chosen:
            over = in_order(over, now)
            over.sort(key=lambda other: -self._shares.load(other.tenant, num_running[other.tenant]))
            chosen = self._enough(over, running, error, of_tenant=waiting.tenant)
            for other in chosen:
                other.requeue(now)
        return chosen

    def blocks_by_tenant(self, sequences: Iterable[Sequence], pool: str) -> Counter[str]:
        """Blocks of a pool that running sequences hold; shared ones count once for each tenant."""
        held: dict[str, set[object]] = {}
        counts: Counter[str] = Counter()
        for sequence in sequences:
            assert sequence.allocation is not None
            blocks = held.setdefault(sequence.tenant, set())
            for span in sequence.allocation.spans:
                if (span.chunk is not None) == (pool != self._kv_cache.request_pool.name):
                    blocks.update(span.table.block_ids)
        for tenant, blocks in held.items():
            counts[tenant] = len(blocks)
        return counts

    def _is_much_lower(self, waiting: Sequence, other: Sequence) -> bool:
        """Whether priorities allow a waiting sequence to preempt a running one."""
        if waiting.request.priority - other.request.priority < PREEMPTION_GAP or waiting.sort_key >= other.sort_key:
            return False
        return not computes_for_others(other) and not in_cooldown(other)

    def _has_used_its_slice(self, waiting: Sequence, other: Sequence, num_running: Mapping[str, int]) -> bool:
        """Whether a running sequence may be preempted for one that would sort before it, were both to arrive now.

        If the waiting one's tenant runs something, it must not have more than the other afterwards.
        """
        now = self._clock()
        if waiting.sort_key >= other.sort_key_from(now):
            return False
        num_slices = 1 if other.window is not None else FINITE_SLICES
        if not other.time_slice.is_over(now, num_slices * TIME_SLICE_SECONDS):
            return False
        mine, theirs = waiting.tenant, other.tenant
        if (
            num_running.get(mine)
            and mine != theirs
            and self._shares.is_fairer(theirs, num_running[theirs], mine, num_running[mine] + 1)
        ):
            return False
        return not computes_for_others(other)

    def _may_share(self, waiting: Sequence, other: Sequence, num_running: Mapping[str, int], *, is_full: bool) -> bool:
        mine, theirs = waiting.tenant, other.tenant
        if mine == theirs or other.request.priority > waiting.request.priority or computes_for_others(other):
            return False
        if not is_full:
            return not num_running.get(mine)
        return self._shares.may_take(mine, num_running.get(mine, 0), 1, theirs, num_running[theirs])

    def _enough(
        self,
        able: list[Sequence],
        running: Collection[Sequence],
        error: OutOfBlocks | None,
        of_tenant: str | None = None,
    ) -> list[Sequence]:
        """The shortest prefix of the candidates that makes room; empty, if all of them do not.

        Args:
            able: the candidates.
            running: all running sequences.
            error: the shortage, if it is not only one of running slots.
            of_tenant: the first candidate of this tenant, where the missing amount is not known.
        """
        if error is None or not able:
            return able[:1]
        if isinstance(error, QuotaInUse) or error.num_missing is None:
            return [other for other in able if other.tenant == of_tenant][:1]
        chosen: list[Sequence] = []
        if self._makes_room(able, running, error.pool, error.num_missing):
            for other in able:
                chosen.append(other)
                if self._makes_room(chosen, running, error.pool, error.num_missing):
                    break
        return chosen

    def _even_out(
        self,
        waiting: Sequence,
        able: list[Sequence],
        running: Collection[Sequence],
        num_running: Mapping[str, int],
        error: OutOfBlocks | None,
    ) -> list[Sequence]:
        """Candidates of tenants above their share, the last in order of the tenant with the largest load first."""
        if isinstance(error, QuotaInUse) or (error is not None and error.num_missing is None):
            return []
        tenant, sizes = waiting.tenant, dict.fromkeys(able, 1)
        held, wanted = Counter(num_running), 1
        if error is not None:
            able = [other for other in able if not in_cooldown(other)]
            held = self.blocks_by_tenant(running, error.pool)
            sizes = {other: self.blocks_by_tenant([other], error.pool)[other.tenant] for other in able}
            wanted = self._blocks_wanted(waiting, error.pool)
        chosen: list[Sequence] = []
        while able:
            most = max({other.tenant for other in able}, key=lambda each: self._shares.load(each, held[each]))
            if not self._shares.may_take(tenant, held[tenant], wanted, most, held[most]):
                return []
            candidates = [each for each in able if each.tenant == most]
            other = max(candidates, key=lambda each: (not in_cooldown(each), each.sort_key))
            chosen.append(other)
            if error is None or self._makes_room(chosen, running, error.pool, error.num_missing or 0):
                return chosen
            able.remove(other)
            held[most] -= sizes[other]
        return []

    def _blocks_wanted(self, waiting: Sequence, pool: str) -> int:
        """Blocks of a pool that a sequence holds once it is allocated."""
        of_chunks = pool != self._kv_cache.request_pool.name
        spans = (span for span in waiting.layout.spans if span.is_chunk == of_chunks)
        return sum(self._kv_cache.request_pool.blocks_for(span.num_tokens) for span in spans)

    def _makes_room(
        self, chosen: Collection[Sequence], running: Collection[Sequence], pool: str, num_missing: int
    ) -> bool:
        """Whether enough blocks are free once these are preempted and the others have grown by the next token."""
        if pool == self._kv_cache.request_pool.name:
            staying = [other.allocation for other in running if other not in chosen and other.pending is not None]
            num_missing += sum(
                allocated.last.table.blocks_to_append(1) for allocated in staying if allocated is not None
            )
        leaving = [other.allocation for other in chosen if other.allocation is not None]
        return self._kv_cache.freed_by(leaving)[pool] >= num_missing


def preemption_score(sequence: Sequence, now: float) -> float:
    """Scores how much a running sequence should keep running; the lowest is preempted first.

        score = 0.4 priority + 0.3 progress + 0.2 age - 0.1 size          each from 0 to 1

        priority    of the request, see `Request.eviction_priority`
        progress    computed fraction of its tokens, including the max_tokens of its answer: a sequence that is nearly
                    done soon frees its blocks anyway
        age         since the request arrived
        size        tokens of question and answer (or of the plain prompt), which a preemption frees

    The eviction policy `priority` has the same weights for chunks and released blocks. There, age is time without use.
    """
    allocation = sequence.allocation
    assert allocation is not None
    priority = sequence.request.eviction_priority
    computed = sum(span.num_computed for span in allocation.spans)
    total = sum(span.num_tokens for span in allocation.spans) + sequence.num_tokens_left
    waited = max(now - sequence.request.arrival_time, 0.0)
    size = min(allocation.last.num_tokens / SIZE_TOKENS, 1.0)
    return 0.4 * priority + 0.3 * computed / total + 0.2 * waited / (waited + AGE_SECONDS) - 0.1 * size


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
    return any(span.is_owner and span.chunk is not None and span.chunk.is_awaited for span in sequence.allocation.spans)


def in_cooldown(sequence: Sequence) -> bool:
    """Whether a sequence may not be preempted for a higher priority now.

    It may once it has been computed for twice as many tokens as at its last preemption, counting recomputation. So
    each time it gets twice as far, and however many requests of high priority arrive, at most about two thirds of all
    its computation is wasted.
    """
    return sequence.num_worked < 2 * sequence.num_worked_before
