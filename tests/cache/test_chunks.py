"""Chunks by name: finding, pinning, deleting; and the statistics."""

import subprocess
import sys

import pytest
from cache.world import Clock, compute_all, layout_of, make_planner, state_of, warmed

from kvmosaic.cache import BlockPool, ChunkIndex, KeyChain
from kvmosaic.cache.chunk import MAX_NAMES
from kvmosaic.cache.keys import encode_tokens
from kvmosaic.errors import ChunkInUse, InvalidConfig, UnknownChunk
from kvmosaic.eviction import LRU

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def named_planner(**config):
    planner = make_planner(**config)
    warmed(planner, layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, names=["a", "b"]))
    return planner


def test_a_chunk_is_found_by_its_name_and_by_its_key():
    planner = named_planner()
    (chunk,) = planner.find_chunks("a")
    assert chunk.token_ids == tuple(DOC_A) and chunk.start == 6 and list(chunk.names) == ["a"]
    assert planner.find_chunks(chunk.key) == [chunk]
    assert chunk.is_ready and chunk.num_computed == chunk.num_tokens == 5


def test_one_name_under_two_system_prompts_is_two_chunks():
    planner = named_planner()
    warmed(planner, layout_of([9], [DOC_A], QUESTION, names=["a"]))
    assert len(planner.find_chunks("a")) == 2
    assert planner.pin("a") == 2
    assert planner.delete("a") == 2
    assert [list(chunk.names) for chunk in planner.chunks()] == [["b"]]


def test_names_belong_to_their_tenant():
    planner = named_planner()
    warmed(planner, layout_of(SYSTEM, [DOC_A], QUESTION, names=["a"]), salt="tenant")
    assert planner.delete("a", salt="tenant") == 1
    assert len(planner.find_chunks("a")) == 1
    with pytest.raises(UnknownChunk, match="no cached chunk is called 'a' among 2"):
        planner.find_chunks("a", salt="tenant")


def test_a_chunk_keeps_only_its_latest_names():
    planner = make_planner()
    for number in range(MAX_NAMES + 3):
        warmed(planner, layout_of(SYSTEM, [DOC_A], QUESTION, names=[f"n{number}"]))
    (chunk,) = planner.chunks()
    assert list(chunk.names) == [f"n{number}" for number in range(3, MAX_NAMES + 3)]
    with pytest.raises(UnknownChunk):
        planner.find_chunks("n0")
    planner.check_invariants()


@pytest.mark.parametrize("call", ["find_chunks", "pin", "unpin", "delete"])
def test_an_unknown_name_or_key_is_an_error_that_says_what_to_do(call):
    planner = named_planner()
    for name_or_key in ("nobody", b"\x00" * 32):
        before = state_of(planner)
        with pytest.raises(UnknownChunk, match="warm it again, and pin it to keep it"):
            getattr(planner, call)(name_or_key)
        assert state_of(planner) == before


def test_a_pinned_chunk_stays_until_it_is_unpinned():
    clock = Clock()
    planner = named_planner(chunk_blocks=5, clock=clock)
    planner.pin("a")
    planner.pin("a")
    clock.wait(1)
    warmed(planner, layout_of(SYSTEM, [[8] * 12], QUESTION))
    assert {chunk.token_ids[0] for chunk in planner.chunks()} == {2, 8}
    assert planner.statistics().pinned_chunks == 1
    planner.unpin("a")
    warmed(planner, layout_of(SYSTEM, [[9] * 8], QUESTION))
    assert {chunk.token_ids[0] for chunk in planner.chunks()} == {8, 9}
    planner.check_invariants()


def test_a_chunk_in_use_is_not_deleted_and_neither_are_others_with_its_name():
    planner = named_planner()
    warmed(planner, layout_of([9], [DOC_A], QUESTION, names=["a"]))
    attachment = planner.attach(planner.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    before = state_of(planner)
    with pytest.raises(ChunkInUse, match="the chunk 'a' is used by 1 requests"):
        planner.delete("a")
    assert state_of(planner) == before
    planner.release(attachment)
    assert planner.delete("a") == 2
    planner.check_invariants()


def test_a_deleted_pinned_chunk_is_no_longer_counted_as_pinned():
    planner = named_planner()
    planner.pin("a")
    planner.delete("a")
    assert planner.statistics().pinned_chunks == 0 and planner.chunk_pool.num_used == 3
    planner.check_invariants()


def test_reset_drops_what_nobody_uses_and_keeps_the_rest():
    planner = named_planner()
    planner.pin("b")
    attachment = planner.attach(planner.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    planner.reset()
    assert [list(chunk.names) for chunk in planner.chunks()] == [["a"]]
    assert planner.plan(layout_of(SYSTEM, [DOC_A], QUESTION)).reused_tokens == 11
    planner.release(attachment)
    planner.reset()
    assert planner.chunk_pool.num_used == planner.request_pool.num_used == 0
    assert planner.statistics().evictions == planner.statistics().prefix_evictions == 0


@pytest.mark.parametrize("priority", [-0.1, 1.1, float("nan")])
def test_a_priority_outside_its_range_is_refused(priority):
    with pytest.raises(InvalidConfig, match="between 0 and 1"):
        named_planner().set_priority("a", priority)


def test_a_key_that_is_taken_by_other_tokens_is_passed_over():
    index = ChunkIndex(BlockPool("chunk_cache", 8, 4), LRU(), Clock(), max_chunks=9)
    chain = KeyChain("model")
    root, first, second = chain.root(0), encode_tokens([1, 2]), encode_tokens([3, 4])
    taken = chain.run_encoded(root, second)
    planted = index.create(taken, root, first, 0, "")
    key, chunk = index.find(chain, root, second, {})
    assert chunk is None and key == chain.next_after(taken)
    assert index.find(chain, root, second, {key: (root, first)})[0] == chain.next_after(key)
    blind = ChunkIndex(BlockPool("chunk_cache", 8, 4), LRU(), Clock(), max_chunks=9, verify=False)
    planted = blind.create(taken, root, first, 0, "")
    assert blind.find(chain, root, second, {}) == (taken, planted)


def test_a_plan_whose_key_was_taken_meanwhile_is_made_again():
    planner = make_planner()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    plan = planner.plan(layout)
    span = plan.spans[1]
    planner._chunks.create(span.key, span.root, encode_tokens([7] * 5), 6, "")
    attachment = planner.attach(plan)
    assert attachment.spans[1].is_owner and attachment.spans[1].chunk.token_ids == tuple(DOC_A)


def test_statistics_count_lookups_hits_sharing_and_times():
    planner = make_planner()
    empty = planner.statistics()
    assert (empty.lookups, empty.hit_rate, empty.sharing_ratio, empty.average_compute_ms) == (0, 0.0, 1.0, 0.0)
    first = planner.attach(planner.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))
    second = planner.attach(planner.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))
    compute_all(planner, first)
    planner.record_compute(first.spans[1].chunk, 3.0)
    planner.record_compute(first.spans[2].chunk, 5.0)
    stats = planner.statistics()
    assert (stats.lookups, stats.hits, stats.misses, stats.hit_rate) == (4, 2, 2, 0.5)
    assert (stats.cached_chunks, stats.used_blocks, stats.total_blocks, stats.shared_blocks) == (2, 5, 64, 5)
    assert stats.sharing_ratio == 3.0
    assert stats.average_compute_ms == 4.0
    assert (stats.prefix_lookup_tokens, stats.prefix_hit_tokens, stats.prefix_hit_rate) == (18, 0, 0.0)
    assert stats.request_used_blocks == 6 and stats.request_total_blocks == 64 and stats.prefix_blocks == 2
    assert [chunk.hits for chunk in planner.chunks()] == [1, 1]
    planner.release(first)
    planner.release(second)
    assert planner.statistics().sharing_ratio == 1.0


def test_tokens_of_chunks_are_counted_as_reused_moved_or_computed():
    planner = make_planner()
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, strategy="sequential")
    first = planner.attach(planner.plan(layout))
    planner.advance(first, 1, 3)
    stats = planner.statistics()
    assert (stats.reused_tokens, stats.moved_tokens, stats.computed_tokens) == (0, 0, 3), "when they are computed"
    second = planner.attach(planner.plan(layout))
    compute_all(planner, first)
    planner.record_compute(first.spans[1].chunk, 250.0)
    stats = planner.statistics()
    assert (stats.reused_tokens, stats.moved_tokens, stats.computed_tokens) == (5, 9, 14)
    assert (stats.planned_chunks, stats.attaches, stats.computes, stats.compute_seconds) == (4, 2, 1, 0.25)
    planner.release(first)
    planner.release(second)


def test_average_times_come_from_the_clock():
    clock = Clock()
    planner = make_planner(clock=lambda: clock.wait(0.001) or clock.now)
    warmed(planner, layout_of(SYSTEM, [DOC_A], QUESTION))
    assert planner.statistics().average_lookup_ms == pytest.approx(1.0)
    assert planner.statistics().average_attach_ms > 1.0
    assert planner.statistics().lookup_seconds == pytest.approx(0.001)
    assert planner.statistics().attach_seconds * 1e3 == pytest.approx(planner.statistics().average_attach_ms)


def test_planning_imports_no_torch():
    code = "import sys, kvmosaic.cache, kvmosaic.eviction; print('torch' in sys.modules, 'transformers' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "False"]
