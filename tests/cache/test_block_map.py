"""The block map: written out for small prompts, and quick for large pools."""

from __future__ import annotations

import pytest
from cache.world import compute_all, layout_of, make_kv_cache, plain, warmed
from support.cpu_time import least_cpu_seconds

from kvmosaic.cache import BlockPool, BlockState
from kvmosaic.cache.statistics import states_of

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 4, [3] * 8, [4] * 5
FREE, IDLE, IN_USE, SHARED, PINNED = BlockState


def test_every_block_says_what_it_does():
    kv_cache = make_kv_cache(request_blocks=7, chunk_blocks=5)
    assert kv_cache.block_map().chunk_cache == bytes([FREE] * 5)
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, names=["a", "b"]))
    assert kv_cache.block_map().chunk_cache == bytes([IDLE, IDLE, IDLE, FREE, FREE])
    assert sorted(kv_cache.block_map().request) == [FREE] * 3 + [IDLE] * 4, "2 of the system prompt, 2 of the question"
    first = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    assert kv_cache.block_map().chunk_cache == bytes([IN_USE, IDLE, IDLE, FREE, FREE])
    assert sorted(kv_cache.block_map().request) == [FREE] + [IDLE] * 2 + [IN_USE] * 4
    second = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], [9])))
    assert kv_cache.block_map().chunk_cache == bytes([SHARED, IDLE, IDLE, FREE, FREE])
    assert sorted(kv_cache.block_map().request) == [IDLE] * 2 + [IN_USE] * 3 + [SHARED] * 2
    kv_cache.pin("b")
    assert kv_cache.block_map().chunk_cache == bytes([SHARED, PINNED, PINNED, FREE, FREE])
    kv_cache.delete("a", when_idle=True)
    kv_cache.release(first)
    assert kv_cache.block_map().chunk_cache == bytes([IN_USE, PINNED, PINNED, FREE, FREE])
    kv_cache.release(second)
    assert kv_cache.block_map().chunk_cache == bytes([FREE, PINNED, PINNED, FREE, FREE])


def test_blocks_shared_by_forks_are_shared_before_anything_is_cached():
    kv_cache = make_kv_cache(request_blocks=4, prefix_caching=False)
    allocation = kv_cache.allocate(kv_cache.plan(plain([1] * 5)))
    compute_all(kv_cache, allocation)
    assert sorted(kv_cache.block_map().request) == [FREE, FREE, IN_USE, IN_USE]
    kv_cache.fork(allocation)
    assert sorted(kv_cache.block_map().request) == [FREE, FREE, SHARED, SHARED]


@pytest.mark.parametrize("num_readers", [1, 2, 3, 254, 255, 256, 257, 70_000])
def test_a_block_with_very_many_readers_is_shared(num_readers):
    pool = BlockPool("request", 4, 4)
    first, other = pool.allocate(2)
    for _ in range(num_readers - 1):
        pool.retain([first])
    states = states_of(pool, kept=())
    assert states[first] == (IN_USE if num_readers == 1 else SHARED) and states[other] == IN_USE
    assert sorted(states)[:2] == [FREE, FREE]


def test_a_map_of_a_hundred_thousand_blocks_takes_milliseconds():
    kv_cache = make_kv_cache(block_size=1, request_blocks=100_000, chunk_blocks=100_000)
    for number in range(10):
        warmed(kv_cache, layout_of([number] * 4_000, [[number] * 8_000], [1]))
    states = kv_cache.block_map()
    assert least_cpu_seconds(kv_cache.block_map) < 0.5, "about 0.02 s"
    assert states.chunk_cache.count(IDLE) == 80_000 and states.request.count(IDLE) == 40_010
