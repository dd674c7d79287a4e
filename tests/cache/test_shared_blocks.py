"""Chunks that begin alike share blocks: found without looking at all of them, counted once, and freed by the last."""

from __future__ import annotations

import time

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, state_of, warmed

from kvmosaic.cache import BlockState, KVCache
from kvmosaic.errors import ChunkCacheFull, QuotaExceeded

SYSTEM, QUESTION = [1] * 6, [4, 5, 6]
OLD = list(range(100, 120))
NEW = [*OLD[:12], 7, 7, 7, *OLD[12:]]
FREE, IDLE, IN_USE, SHARED, PINNED = BlockState


def prompt(*documents: list[int]):
    return layout_of(SYSTEM, documents, QUESTION, names=[str(len(document)) for document in documents])


def world(**options) -> KVCache:
    kv_cache = make_kv_cache(clock=Clock(), **options)
    warmed(kv_cache, prompt(OLD), tenant="t")
    return kv_cache


def test_an_edited_chunk_computes_what_follows_the_last_full_block_before_the_edit():
    kv_cache = world()
    plan = kv_cache.plan(prompt(NEW), tenant="t")
    assert (plan.spans[1].action, plan.spans[1].num_reused, plan.spans[1].num_to_compute) == ("compute", 12, 11)
    allocation = kv_cache.allocate(plan)
    new, (old,) = allocation.spans[1].chunk, kv_cache.find_chunks("20", None, "t")
    assert list(new.block_ids[:3]) == list(old.block_ids[:3]) == list(plan.spans[1].block_ids)
    assert not set(new.block_ids[3:]) & set(old.block_ids)
    compute_all(kv_cache, allocation)
    kv_cache.release(allocation)
    kv_cache.check_invariants()
    assert kv_cache.tenant_usage("t").num_blocks == kv_cache.chunk_pool.num_used == 5 + 3
    assert kv_cache.statistics().computed_tokens == 20 + 11
    assert kv_cache.statistics().reused_tokens == 12


@pytest.mark.parametrize(
    ("document", "num_kept"),
    [
        (OLD, 20),
        (OLD[:12], 8),
        (OLD[:13], 12),
        ([*OLD, 1], 20),
        ([*OLD[:16], 1], 16),
        (OLD[1:], 0),
        (OLD[:4], 0),
        (OLD[:3], 0),
    ],
)
def test_at_least_the_last_token_of_a_missing_chunk_is_computed(document, num_kept):
    kv_cache = world()
    assert kv_cache.plan(prompt(document), tenant="t").spans[1].num_reused == num_kept


@pytest.mark.parametrize("difference", ["tenant", "salt", "system", "seen"])
def test_what_saw_something_else_is_not_shared(difference):
    kv_cache = world()
    layout, tenant = prompt(NEW), "t"
    if difference == "tenant":
        tenant = "other"
    elif difference == "system":
        layout = layout_of([2] * 6, [NEW], QUESTION)
    elif difference == "seen":
        layout = layout_of(SYSTEM, [[9, 9], NEW], QUESTION, sees={1: (0,)})
    span = kv_cache.plan(layout, "salt" if difference == "salt" else "", tenant).spans[-2]
    assert span.num_tokens == len(NEW) and span.num_reused == 0


def test_a_chunk_from_a_lossy_tier_is_not_shared():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(prompt(OLD)))
    allocation.spans[1].chunk.codec = "int8"
    kv_cache.load(allocation, 1)
    kv_cache.check_invariants()
    assert kv_cache.plan(prompt(OLD)).spans[1].action == "reuse"
    assert kv_cache.plan(prompt(NEW)).spans[1].num_reused == 0


def test_shared_blocks_are_idle_when_no_holder_is_used_and_free_when_all_have_left():
    kv_cache = world()
    warmed(kv_cache, prompt(NEW), tenant="t")
    usage = kv_cache.tenant_usage("t")
    assert (usage.num_blocks, usage.num_idle_blocks) == (8, 8)
    assert kv_cache.block_map().chunk_cache.count(IDLE) == 8
    reader = kv_cache.allocate(kv_cache.plan(prompt(NEW), tenant="t"))
    assert kv_cache.tenant_usage("t").num_idle_blocks == 2
    assert kv_cache.block_map().chunk_cache.count(IN_USE) == 6
    kv_cache.delete("20", None, "t")
    kv_cache.check_invariants()
    assert kv_cache.tenant_usage("t").num_blocks == 6
    assert kv_cache.freed_by([reader])["chunk_cache"] == 6
    kv_cache.release(reader)
    kv_cache.delete("23", None, "t")
    kv_cache.check_invariants()
    assert kv_cache.chunk_pool.num_used == kv_cache.tenant_usage("t").num_blocks == 0


def test_a_reader_of_one_text_frees_only_what_no_other_text_in_use_holds():
    kv_cache = world()
    warmed(kv_cache, prompt(NEW), tenant="t")
    readers = [kv_cache.allocate(kv_cache.plan(prompt(document), tenant="t")) for document in (OLD, NEW)]
    assert kv_cache.freed_by(readers[:1])["chunk_cache"] == 2
    assert kv_cache.freed_by(readers[1:])["chunk_cache"] == 3
    assert kv_cache.freed_by(readers)["chunk_cache"] == 8


def test_pinned_shared_blocks_count_once_and_stay():
    kv_cache = world()
    warmed(kv_cache, prompt(NEW), tenant="t")
    kv_cache.pin("20", None, "t")
    kv_cache.check_invariants()
    usage = kv_cache.tenant_usage("t")
    assert (usage.num_pinned_blocks, usage.num_idle_blocks) == (5, 3)
    kv_cache.pin("23", None, "t")
    assert kv_cache.tenant_usage("t").num_pinned_blocks == 8
    kv_cache.unpin("20", None, "t")
    kv_cache.check_invariants()
    assert kv_cache.tenant_usage("t").num_pinned_blocks == 6
    assert kv_cache.block_map().chunk_cache.count(PINNED) == 6


@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_quota_counts_shared_blocks_once(eviction):
    kv_cache = make_kv_cache(clock=Clock(), eviction=eviction)
    kv_cache.set_quota("t", 8)
    warmed(kv_cache, prompt(OLD), tenant="t")
    warmed(kv_cache, prompt(NEW), tenant="t")
    assert len(kv_cache.chunks()) == 2 and kv_cache.tenant_usage("t").num_blocks == 8
    warmed(kv_cache, prompt([9] * 4), tenant="t")
    kv_cache.check_invariants()
    assert kv_cache.tenant_usage("t").num_blocks <= 8
    kv_cache.set_quota("t", 5)
    kv_cache.check_invariants()
    assert kv_cache.tenant_usage("t").num_blocks <= 5


def test_a_text_is_computed_whole_where_the_old_one_must_leave_for_it():
    kv_cache = world(chunk_blocks=7)
    allocation = kv_cache.allocate(kv_cache.plan(prompt(NEW), tenant="t"))
    assert allocation.spans[1].num_computed == 0 and len(kv_cache.chunks()) == 1
    kv_cache.check_invariants()


def test_a_text_that_can_never_fit_is_refused_and_changes_nothing():
    kv_cache = world(chunk_blocks=8)
    kv_cache.set_quota("t", 5)
    before = state_of(kv_cache)
    for document, error in (([*OLD, *range(40)], ChunkCacheFull), (NEW, QuotaExceeded)):
        with pytest.raises(error):
            kv_cache.allocate(kv_cache.plan(prompt(document), tenant="t" if error is QuotaExceeded else "u"))
        assert state_of(kv_cache) == before


def test_both_texts_in_one_prompt_share_blocks():
    kv_cache = world()
    allocation = kv_cache.allocate(kv_cache.plan(prompt(OLD, NEW), tenant="t"))
    assert kv_cache.chunk_pool.num_used == 8
    kv_cache.check_invariants()
    kv_cache.release(allocation)  # before the new one was computed
    kv_cache.check_invariants()
    assert kv_cache.chunk_pool.num_used == 5


def test_three_texts_share_their_longest_common_beginnings():
    kv_cache = world()
    third = [*NEW[:20], 8, 8, 8]
    warmed(kv_cache, prompt(NEW), tenant="t")
    warmed(kv_cache, prompt(third), tenant="t")
    kv_cache.check_invariants()
    assert kv_cache.chunk_pool.num_used == 5 + 3 + 1
    for name in ("20", "23"):
        kv_cache.delete(name, None, "t")
        kv_cache.check_invariants()
    assert kv_cache.chunk_pool.num_used == 0, "the two of 23 tokens have one name"


def test_the_time_of_a_part_counts_as_that_of_the_whole():
    kv_cache = world()
    allocation = kv_cache.allocate(kv_cache.plan(prompt(NEW), tenant="t"))
    kv_cache.record_compute(allocation.spans[1].chunk, 11.0)
    assert allocation.spans[1].chunk.compute_ms == 23.0 and kv_cache.statistics().compute_seconds == 0.011


@pytest.mark.alone
def test_a_miss_costs_the_same_among_many_chunks_that_begin_alike():
    def seconds(num_chunks: int) -> float:
        kv_cache = make_kv_cache(chunk_blocks=2 * num_chunks + 8, max_chunks=num_chunks + 9)
        for number in range(num_chunks):
            warmed(kv_cache, layout_of(None, [[5, 5, 5, 5, number, 5]], QUESTION))
        layout = layout_of(None, [[5, 5, 5, 5, num_chunks, 5]], QUESTION)
        began = time.process_time()
        for _ in range(300):
            assert kv_cache.plan(layout).spans[0].num_reused == 4
        return time.process_time() - began

    assert seconds(4_000) < 5 * seconds(100)
