"""Chunks that begin alike share blocks: found without looking at all of them, counted once, and freed by the last."""

from __future__ import annotations

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, state_of, warmed
from support.cpu_time import least_cpu_seconds

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


def test_a_miss_costs_the_same_among_many_chunks_that_begin_alike():
    def seconds(num_chunks: int) -> float:
        kv_cache = make_kv_cache(chunk_blocks=2 * num_chunks + 8, max_chunks=num_chunks + 9)
        for number in range(num_chunks):
            warmed(kv_cache, layout_of(None, [[5, 5, 5, 5, number, 5]], QUESTION))
        layout = layout_of(None, [[5, 5, 5, 5, num_chunks, 5]], QUESTION)

        def plan() -> None:
            for _ in range(300):
                assert kv_cache.plan(layout).spans[0].num_reused == 4

        return least_cpu_seconds(plan)

    assert seconds(4_000) < 5 * seconds(100)


def test_two_new_texts_of_one_prompt_share_what_the_first_computes():
    kv_cache = make_kv_cache()
    plan = kv_cache.plan(prompt(OLD, NEW))
    assert [span.num_reused for span in plan.spans[1:3]] == [0, 12]
    allocation = kv_cache.allocate(plan)
    old, new = allocation.spans[1:3]
    assert kv_cache.chunk_pool.num_used == 5 + 3
    assert old.can_advance and not new.can_advance
    kv_cache.begin_step()
    kv_cache.advance(allocation, 1, 11)
    assert not new.can_advance
    kv_cache.advance(allocation, 1, 1)
    assert new.can_advance, "what both have in common is computed by this step"
    kv_cache.end_step()
    compute_all(kv_cache, allocation)
    kv_cache.check_invariants()
    kv_cache.release(allocation)
    assert kv_cache.statistics().computed_tokens == 20 + 11


def test_a_request_waits_for_the_start_that_another_computes():
    kv_cache = make_kv_cache()
    first, second = (kv_cache.allocate(kv_cache.plan(prompt(document))) for document in (OLD, NEW))
    assert kv_cache.chunk_pool.num_used == 5 + 3
    with pytest.raises(AssertionError, match="computed before"):
        kv_cache.advance(second, 1, 1)
    compute_all(kv_cache, first)
    compute_all(kv_cache, second)
    assert second.spans[1].is_ready and not second.is_stale


@pytest.mark.parametrize("is_failed", [True, False])
def test_a_chunk_is_abandoned_with_the_unfinished_one_that_computes_its_start(is_failed):
    kv_cache = make_kv_cache()
    third = [*NEW[:20], 8, 8, 8]
    readers = [kv_cache.allocate(kv_cache.plan(prompt(document))) for document in (OLD, NEW, third)]
    kv_cache.begin_step()
    kv_cache.advance(readers[0], 1, 20 if is_failed else 19)
    if is_failed:
        kv_cache.rollback_step(readers[0])
    kv_cache.end_step()
    kv_cache.release(readers[0])
    assert [reader.is_stale for reader in readers[1:]] == [True, True]
    kv_cache.check_invariants()
    for reader in readers[1:]:
        kv_cache.release(reader)
    kv_cache.check_invariants()
    assert not kv_cache.chunk_pool.num_used and not kv_cache.chunks()


def test_a_chunk_stays_when_the_one_that_computed_its_start_is_complete_and_deleted():
    kv_cache = make_kv_cache()
    first, second = (kv_cache.allocate(kv_cache.plan(prompt(document))) for document in (OLD, NEW))
    compute_all(kv_cache, first)
    kv_cache.delete("20", None, when_idle=True)
    kv_cache.release(first)
    kv_cache.check_invariants()
    compute_all(kv_cache, second)
    assert not second.is_stale and kv_cache.chunk_pool.num_used == 6


@pytest.mark.parametrize("order", [(OLD, NEW), (NEW, OLD), (OLD, NEW, OLD), (OLD[:14], NEW, OLD)])
@pytest.mark.parametrize("cached", [(), (OLD,), (NEW,), ([*OLD, 1],)])
def test_blocks_that_a_prompt_shares_with_itself_count_once(order, cached):
    kv_cache = make_kv_cache()
    reader = kv_cache.allocate(kv_cache.plan(prompt(*order)))
    least = kv_cache.chunk_pool.num_used
    kv_cache.release(reader)
    for num_blocks, fits in ((least, True), (least - 1, False)):
        kv_cache = make_kv_cache(chunk_blocks=num_blocks)
        for document in cached:
            warmed(kv_cache, prompt(document))
        needed = kv_cache.num_too_large(prompt(*order))
        assert needed == (None if fits else least)
        if fits:
            kv_cache.allocate(kv_cache.plan(prompt(*order)))
            kv_cache.check_invariants()


def test_a_start_that_only_another_prompt_needs_is_given_up_for_one_inside():
    kv_cache = make_kv_cache(chunk_blocks=8)
    warmed(kv_cache, prompt([*NEW[:20], 8]))
    assert kv_cache.num_too_large(prompt(OLD, NEW)) is None
    kv_cache.allocate(kv_cache.plan(prompt(OLD, NEW)))
    kv_cache.check_invariants()
    assert kv_cache.chunk_pool.num_used == 8 and len(kv_cache.chunks()) == 2


def test_blocks_shared_with_a_pinned_text_need_no_room():
    kv_cache = make_kv_cache(chunk_blocks=8)
    warmed(kv_cache, prompt(OLD))
    kv_cache.pin("20", None)
    assert kv_cache.num_too_large(prompt(NEW)) is None
    kv_cache.allocate(kv_cache.plan(prompt(NEW)))
    kv_cache.check_invariants()
