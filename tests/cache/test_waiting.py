"""Chunks in flight: waiting for them, and what happens when they do not come."""

import pytest
from cache.world import compute_all, layout_of, make_kv_cache, plain, warm_up, warmed

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def two_readers(kv_cache):
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)
    return kv_cache.allocate(kv_cache.plan(layout)), kv_cache.allocate(kv_cache.plan(layout))


def test_a_chunk_that_another_request_computes_is_waited_for():
    kv_cache = make_kv_cache()
    owner, reader = two_readers(kv_cache)
    assert [span.action for span in reader.spans] == ["compute", "wait", "wait", "compute"]
    assert not any(span.is_owner for span in reader.spans)
    assert reader.spans[1].table is owner.spans[1].table
    kv_cache.advance(owner, 1, 3)
    assert reader.spans[1].num_computed == 3 and not reader.spans[1].is_ready
    kv_cache.advance(owner, 1, 2)
    assert reader.spans[1].is_ready and reader.spans[1].chunk.is_ready
    assert not reader.is_stale


def test_only_the_owner_may_compute_a_chunk_and_only_once():
    kv_cache = make_kv_cache()
    owner, reader = two_readers(kv_cache)
    with pytest.raises(AssertionError, match="by its owner"):
        kv_cache.advance(reader, 1, 1)
    kv_cache.advance(owner, 1, 5)
    with pytest.raises(AssertionError, match="no more tokens than there are"):
        kv_cache.advance(owner, 1, 1)


def test_a_chunk_whose_owner_ends_early_is_abandoned_and_planned_again_by_those_who_wait():
    kv_cache = make_kv_cache()
    owner, reader = two_readers(kv_cache)
    kv_cache.advance(owner, 1, 5)
    kv_cache.advance(owner, 2, 4)
    kv_cache.release(owner)
    assert not reader.spans[1].chunk.is_abandoned, "this one was complete"
    assert reader.spans[2].chunk.is_abandoned and reader.is_stale
    kv_cache.check_invariants()
    again = kv_cache.allocate(kv_cache.plan(reader.layout))
    assert [span.action for span in again.spans] == ["compute", "reuse", "compute", "compute"]
    assert again.spans[2].is_owner and again.spans[2].num_computed == 0
    kv_cache.release(reader)
    kv_cache.check_invariants()
    assert not again.is_stale


def test_the_blocks_of_an_abandoned_chunk_are_free_when_its_last_reader_has_left():
    kv_cache = make_kv_cache()
    owner, reader = two_readers(kv_cache)
    kv_cache.release(owner)
    assert kv_cache.chunk_pool.num_used == 5 and kv_cache.chunks() == []
    kv_cache.release(reader)
    assert kv_cache.chunk_pool.num_used == 0


def test_an_aborted_prompt_without_readers_leaves_nothing_behind():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    kv_cache.release(allocation)
    assert kv_cache.chunk_pool.num_used == kv_cache.request_pool.num_used == 0
    kv_cache.check_invariants()


def test_a_warm_up_whose_last_span_is_a_chunk_caches_it():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(warm_up(SYSTEM, DOC_A)))
    assert [span.is_owner for span in allocation.spans] == [False, True]
    compute_all(kv_cache, allocation)
    kv_cache.release(allocation)
    assert [chunk.is_ready for chunk in kv_cache.chunks()] == [True]


def test_a_failed_step_makes_everything_it_registered_unknown():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], [5] * 9)
    allocation = kv_cache.allocate(kv_cache.plan(layout))
    compute_all(kv_cache, allocation)
    assert kv_cache.plan(layout).reused_tokens == 6 + 5 + 8
    kv_cache.rollback_step(allocation)
    kv_cache.check_invariants()
    assert kv_cache.plan(layout).reused_tokens == 0
    kv_cache.release(allocation)
    assert kv_cache.request_pool.num_used == kv_cache.chunk_pool.num_used == 0


def test_a_failed_step_keeps_what_earlier_steps_computed():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], [5] * 9)
    allocation = kv_cache.allocate(kv_cache.plan(layout))
    kv_cache.begin_step()
    kv_cache.advance(allocation, 0, 6)
    kv_cache.advance(allocation, 1, 5)
    kv_cache.begin_step()
    kv_cache.advance(allocation, 2, 9)
    kv_cache.rollback_step(allocation)
    assert [span.num_reused for span in kv_cache.plan(layout).spans] == [6, 5, 0, 0]
    kv_cache.release(allocation)
    kv_cache.check_invariants()
    assert [span.num_reused for span in kv_cache.plan(layout).spans] == [6, 5, 0, 0]


def test_a_failed_step_keeps_what_somebody_else_had_computed_before():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION))
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)
    allocation = kv_cache.allocate(kv_cache.plan(layout))
    compute_all(kv_cache, allocation)
    kv_cache.rollback_step(allocation)
    kv_cache.release(allocation)
    assert [span.num_reused for span in kv_cache.plan(layout).spans] == [6, 5, 0, 0]


def test_a_failed_second_writer_does_not_take_the_first_one_down():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [], [5] * 9)
    first, second = kv_cache.allocate(kv_cache.plan(layout)), kv_cache.allocate(kv_cache.plan(layout))
    compute_all(kv_cache, first)
    compute_all(kv_cache, second)
    kv_cache.rollback_step(second)
    kv_cache.release(second)
    assert not first.is_stale
    assert kv_cache.plan(layout).reused_tokens == 6 + 8
    kv_cache.check_invariants()


def test_nothing_is_registered_behind_a_block_that_was_forgotten():
    kv_cache = make_kv_cache()
    writer = kv_cache.allocate(kv_cache.plan(plain([1] * 9)))
    compute_all(kv_cache, writer)
    reader = kv_cache.allocate(kv_cache.plan(plain([1] * 20)))
    kv_cache.rollback_step(writer)
    kv_cache.advance(reader, 0, 12)
    kv_cache.check_invariants()
    assert kv_cache.plan(plain([1] * 20)).reused_tokens == 0
    kv_cache.release(reader)
    kv_cache.release(writer)
    assert kv_cache.request_pool.num_used == 0


def test_those_who_read_what_a_failed_step_wrote_are_told():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    writer = kv_cache.allocate(kv_cache.plan(layout))
    compute_all(kv_cache, writer)
    reader = kv_cache.allocate(kv_cache.plan(layout))
    bystander = kv_cache.allocate(kv_cache.plan(plain([9] * 9)))
    kv_cache.rollback_step(writer)
    assert (writer.is_stale, reader.is_stale, bystander.is_stale) == (True, True, False)
    for allocation in (writer, reader, bystander):
        kv_cache.release(allocation)
    kv_cache.check_invariants()
    assert kv_cache.request_pool.num_used == kv_cache.chunk_pool.num_used == 0


def test_blocks_computed_after_a_block_of_a_failed_step_are_forgotten_with_it():
    kv_cache = make_kv_cache()
    writer = kv_cache.allocate(kv_cache.plan(plain([1] * 9)))
    kv_cache.advance(writer, 0, 9)
    reader = kv_cache.allocate(kv_cache.plan(plain([1] * 13)))
    kv_cache.begin_step()
    kv_cache.advance(reader, 0, reader.last.num_tokens - reader.last.num_computed)
    assert kv_cache.plan(plain([1] * 13)).reused_tokens == 12
    writer.last.registered_step = kv_cache._step  # both ran in the step that failed
    kv_cache.rollback_step(writer)
    assert kv_cache.plan(plain([1] * 13)).reused_tokens == 0
    assert reader.is_stale
    kv_cache.check_invariants()


@pytest.mark.parametrize("call", ["advance", "append_slots", "fork"])
def test_after_a_failed_step_only_release_is_left(call):
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(plain([1] * 5)))
    compute_all(kv_cache, allocation)
    kv_cache.rollback_step(allocation)
    arguments = {"advance": (0, 0), "append_slots": ([1],), "fork": ()}[call]
    with pytest.raises(AssertionError):
        getattr(kv_cache, call)(allocation, *arguments)
    kv_cache.release(allocation)
    assert kv_cache.request_pool.num_used == 0


def test_a_sequence_is_forked_only_when_its_prompt_is_computed():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(plain([1] * 5)))
    with pytest.raises(AssertionError, match="when its prompt is computed"):
        kv_cache.fork(allocation)
    kv_cache.check_invariants()
