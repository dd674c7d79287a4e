"""Tables and the KV cache under a text without end: blocks leave in the middle, everything else stays where it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import BlockPool, BlockTable, KVCache
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt


@given(
    size=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 4)), max_size=20),
)
def test_a_cut_table_has_the_slots_of_those_that_stayed(size: int, steps: list[tuple[int, int, int]]) -> None:
    pool = BlockPool("request", 200, size)
    table, slots = BlockTable(pool, grows=True), list[int]()
    for grown, first, count in steps:
        before = table.num_tokens
        table.append(grown)
        slots += table.slots(before, grown)
        if count and (first + count) * size <= table.num_tokens:
            table.cut(first, count)
            del slots[first * size : (first + count) * size]
        table.check_invariants()
        assert table.slots(0, table.num_tokens) == slots
        last = len(slots) * 3 // 4
        runs = table.runs_between(last // 2, last)
        spelled = [slot for run in runs for slot in range(run.first_slot, run.first_slot + run.num_tokens)]
        assert spelled == slots[last // 2 : last]
    table.release()
    assert pool.num_used == 0


@given(sinks=st.integers(0, 9), window=st.integers(1, 12), size=st.integers(1, 5), num_tokens=st.integers(1, 60))
def test_blocks_that_no_later_token_sees_are_given_back(sinks: int, window: int, size: int, num_tokens: int) -> None:
    config = ChunkCacheConfig(block_size=size)
    kv_cache = KVCache("model", config, request_blocks=100, chunk_blocks=1)
    head = min(sinks + window, 7)
    allocation = kv_cache.allocate(kv_cache.plan(arrange(Prompt.plain(list(range(head))))))
    kv_cache.advance(allocation, 0, head)
    for token in range(head, num_tokens):
        if token >= sinks + window:
            kv_cache.evict_window(allocation, sinks, max(sinks, token - window + 1))
        kv_cache.append_slots(allocation, [token], is_private=token >= sinks + window)
        kv_cache.advance(allocation, 0, 1)
        kv_cache.check_invariants()
        span = allocation.last
        assert span.num_tokens + span.num_left == token + 1
        assert span.num_tokens <= sinks + window + 2 * size
    # whatever was made known is the beginning of an ordinary prompt
    assert len(allocation.last.entries) <= -(-(sinks + window) // size)
    kv_cache.release(allocation)
    kv_cache.reset()
    assert kv_cache.request_pool.num_used == 0
