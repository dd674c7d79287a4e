"""Chunks by name: finding, pinning, deleting; and the statistics."""

import subprocess
import sys

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, state_of, warmed

from kvmosaic.cache import BlockPool, ChunkIndex, KeyChain
from kvmosaic.cache.chunk import MAX_NAMES
from kvmosaic.cache.keys import encode_tokens
from kvmosaic.errors import ChunkInUse, InvalidConfig, UnknownChunk
from kvmosaic.eviction import LRU

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def named_kv_cache(**config):
    kv_cache = make_kv_cache(**config)
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, names=["a", "b"]))
    return kv_cache


def test_a_chunk_is_found_by_its_name_and_by_its_key():
    kv_cache = named_kv_cache()
    (chunk,) = kv_cache.find_chunks("a")
    assert chunk.token_ids == tuple(DOC_A) and chunk.start == 6 and list(chunk.names) == ["a"]
    assert kv_cache.find_chunks(chunk.key) == [chunk]
    assert chunk.is_ready and chunk.num_computed == chunk.num_tokens == 5


def test_one_name_under_two_system_prompts_is_two_chunks():
    kv_cache = named_kv_cache()
    warmed(kv_cache, layout_of([9], [DOC_A], QUESTION, names=["a"]))
    assert len(kv_cache.find_chunks("a")) == 2
    assert kv_cache.pin("a") == 2
    assert kv_cache.delete("a") == 2
    assert [list(chunk.names) for chunk in kv_cache.chunks()] == [["b"]]


def test_names_belong_to_their_tenant():
    kv_cache = named_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION, names=["a"]), salt="tenant")
    assert kv_cache.delete("a", salt="tenant") == 1
    assert len(kv_cache.find_chunks("a")) == 1
    with pytest.raises(UnknownChunk, match="no cached chunk is called 'a' among 2"):
        kv_cache.find_chunks("a", salt="tenant")


def test_a_chunk_keeps_only_its_latest_names():
    kv_cache = make_kv_cache()
    for number in range(MAX_NAMES + 3):
        warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION, names=[f"n{number}"]))
    (chunk,) = kv_cache.chunks()
    assert list(chunk.names) == [f"n{number}" for number in range(3, MAX_NAMES + 3)]
    with pytest.raises(UnknownChunk):
        kv_cache.find_chunks("n0")
    kv_cache.check_invariants()


@pytest.mark.parametrize("call", ["find_chunks", "pin", "unpin", "delete"])
def test_an_unknown_name_or_key_is_an_error_that_says_what_to_do(call):
    kv_cache = named_kv_cache()
    for name_or_key in ("nobody", b"\x00" * 32):
        before = state_of(kv_cache)
        with pytest.raises(UnknownChunk, match="warm it again, and pin it to keep it"):
            getattr(kv_cache, call)(name_or_key)
        assert state_of(kv_cache) == before


def test_a_pinned_chunk_stays_until_it_is_unpinned():
    clock = Clock()
    kv_cache = named_kv_cache(chunk_blocks=5, clock=clock)
    kv_cache.pin("a")
    kv_cache.pin("a")
    clock.wait(1)
    warmed(kv_cache, layout_of(SYSTEM, [[8] * 12], QUESTION))
    assert {chunk.token_ids[0] for chunk in kv_cache.chunks()} == {2, 8}
    assert kv_cache.statistics().pinned_chunks == 1
    kv_cache.unpin("a")
    warmed(kv_cache, layout_of(SYSTEM, [[9] * 8], QUESTION))
    assert {chunk.token_ids[0] for chunk in kv_cache.chunks()} == {8, 9}
    kv_cache.check_invariants()


def test_a_chunk_in_use_is_not_deleted_and_neither_are_others_with_its_name():
    kv_cache = named_kv_cache()
    warmed(kv_cache, layout_of([9], [DOC_A], QUESTION, names=["a"]))
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    before = state_of(kv_cache)
    with pytest.raises(ChunkInUse, match="the chunk 'a' is used by 1 requests"):
        kv_cache.delete("a")
    assert state_of(kv_cache) == before
    kv_cache.release(allocation)
    assert kv_cache.delete("a") == 2
    kv_cache.check_invariants()


def test_a_deleted_pinned_chunk_is_no_longer_counted_as_pinned():
    kv_cache = named_kv_cache()
    kv_cache.pin("a")
    kv_cache.delete("a")
    assert kv_cache.statistics().pinned_chunks == 0 and kv_cache.chunk_pool.num_used == 3
    kv_cache.check_invariants()


def test_reset_drops_what_nobody_uses_and_keeps_the_rest():
    kv_cache = named_kv_cache()
    kv_cache.pin("b")
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    kv_cache.reset()
    assert [list(chunk.names) for chunk in kv_cache.chunks()] == [["a"]]
    assert kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)).reused_tokens == 11
    kv_cache.release(allocation)
    kv_cache.reset()
    assert kv_cache.chunk_pool.num_used == kv_cache.request_pool.num_used == 0
    assert kv_cache.statistics().evictions == kv_cache.statistics().prefix_evictions == 0


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan")])
def test_a_priority_outside_its_range_is_refused(priority):
    with pytest.raises(InvalidConfig, match="between 0 and 1"):
        named_kv_cache().set_priority("a", priority)


def test_a_key_that_is_taken_by_other_tokens_is_passed_over():
    index = ChunkIndex(BlockPool("chunk_cache", 8, 4), LRU(), Clock(), max_chunks=9)
    chain = KeyChain("model")
    root, first, second = chain.root(0), encode_tokens([1, 2]), encode_tokens([3, 4])
    taken = chain.run_encoded(root, second)
    planted = index.create(taken, root, first, 0, "")
    key, chunk = index.find(chain, root, second, {})
    assert chunk is None and key == chain.next_after(taken)
    assert index.find(chain, root, second, {key: (root, first)})[0] == chain.next_after(key)
    context_free = ChunkIndex(BlockPool("chunk_cache", 8, 4), LRU(), Clock(), max_chunks=9, verify=False)
    planted = context_free.create(taken, root, first, 0, "")
    assert context_free.find(chain, root, second, {}) == (taken, planted)


def test_a_plan_whose_key_was_taken_meanwhile_is_made_again():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    plan = kv_cache.plan(layout)
    span = plan.spans[1]
    kv_cache._chunks.create(span.key, span.root, encode_tokens([7] * 5), 6, "")
    allocation = kv_cache.allocate(plan)
    assert allocation.spans[1].is_owner and allocation.spans[1].chunk.token_ids == tuple(DOC_A)


def test_statistics_count_lookups_hits_sharing_and_times():
    kv_cache = make_kv_cache()
    empty = kv_cache.statistics()
    assert (empty.lookups, empty.hit_rate, empty.sharing_ratio, empty.average_compute_ms) == (0, 0.0, 1.0, 0.0)
    first = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))
    second = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))
    compute_all(kv_cache, first)
    kv_cache.record_compute(first.spans[1].chunk, 3.0)
    kv_cache.record_compute(first.spans[2].chunk, 5.0)
    stats = kv_cache.statistics()
    assert (stats.lookups, stats.hits, stats.misses, stats.hit_rate) == (4, 2, 2, 0.5)
    assert (stats.cached_chunks, stats.used_blocks, stats.total_blocks, stats.shared_blocks) == (2, 5, 64, 5)
    assert stats.sharing_ratio == 3.0
    assert stats.average_compute_ms == 4.0
    assert (stats.prefix_lookup_tokens, stats.prefix_hit_tokens) == (18, 0)
    assert stats.request_used_blocks == 6 and stats.request_total_blocks == 64 and stats.prefix_blocks == 2
    assert [chunk.hits for chunk in kv_cache.chunks()] == [1, 1]
    kv_cache.release(first)
    kv_cache.release(second)
    assert kv_cache.statistics().sharing_ratio == 1.0


def test_tokens_of_chunks_are_counted_as_reused_moved_or_computed():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, strategy="sequential")
    first = kv_cache.allocate(kv_cache.plan(layout))
    kv_cache.advance(first, 1, 3)
    stats = kv_cache.statistics()
    assert (stats.reused_tokens, stats.moved_tokens, stats.computed_tokens) == (0, 0, 3), "when they are computed"
    second = kv_cache.allocate(kv_cache.plan(layout))
    compute_all(kv_cache, first)
    kv_cache.record_compute(first.spans[1].chunk, 250.0)
    stats = kv_cache.statistics()
    assert (stats.reused_tokens, stats.moved_tokens, stats.computed_tokens) == (5, 9, 14)
    assert (stats.planned_chunks, stats.allocates, stats.computes, stats.compute_seconds) == (4, 2, 1, 0.25)
    kv_cache.release(first)
    kv_cache.release(second)


def test_average_times_come_from_the_clock():
    clock = Clock()
    kv_cache = make_kv_cache(clock=lambda: clock.wait(0.001) or clock.now)
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION))
    assert kv_cache.statistics().average_lookup_ms == pytest.approx(1.0)
    assert kv_cache.statistics().average_allocate_ms > 1.0
    assert kv_cache.statistics().lookup_seconds == pytest.approx(0.001)
    assert kv_cache.statistics().allocate_seconds * 1e3 == pytest.approx(kv_cache.statistics().average_allocate_ms)


def test_planning_imports_no_torch():
    code = "import sys, kvmosaic.cache, kvmosaic.eviction; print('torch' in sys.modules, 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
