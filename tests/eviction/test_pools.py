"""Policies in the pools of a KV cache: what leaves first among the blocks of released sequences, and among chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from cache.world import Clock

from kvmosaic import ChunkCacheConfig, Prompt
from kvmosaic.cache import Allocation, KVCache
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import GDSF, EvictionPolicy, Priority
from kvmosaic.layout import arrange


@dataclass(frozen=True)
class Item:
    """A sequence or a document, and what a policy may know of it."""

    token_ids: Sequence[int]
    priority: float = 0.5
    num_computed: int | None = None
    """Sequences: released after so many tokens; None: after all."""
    seconds: float = 0.0
    """Documents: time to compute them."""


@dataclass
class Pool:
    """A KV cache whose pool has room for a few blocks of four tokens."""

    eviction: str | EvictionPolicy
    num_blocks: int = 2
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.kv_cache = KVCache(
            "model",
            ChunkCacheConfig(block_size=4, eviction=self.eviction),
            request_blocks=self.num_blocks + self.others,
            chunk_blocks=self.num_blocks,
            bytes_per_block=1_024,
            clock=self.clock,
        )

    others = 0

    def use(self, item: Item) -> None:
        raise NotImplementedError

    def has(self, item: Item) -> bool:
        raise NotImplementedError


class Sequences(Pool):
    """Items are sequences, whose blocks are in the prefix cache when they are released."""

    def use(self, item: Item) -> None:
        plan = self.kv_cache.plan(arrange(Prompt.plain(item.token_ids)))
        allocation = self.kv_cache.allocate(plan, priority=item.priority)
        self.kv_cache.begin_step()
        num_tokens = len(item.token_ids) if item.num_computed is None else item.num_computed
        self.kv_cache.advance(allocation, 0, num_tokens - allocation.last.num_computed)
        self.kv_cache.end_step()
        self.kv_cache.release(allocation)

    def has(self, item: Item) -> bool:
        computed = item.token_ids[: item.num_computed]
        return self.kv_cache.plan(arrange(Prompt.plain([*computed, 0]))).reused_tokens >= len(computed)


class Chunks(Pool):
    """Items are documents, which are chunks."""

    others = 1
    """Blocks of the question."""

    def use(self, item: Item) -> None:
        allocation = self._allocate(item)
        chunk, question = allocation.spans
        self.kv_cache.begin_step()
        if chunk.is_owner:
            self.kv_cache.advance(allocation, 0, chunk.num_tokens)
            assert chunk.chunk is not None
            self.kv_cache.record_compute(chunk.chunk, item.seconds * 1e3)
        self.kv_cache.advance(allocation, 1, question.num_tokens - question.num_computed)
        self.kv_cache.end_step()
        self.kv_cache.release(allocation)
        self.kv_cache.set_priority(self._name(item), item.priority)

    def has(self, item: Item) -> bool:
        plan = self.kv_cache.plan(arrange(self._prompt(item)))
        return plan.spans[0].action == "reuse"

    def _allocate(self, item: Item) -> Allocation:
        return self.kv_cache.allocate(self.kv_cache.plan(arrange(self._prompt(item))))

    def _prompt(self, item: Item) -> Prompt:
        return Prompt.from_tokens(None, [item.token_ids], [99], names=[self._name(item)])

    def _name(self, item: Item) -> str:
        return str(item.token_ids[0])


def tokens(first: int, count: int = 4) -> list[int]:
    return list(range(first, first + count))


NEW = Item(tokens(500))
POOLS = pytest.mark.parametrize("make", [Sequences, Chunks], ids=["sequences", "chunks"])


def stays(pool: Pool, *items: Item, new: Item = NEW) -> list[bool]:
    """Uses items one second after the other, then a new one; returns which of them are still cached."""
    for item in items:
        pool.use(item)
        pool.clock.wait(1.0)
    pool.use(new)
    assert pool.has(new)
    pool.kv_cache.check_invariants()
    return [pool.has(item) for item in items]


@POOLS
def test_priority_keeps_what_has_the_higher_priority(make: type[Pool]) -> None:
    high, low = Item(tokens(10), priority=0.9), Item(tokens(20), priority=0.1)
    assert stays(make("priority"), high, low) == [True, False]
    assert stays(make("priority"), low, high) == [False, True]


@POOLS
def test_priority_keeps_what_was_used_later(make: type[Pool]) -> None:
    one, other = Item(tokens(10)), Item(tokens(20))
    assert stays(make("priority"), one, other) == [False, True]
    assert stays(make("priority"), other, one) == [False, True]
    old = Item(tokens(10), priority=0.6)
    assert stays(make(Priority(age_seconds=1.0)), old, other) == [False, True], "age has no limit"


@POOLS
def test_priority_keeps_what_is_smaller(make: type[Pool]) -> None:
    large, small = Item(tokens(10, 4)), Item(tokens(20, 2))
    policy = Priority(age_seconds=1e6, size_tokens=4)
    assert stays(make(policy), small, large) == [True, False]
    assert stays(make(policy), large, small) == [False, True]


def test_priority_keeps_sequences_that_were_computed_further() -> None:
    def pool() -> Pool:
        return Sequences(Priority(age_seconds=1e6), 3)

    complete = Item(tokens(10))
    nearly, half = Item(tokens(20, 5), num_computed=4), Item(tokens(30, 8), num_computed=4)
    for further, less in ((complete, nearly), (complete, half), (nearly, half)):
        assert stays(pool(), further, less, new=Item(tokens(500, 8))) == [True, False]
        assert stays(pool(), less, further, new=Item(tokens(500, 8))) == [False, True]


def test_block_has_the_priority_of_the_sequence_that_released_it_last() -> None:
    item, other = Item(tokens(10), priority=0.9), Item(tokens(20))
    pool = Sequences("priority")
    pool.use(item)
    pool.use(Item(item.token_ids, priority=0.1))
    assert stays(pool, other) == [True]
    assert not pool.has(item)


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan"), True, "0.5"])
def test_priority_of_a_sequence_is_checked_before_anything_is_allocated(priority: float) -> None:
    pool = Sequences("priority")
    plan = pool.kv_cache.plan(arrange(Prompt.plain([1, 2])))
    with pytest.raises(InvalidConfig, match="the priority of a sequence must be between 0 and 1"):
        pool.kv_cache.allocate(plan, priority=priority)
    assert not pool.kv_cache.request_pool.num_used


@POOLS
@pytest.mark.parametrize("eviction", ["lfu", "gdsf"])
def test_hits_keep_what_is_used_often(make: type[Pool], eviction: str) -> None:
    often, seldom = Item(tokens(10, 6)), Item(tokens(20, 6))
    pool = make(eviction, 4)
    for item in (often, often, often, seldom):
        pool.use(item)
    assert stays(pool, Item(tokens(30, 2)))
    assert (pool.has(often), pool.has(seldom)) == (True, False)


@POOLS
def test_gdsf_evicts_in_the_end_what_is_not_used_any_more_and_lfu_does_not(make: type[Pool]) -> None:
    once_popular = Item(tokens(10, 6))
    for eviction, is_kept in (("lfu", True), ("gdsf", False)):
        pool = make(eviction, 6)
        for _ in range(6):
            pool.use(once_popular)
        for number in range(60):
            pool.use(Item(tokens(1_000 + 10 * number, 6)))
            pool.use(Item(tokens(1_000 + 10 * number, 6)))
        assert pool.has(once_popular) is is_kept, eviction


def test_gdsf_keeps_what_took_long_to_compute_and_evicts_what_is_large() -> None:
    dear, cheap = Item(tokens(10), seconds=2.0), Item(tokens(20), seconds=0.1)
    assert stays(Chunks("gdsf"), dear, cheap) == [True, False]
    assert stays(Chunks("gdsf"), cheap, dear) == [False, True]
    small, large = Item(tokens(10, 4), seconds=1.0), Item(tokens(20, 12), seconds=1.0)
    assert stays(Chunks("gdsf", 4), small, large) == [True, False]
    assert stays(Chunks("gdsf", 4), large, small) == [False, True]


@pytest.mark.parametrize("seconds", [0.0, -1.0, 2e3, float("nan")])
def test_gdsf_refuses_an_impossible_time_per_token(seconds: float) -> None:
    with pytest.raises(InvalidConfig, match="token_seconds must be above 0"):
        GDSF(token_seconds=seconds)
