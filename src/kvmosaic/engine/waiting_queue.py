"""Waiting queue: sequences in the order of their sort keys."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from itertools import count

from kvmosaic.engine.sequence import Sequence

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
