"""Chunks in flight: waiting for them, and what happens when they do not come."""

import pytest
from cache.world import compute_all, layout_of, make_planner, plain, warm_up, warmed

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def two_readers(planner):
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)
    return planner.attach(planner.plan(layout)), planner.attach(planner.plan(layout))


def test_a_chunk_that_another_request_computes_is_waited_for():
    planner = make_planner()
    owner, reader = two_readers(planner)
    assert [span.action for span in reader.spans] == ["compute", "wait", "wait", "compute"]
    assert not any(span.is_owner for span in reader.spans)
    assert reader.spans[1].table is owner.spans[1].table
    planner.advance(owner, 1, 3)
    assert reader.spans[1].num_computed == 3 and not reader.spans[1].is_ready
    planner.advance(owner, 1, 2)
    assert reader.spans[1].is_ready and reader.spans[1].chunk.is_ready
    assert not reader.is_stale


def test_only_the_owner_may_compute_a_chunk_and_only_once():
    planner = make_planner()
    owner, reader = two_readers(planner)
    with pytest.raises(AssertionError, match="by its owner"):
        planner.advance(reader, 1, 1)
    planner.advance(owner, 1, 5)
    with pytest.raises(AssertionError, match="no more tokens than there are"):
        planner.advance(owner, 1, 1)


def test_a_chunk_whose_owner_ends_early_is_abandoned_and_planned_again_by_those_who_wait():
    planner = make_planner()
    owner, reader = two_readers(planner)
    planner.advance(owner, 1, 5)
    planner.advance(owner, 2, 4)
    planner.release(owner)
    assert not reader.spans[1].chunk.is_abandoned, "this one was complete"
    assert reader.spans[2].chunk.is_abandoned and reader.is_stale
    planner.check_invariants()
    again = planner.attach(planner.plan(reader.layout))
    assert [span.action for span in again.spans] == ["compute", "reuse", "compute", "compute"]
    assert again.spans[2].is_owner and again.spans[2].num_computed == 0
    planner.release(reader)
    planner.check_invariants()
    assert not again.is_stale


def test_the_blocks_of_an_abandoned_chunk_are_free_when_its_last_reader_has_left():
    planner = make_planner()
    owner, reader = two_readers(planner)
    planner.release(owner)
    assert planner.chunk_pool.num_used == 5 and planner.chunks() == []
    planner.release(reader)
    assert planner.chunk_pool.num_used == 0


def test_an_aborted_prompt_without_readers_leaves_nothing_behind():
    planner = make_planner()
    attachment = planner.attach(planner.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    planner.release(attachment)
    assert planner.chunk_pool.num_used == planner.request_pool.num_used == 0
    planner.check_invariants()


def test_a_warm_up_whose_last_span_is_a_chunk_caches_it():
    planner = make_planner()
    attachment = planner.attach(planner.plan(warm_up(SYSTEM, DOC_A)))
    assert [span.is_owner for span in attachment.spans] == [False, True]
    compute_all(planner, attachment)
    planner.release(attachment)
    assert [chunk.is_ready for chunk in planner.chunks()] == [True]


def test_a_failed_step_makes_everything_it_registered_unknown():
    planner = make_planner()
    layout = layout_of(SYSTEM, [DOC_A], [5] * 9)
    attachment = planner.attach(planner.plan(layout))
    compute_all(planner, attachment)
    assert planner.plan(layout).reused_tokens == 6 + 5 + 8
    planner.forget(attachment)
    planner.check_invariants()
    assert planner.plan(layout).reused_tokens == 0
    planner.release(attachment)
    assert planner.request_pool.num_used == planner.chunk_pool.num_used == 0


def test_a_failed_step_keeps_what_earlier_steps_computed():
    planner = make_planner()
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], [5] * 9)
    attachment = planner.attach(planner.plan(layout))
    planner.begin_step()
    planner.advance(attachment, 0, 6)
    planner.advance(attachment, 1, 5)
    planner.begin_step()
    planner.advance(attachment, 2, 9)
    planner.forget(attachment)
    assert [span.num_reused for span in planner.plan(layout).spans] == [6, 5, 0, 0]
    planner.release(attachment)
    planner.check_invariants()
    assert [span.num_reused for span in planner.plan(layout).spans] == [6, 5, 0, 0]


def test_a_failed_step_keeps_what_somebody_else_had_computed_before():
    planner = make_planner()
    warmed(planner, layout_of(SYSTEM, [DOC_A], QUESTION))
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)
    attachment = planner.attach(planner.plan(layout))
    compute_all(planner, attachment)
    planner.forget(attachment)
    planner.release(attachment)
    assert [span.num_reused for span in planner.plan(layout).spans] == [6, 5, 0, 0]


def test_a_failed_second_writer_does_not_take_the_first_one_down():
    planner = make_planner()
    layout = layout_of(SYSTEM, [], [5] * 9)
    first, second = planner.attach(planner.plan(layout)), planner.attach(planner.plan(layout))
    compute_all(planner, first)
    compute_all(planner, second)
    planner.forget(second)
    planner.release(second)
    assert not first.is_stale
    assert planner.plan(layout).reused_tokens == 6 + 8
    planner.check_invariants()


def test_nothing_is_registered_behind_a_block_that_was_forgotten():
    planner = make_planner()
    writer = planner.attach(planner.plan(plain([1] * 9)))
    compute_all(planner, writer)
    reader = planner.attach(planner.plan(plain([1] * 20)))
    planner.forget(writer)
    planner.advance(reader, 0, 12)
    planner.check_invariants()
    assert planner.plan(plain([1] * 20)).reused_tokens == 0
    planner.release(reader)
    planner.release(writer)
    assert planner.request_pool.num_used == 0


def test_those_who_read_what_a_failed_step_wrote_are_told():
    planner = make_planner()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    writer = planner.attach(planner.plan(layout))
    compute_all(planner, writer)
    reader = planner.attach(planner.plan(layout))
    bystander = planner.attach(planner.plan(plain([9] * 9)))
    planner.forget(writer)
    assert (writer.is_stale, reader.is_stale, bystander.is_stale) == (True, True, False)
    for attachment in (writer, reader, bystander):
        planner.release(attachment)
    planner.check_invariants()
    assert planner.request_pool.num_used == planner.chunk_pool.num_used == 0


def test_blocks_computed_after_a_block_of_a_failed_step_are_forgotten_with_it():
    planner = make_planner()
    writer = planner.attach(planner.plan(plain([1] * 9)))
    planner.advance(writer, 0, 9)
    reader = planner.attach(planner.plan(plain([1] * 13)))
    planner.begin_step()
    planner.advance(reader, 0, reader.last.num_tokens - reader.last.num_computed)
    assert planner.plan(plain([1] * 13)).reused_tokens == 12
    writer.last.registered_step = planner._step  # both ran in the step that failed
    planner.forget(writer)
    assert planner.plan(plain([1] * 13)).reused_tokens == 0
    assert reader.is_stale
    planner.check_invariants()


@pytest.mark.parametrize("call", ["advance", "extend", "fork"])
def test_after_a_failed_step_only_release_is_left(call):
    planner = make_planner()
    attachment = planner.attach(planner.plan(plain([1] * 5)))
    compute_all(planner, attachment)
    planner.forget(attachment)
    arguments = {"advance": (0, 0), "extend": ([1],), "fork": ()}[call]
    with pytest.raises(AssertionError):
        getattr(planner, call)(attachment, *arguments)
    planner.release(attachment)
    assert planner.request_pool.num_used == 0


def test_a_sequence_is_forked_only_when_its_prompt_is_computed():
    planner = make_planner()
    attachment = planner.attach(planner.plan(plain([1] * 5)))
    with pytest.raises(AssertionError, match="when its prompt is computed"):
        planner.fork(attachment)
    planner.check_invariants()
