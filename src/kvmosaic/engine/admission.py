"""Admission: waiting sequences, their fetches from the tiers, and the blocks that they are given."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import TYPE_CHECKING

from kvmosaic.cache import KVCache
from kvmosaic.engine.sequence import RunningSequences, Sequence, SequenceStatus
from kvmosaic.engine.shares import Shares
from kvmosaic.engine.step import Step, StepBudget
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.errors import ChunkCacheFull, KVMosaicError, OutOfBlocks, QuotaInUse, RequestTooLarge

if TYPE_CHECKING:
    from kvmosaic.engine.chunk_offloader import ChunkOffloader

_SLACK = 64

_Entry = tuple[tuple[float, float, int], int, Sequence]
"""Sort key, number and sequence; the smallest is taken first."""


class WaitingQueue:
    """One heap of sequences per tenant, with lazy deletion: removed entries stay until they surface or pile up.

        heaps     tenant -> [(sort key, number, sequence), …]
        numbers   sequence -> the number of its entry, if it waits

    Adding and removing cost O(log n), finding the first one O(tenants). Equal sort keys are first in, first out.
    """

    def __init__(self) -> None:
        self._heaps: dict[str, list[_Entry]] = {}
        self._numbers: dict[Sequence, int] = {}
        self._num_dead = 0
        self._count = count()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._numbers

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that is not queued yet."""
        assert sequence not in self._numbers, "a sequence waits once"
        number = self._numbers[sequence] = next(self._count)
        heap = self._heaps.setdefault(sequence.request.prompt.tenant, [])
        heapq.heappush(heap, (sequence.sort_key, number, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence; safe for one that does not wait."""
        if self._numbers.pop(sequence, None) is None:
            return
        self._num_dead += 1
        if self._num_dead > len(self._numbers) + _SLACK:
            for tenant in list(self._heaps):
                self._drop_dead(tenant)

    @property
    def tenants(self) -> list[str]:
        """Tenants with waiting sequences."""
        return [tenant for tenant in list(self._heaps) if self._first_of(tenant) is not None]

    def first_of(self, tenant: str) -> Sequence | None:
        """The sequence of a tenant that runs next, if one waits."""
        entry = self._first_of(tenant) if tenant in self._heaps else None
        return None if entry is None else entry[2]

    def first(
        self,
        passed_over: Collection[str] = (),
        load: Callable[[str], float] = lambda tenant: 0.0,
        served: Mapping[str, float] | None = None,
    ) -> Sequence | None:
        """The sequence that runs next, which stays in the queue; None if none waits, or only of passed-over tenants.

        Compares the first sequence of each tenant. Between tenants, waiting counts from the last admission: a long
        queue gives no advantage.

        Args:
            passed_over: tenants to skip.
            load: load of a tenant after the admission; among tenants whose first sequence has the highest priority, the
                smallest load is next.
            served: when a sequence of a tenant was last admitted.
        """
        firsts = [self._first_of(tenant) for tenant in list(self._heaps) if tenant not in passed_over]
        waiting = [entry[2] for entry in firsts if entry is not None]
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        since = served or {}
        best = min(waiting, key=lambda sequence: sequence.sort_key_from(since.get(sequence.tenant, -math.inf)))
        equals = (sequence for sequence in waiting if sequence.request.priority == best.request.priority)
        return min(equals, key=lambda sequence: (load(sequence.tenant), sequence.sort_key, self._numbers[sequence]))

    def _first_of(self, tenant: str) -> _Entry | None:
        heap = self._heaps[tenant]
        while heap and not self._is_alive(heap[0]):
            heapq.heappop(heap)
            self._num_dead -= 1
        if heap:
            return heap[0]
        del self._heaps[tenant]
        return None

    def _drop_dead(self, tenant: str) -> None:
        heap = self._heaps[tenant]
        alive = [entry for entry in heap if self._is_alive(entry)]
        self._num_dead -= len(heap) - len(alive)
        heapq.heapify(alive)
        self._heaps[tenant] = alive

    def _is_alive(self, entry: _Entry) -> bool:
        _, number, sequence = entry
        return self._numbers.get(sequence) == number


class Admission:
    """Admits waiting sequences: in a priority, tenants with the fewest running ones first, then by sort key.

    add ──▶ fetching (chunks come from the tiers) ──▶ waiting ──▶ planned, allocated ──▶ running
    """

    def __init__(
        self,
        kv_cache: KVCache,
        running: RunningSequences,
        shares: Shares,
        offloader: ChunkOffloader | None,
        swap: SwapSpace | None,
        clock: Callable[[], float],
    ) -> None:
        self.waiting = WaitingQueue()
        self.fetching: list[Sequence] = []
        """Sequences that wait for chunks from the tiers."""
        self.candidate: Sequence | None = None
        """The sequence that is being planned and allocated."""
        self.preferred: Sequence | None = None
        """The sequence for which others were preempted in this step: it is next."""
        self.passed_over: set[str] = set()
        """Tenants that have no room in the step being assembled, or are left out of it."""
        self.refused: set[Sequence] = set()
        """Sequences that found no blocks in it."""
        self.is_full = False
        """Whether no further sequence can be admitted to it."""
        self._kv_cache = kv_cache
        self._running = running
        self._shares = shares
        self._offloader = offloader
        self._swap = swap
        self._clock = clock

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence after those of the same priority."""
        if self._offloader is not None and self._offloader.prefetch(sequence):
            self.fetching.append(sequence)
        else:
            self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence, and what was fetched and swapped out for it; removing it twice is safe."""
        self.waiting.remove(sequence)
        if sequence in self.fetching:
            self.fetching.remove(sequence)
        if self._offloader is not None:
            self._offloader.cancel(sequence)
        if self._swap is not None:
            self._swap.drop(sequence)

    def begin_step(self) -> None:
        """Queues sequences whose chunks have arrived, or are not worth waiting for any longer."""
        self.candidate = self.preferred = None
        self.passed_over, self.is_full = set(), False
        if self._offloader is not None and self.fetching:
            for sequence in [each for each in self.fetching if self._offloader.check_fetches(each)]:
                self.fetching.remove(sequence)
                self.waiting.add(sequence)

    def first(self, passed_over: Collection[str]) -> Sequence | None:
        """The sequence to be admitted next, of any tenant but these."""
        preferred = self.preferred
        if preferred is not None and preferred in self.waiting and preferred.tenant not in passed_over:
            return preferred

        def load(tenant: str) -> float:
            return self._shares.load(tenant, self._running.num_by_tenant[tenant] + 1)

        return self.waiting.first(passed_over, load, self._running.served)

    def admit(self, budget: StepBudget, step: Step, before: Sequence | None) -> Sequence | None:
        """Allocates blocks for the next sequence that has room; None if there is none.

        Args:
            budget: remaining budget of the step.
            step: the step being assembled; sequences that cannot run at all end or fail in it.
            before: a running sequence that is computed next; only sequences that sort before it are admitted.
        """
        spent: set[str] = set()
        while not budget.is_spent and self._running.num_free > 0 and not self.is_full:
            sequence = self.first(self.passed_over | spent)
            if sequence is None or (before is not None and sequence.sort_key >= before.sort_key):
                return None
            if step.defers(sequence):
                return None
            if not budget.tokens_of(sequence.tenant) or not budget.looks_of(sequence.tenant):
                spent.add(sequence.tenant)
            elif self._allocate(sequence, step):
                return sequence
        return None

    def _allocate(self, sequence: Sequence, step: Step) -> bool:
        """Plans and allocates a sequence; returns whether it may run now."""
        self.candidate = sequence
        begin = self._clock()
        prompt = sequence.request.prompt
        plan = self._kv_cache.plan(sequence.layout, prompt.salt, prompt.tenant)
        if self._offloader is not None:
            if self.fetching and not self._offloader.reserve_staging(sequence, plan):
                self.is_full = True
                return False  # fetching sequences continue soon, then it is next
            if self._offloader.prefetch(sequence, plan):
                self.waiting.remove(sequence)
                self.fetching.append(sequence)
                return False
        try:
            priority = sequence.request.eviction_priority
            loaded = () if self._offloader is None else self._offloader.fetched_keys(sequence)
            allocation = self._kv_cache.allocate(plan, priority=priority, again=sequence.was_replanned, loaded=loaded)
        except OutOfBlocks as error:
            self.refused.add(sequence)
            if not self._running:
                self._refuse(sequence, RequestTooLarge(f"the request cannot run even alone: {error}"), step)
            elif isinstance(error, QuotaInUse):
                self.passed_over.add(prompt.tenant)  # the others need not wait for this tenant
            else:
                self.is_full = True
            return False
        except (ChunkCacheFull, RequestTooLarge) as error:
            self._refuse(sequence, error, step)
            return False
        self.waiting.remove(sequence)
        sequence.set_allocation(allocation)
        step.copies.extend(allocation.copies)
        allocated = self._clock()
        sequence.allocate_seconds = allocated - begin
        if self._offloader is not None:
            self._offloader.load(sequence)
        sequence.request.note_allocation(begin, allocated, self._clock())
        if self._swap is not None and (restore := self._swap.restore(sequence)) is not None:
            step.restores.append(restore)
        return True

    def _refuse(self, sequence: Sequence, error: KVMosaicError, step: Step) -> None:
        """Removes a sequence that has no room: one with an answer ends there, one without has failed."""
        self.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.answer.token_ids:
            step.ended.append(sequence)
        else:
            step.failed.append((sequence, error))
