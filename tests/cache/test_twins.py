"""Chunks that are missing here and cached behind another system text."""

import pytest
from cache.world import compute_all, layout_of, make_planner, state_of, warmed

SYSTEM, OTHER, DOC, QUESTION = [1] * 6, [9] * 6, [2] * 5, [4, 5, 6]


def has_twins(planner, layout, salt="", tenant=""):
    """What a prompt is told about its chunks; it runs to its end."""
    attachment = planner.attach(planner.plan(layout, salt, tenant))
    told = [span.has_twin for span in attachment.spans if span.chunk is not None]
    planner.check_invariants()
    compute_all(planner, attachment)
    planner.release(attachment)
    planner.check_invariants()
    return told


def test_a_miss_says_that_the_chunk_is_there_behind_another_system_text():
    planner = make_planner()
    assert has_twins(planner, layout_of(SYSTEM, [DOC], QUESTION)) == [False]
    assert has_twins(planner, layout_of(OTHER, [DOC, [7]], QUESTION)) == [True, False]
    assert has_twins(planner, layout_of(None, [DOC], QUESTION)) == [True]
    assert has_twins(planner, layout_of(OTHER, [DOC], QUESTION)) == [False], "it is a hit"


@pytest.mark.parametrize("who", [{"tenant": "other"}, {"salt": "other"}])
def test_other_tenants_and_salts_learn_nothing(who):
    planner = make_planner()
    warmed(planner, layout_of(SYSTEM, [DOC], QUESTION))
    assert has_twins(planner, layout_of(OTHER, [DOC], QUESTION), **who) == [False]


def test_a_chunk_that_saw_more_than_a_system_text_is_no_twin():
    planner = make_planner()
    warmed(planner, layout_of(SYSTEM, [[7], DOC], QUESTION, sees={1: (0,)}))
    assert has_twins(planner, layout_of(SYSTEM, [DOC], QUESTION)) == [False]
    assert has_twins(planner, layout_of(SYSTEM, [[8], DOC], QUESTION, sees={1: (0,)})) == [False, False]


def test_only_what_is_complete_and_can_be_found_is_a_twin():
    planner = make_planner()
    first = planner.attach(planner.plan(layout_of(SYSTEM, [DOC], QUESTION)))
    assert has_twins(planner, layout_of(OTHER, [DOC], QUESTION)) == [False], "the first is being computed"
    compute_all(planner, first)
    for chunk in planner.chunks():
        planner.delete(chunk.key, when_idle=True)
    assert has_twins(planner, layout_of([3], [DOC], QUESTION)) == [False], "deleted, though the first still reads it"
    planner.release(first)
    planner.reset()
    assert len(planner._chunks.twins) == 0


def test_an_attach_that_fails_lists_nothing():
    planner = make_planner(chunk_blocks=3)
    warmed(planner, layout_of(SYSTEM, [DOC], QUESTION))
    holder = planner.attach(planner.plan(layout_of(SYSTEM, [DOC], QUESTION)))
    before, listed = state_of(planner), len(planner._chunks.twins)
    with pytest.raises(Exception, match="blocks"):
        planner.attach(planner.plan(layout_of(OTHER, [DOC], QUESTION)))
    assert (state_of(planner), len(planner._chunks.twins)) == (before, listed)
    planner.release(holder)
    planner.check_invariants()
