"""Eviction policies by name: the protocol, LRU, LFU, GDSF and priority; and the queue that they order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar, runtime_checkable

from kvmosaic.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy knows of an unreferenced block or chunk."""

    last_used: float
    """Seconds on the KV cache's clock when it was last allocated or released; of a tier's entry, since the epoch."""
    num_tokens: int
    """Tokens that would have to be computed again; 0 for an entry of a tier, which does not know them."""
    priority: float = 0.5
    """Priority given by its owner, 0 to 1; of a block, that of the sequence that released it last."""
    progress: float = 1.0
    """Computed fraction of the sequence that released it last, 0 to 1; chunks are evictable when complete: always 1."""
    hits: int = 0
    """Cache hits so far."""
    compute_seconds: float = 0.0
    """Seconds that computing it took; 0 if unknown, as for blocks of prefixes."""
    num_bytes: int = 0
    """Bytes that evicting it would free, over all layers."""
    evicted_rank: float = 0.0
    """The highest rank that was evicted from its pool before it became idle; 0 if none."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Eviction policy: orders unreferenced blocks and chunks.

    A policy is one stateless method, so one instance serves any number of pools. A rank is computed once, when
    something becomes idle, and holds until it is used again: it must not depend on the time of the call. Time enters as
    `last_used`, which fixes the order of idle items.
    """

    @property
    def name(self) -> str:
        """Its name in configuration and reports."""
        ...

    def rank(self, candidate: Candidate) -> float:
        """The eviction rank: the lowest is evicted first."""
        ...


class LRU:
    """LRU policy: the least recently used block or chunk is evicted first."""

    name = "lru"

    def rank(self, candidate: Candidate) -> float:
        """The time of the last use."""
        return candidate.last_used


_HALF_SECONDS = 1e9
"""Scale of the time of the last use, so that it orders items of equal hits only."""


class LFU:
    """LFU policy: the block or chunk with the fewest cache hits is evicted first; of these, the least recently used.

    Hits are counted for as long as an item is cached. For documents whose popularity changes, `lru` is the better
    choice: what was popular once stays.
    """

    name = "lfu"

    def rank(self, candidate: Candidate) -> float:
        """Cache hits, and less than one for the time of the last use."""
        return candidate.hits + candidate.last_used / (candidate.last_used + _HALF_SECONDS)


@dataclass(frozen=True, slots=True)
class GDSF:
    """GDSF policy (greedy dual size frequency): evicts first what is cheap to compute again, large and seldom hit.

        rank = evicted_rank + (1 + hits) * seconds to compute it / bytes          the lowest is evicted first

    `evicted_rank` makes ranks rise with every eviction, so an item that is no longer used is evicted eventually,
    however many hits it had. Where the compute time is unknown, as for blocks of prefixes, it is estimated from the
    tokens; of an entry of a tier, which knows neither, it is one second.
    """

    token_seconds: float = 1e-3
    name: ClassVar[str] = "gdsf"

    def __post_init__(self) -> None:
        if not 0 < self.token_seconds <= 1e3:
            raise InvalidConfig(f"token_seconds must be above 0 and at most 1000, got {self.token_seconds}")

    def rank(self, candidate: Candidate) -> float:
        """Seconds per byte, by use, after everything that was evicted before."""
        seconds = candidate.compute_seconds or candidate.num_tokens * self.token_seconds or 1.0
        return candidate.evicted_rank + (1 + candidate.hits) * seconds / max(candidate.num_bytes, 1)


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority policy: keeps items of high priority that are complete, recently used and small.

        rank = 0.4 priority + 0.3 progress - 0.2 age - 0.1 size          the lowest is evicted first

        priority    0 to 1, set by the caller
        progress    0 to 1, the fraction that is computed
        age         idle time in units of `age_seconds`; unlimited, so that only pins keep an unused item indefinitely
        size        tokens in units of `size_tokens`, at most 1: evicting a large item frees more

    All idle items age at the same rate, so their order is fixed, and `last_used` can replace the age.
    """

    age_seconds: float = 3_600.0
    size_tokens: int = 4_096
    name: ClassVar[str] = "priority"

    def __post_init__(self) -> None:
        if not 0 < self.age_seconds < 1e9:
            raise InvalidConfig(f"age_seconds must be above 0 and below 1e9, got {self.age_seconds}")
        if not 1 <= self.size_tokens <= 10**9:
            raise InvalidConfig(f"size_tokens must be between 1 and 10**9, got {self.size_tokens}")

    def rank(self, candidate: Candidate) -> float:
        """The weighted sum, up to a constant that is the same for all."""
        size = min(candidate.num_tokens / self.size_tokens, 1.0)
        kept = 0.4 * candidate.priority + 0.3 * candidate.progress
        return kept + 0.2 * candidate.last_used / self.age_seconds - 0.1 * size


POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {"lru": LRU, "lfu": LFU, "gdsf": GDSF, "priority": Priority}
"""To add a policy: write its class, and add it here."""


def choose(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy with this name, or the given instance.

    Raises:
        InvalidConfig: an unknown name, or an object without a `rank`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidConfig(f"eviction is {policy!r}; choose " + " or ".join(repr(name) for name in POLICIES))
        return POLICIES[policy]()
    if not isinstance(policy, EvictionPolicy):
        raise InvalidConfig(
            f"eviction is {policy!r}; give a name or an object with a name and a method rank(candidate)"
        )
    return policy


def check_priority(priority: object, of: str) -> None:
    """Checks an eviction priority.

    Raises:
        InvalidConfig: not a number between 0 and 1.
    """
    if isinstance(priority, bool) or not isinstance(priority, int | float) or not 0.0 <= priority <= 1.0:
        raise InvalidConfig(f"the priority of {of} must be between 0 and 1, got {priority!r:.80}")


class Evictable(Protocol):
    """An item of eviction queues, with one entry in all of its queues."""

    queue_entry: tuple[float, int, Any] | None
    """Eviction rank, a unique number, and the item itself; None: in no queue."""


ItemT = TypeVar("ItemT", bound=Evictable)


class EvictionQueue(Generic[ItemT]):
    """Unreferenced items, lowest rank first, then lowest number.

        heap   entry, entry, …       may hold stale entries, of items that were removed

    A binary heap with lazy removal. The item stores its entry, so no queue needs an index of its items, and several
    queues share one entry. Stale entries at the head are dropped at once, and all of them when they are more than half
    of the heap: every call costs O(log n) on average for n items, and no removed item is kept alive for long.

    Invariants: the head of the heap is not stale; len(self) items have an entry in the heap.
    """

    __slots__ = ("_heap", "_num_items")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, item: ItemT) -> None:
        """Adds an item whose `queue_entry` was just set."""
        assert item.queue_entry is not None
        heapq.heappush(self._heap, item.queue_entry)
        self._num_items += 1

    def remove(self, item: ItemT) -> None:
        """Removes an item, and its entry; call it once on every queue that the item was pushed to."""
        item.queue_entry = None
        self._num_items -= 1
        if len(self._heap) > 2 * self._num_items + 64:
            self._heap = [entry for entry in self._heap if entry[2].queue_entry is entry]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2].queue_entry is not self._heap[0]:
            heapq.heappop(self._heap)

    def first(self) -> ItemT | None:
        """The item to evict first; None when the queue is empty."""
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[ItemT]:
        """All items in eviction order; for reports and tests (it sorts)."""
        return [entry[2] for entry in sorted(self._heap) if entry[2].queue_entry is entry]
