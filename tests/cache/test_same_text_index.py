"""Chunks that are missing here and cached after another system text."""

from dataclasses import replace

import pytest
from cache.world import compute_all, layout_of, make_kv_cache, state_of, warmed

from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt

SYSTEM, OTHER, DOC, QUESTION = [1] * 6, [9] * 6, [2] * 5, [4, 5, 6]


def has_twins(kv_cache, layout, salt="", tenant=""):
    """What a prompt is told about its chunks; it runs to its end."""
    allocation = kv_cache.allocate(kv_cache.plan(layout, salt, tenant))
    told = [span.twin for span in allocation.spans if span.chunk is not None]
    kv_cache.check_invariants()
    compute_all(kv_cache, allocation)
    kv_cache.release(allocation)
    kv_cache.check_invariants()
    return told


def test_a_miss_says_that_the_chunk_is_there_behind_another_system_text():
    kv_cache = make_kv_cache()
    assert has_twins(kv_cache, layout_of(SYSTEM, [DOC], QUESTION)) == [""]
    assert has_twins(kv_cache, layout_of(OTHER, [DOC, [7]], QUESTION)) == ["other_system_text", ""]
    assert has_twins(kv_cache, layout_of(None, [DOC], QUESTION)) == ["other_system_text"]
    assert has_twins(kv_cache, layout_of(OTHER, [DOC], QUESTION)) == [""], "it is a hit"


def test_a_miss_says_that_the_chunk_is_there_for_another_place():
    kv_cache = make_kv_cache()

    def told(*documents, system=SYSTEM):
        prompt = replace(Prompt.from_tokens(system, documents, QUESTION), companions=((8, 8, 8),))
        return has_twins(kv_cache, arrange(prompt, "sequential", "companions"))

    assert told([7], DOC) == ["", ""]
    assert told(DOC) == ["other_companions"], "it was a later document"
    assert told(DOC, [7]) == ["", "other_companions"], "the other one was the first"
    assert told([7], DOC, system=OTHER) == ["other_system_text", "other_system_text"]


@pytest.mark.parametrize("who", [{"tenant": "other"}, {"salt": "other"}])
def test_other_tenants_and_salts_learn_nothing(who):
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC], QUESTION))
    assert has_twins(kv_cache, layout_of(OTHER, [DOC], QUESTION), **who) == [""]


def test_a_chunk_that_saw_more_than_a_system_text_is_no_twin():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [[7], DOC], QUESTION, sees={1: (0,)}))
    assert has_twins(kv_cache, layout_of(SYSTEM, [DOC], QUESTION)) == [""]
    assert has_twins(kv_cache, layout_of(SYSTEM, [[8], DOC], QUESTION, sees={1: (0,)})) == ["", ""]


def test_only_what_is_complete_and_can_be_found_is_a_twin():
    kv_cache = make_kv_cache()
    first = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC], QUESTION)))
    assert has_twins(kv_cache, layout_of(OTHER, [DOC], QUESTION)) == [""], "the first is being computed"
    compute_all(kv_cache, first)
    for chunk in kv_cache.chunks():
        kv_cache.delete(chunk.key, when_idle=True)
    assert has_twins(kv_cache, layout_of([3], [DOC], QUESTION)) == [""], "deleted, though the first still reads it"
    kv_cache.release(first)
    kv_cache.reset()
    assert len(kv_cache._chunks.same_text) == 0


def test_an_allocation_that_fails_lists_nothing():
    kv_cache = make_kv_cache(chunk_blocks=3)
    warmed(kv_cache, layout_of(SYSTEM, [DOC], QUESTION))
    holder = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC], QUESTION)))
    before, listed = state_of(kv_cache), len(kv_cache._chunks.same_text)
    with pytest.raises(Exception, match="blocks"):
        kv_cache.allocate(kv_cache.plan(layout_of(OTHER, [DOC], QUESTION)))
    assert (state_of(kv_cache), len(kv_cache._chunks.same_text)) == (before, listed)
    kv_cache.release(holder)
    kv_cache.check_invariants()
