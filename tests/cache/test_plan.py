"""Plans of small prompts, written out."""

from dataclasses import replace

import pytest
from cache.world import compute_all, layout_of, make_kv_cache, plain, state_of, warm_up, warmed

from kvmosaic.cache import Key, KeyChain
from kvmosaic.layout import repaired

SYSTEM, DOC_A, DOC_B, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4, 5, 6]


def summary(plan):
    return [(span.kind.value, span.action, span.num_tokens, span.num_reused, span.distance) for span in plan.spans]


def test_a_first_prompt_computes_everything():
    plan = make_kv_cache().plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION))
    assert summary(plan) == [
        ("system", "compute", 6, 0, 0),
        ("chunk", "compute", 5, 0, 0),
        ("chunk", "compute", 9, 0, 0),
        ("question", "compute", 3, 0, 0),
    ]
    assert (plan.num_tokens, plan.reused_tokens, plan.computed_tokens) == (23, 0, 23)
    assert all(span.block_ids == () for span in plan.spans)


def test_the_same_documents_in_another_order_with_another_question_are_all_reused():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, strategy="sequential"))
    plan = kv_cache.plan(layout_of(SYSTEM, [DOC_B, DOC_A], [7, 8], strategy="sequential"))
    assert summary(plan) == [
        ("system", "reuse", 6, 6, 0),
        ("chunk", "reuse", 9, 9, 0),
        ("chunk", "reuse", 5, 5, 9),
        ("question", "compute", 2, 0, 0),
    ]
    assert [len(span.block_ids) for span in plan.spans] == [2, 3, 2, 0]


def test_a_system_prompt_is_reused_whole_with_its_partly_filled_last_block():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [], QUESTION))
    plan = kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION))
    assert summary(plan)[0] == ("system", "reuse", 6, 6, 0)


def test_a_longer_system_prompt_reuses_only_the_full_blocks_it_shares():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [], QUESTION))
    plan = kv_cache.plan(layout_of([*SYSTEM, 9], [], QUESTION))
    assert summary(plan)[0] == ("system", "compute", 7, 4, 0)


def test_documents_are_not_reused_under_another_system_prompt_unless_they_saw_nothing():
    kv_cache = make_kv_cache()
    for context in ("system", "none"):
        warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION, context=context))
    other = [9] * 6
    assert summary(kv_cache.plan(layout_of(other, [DOC_A], QUESTION)))[1] == ("chunk", "compute", 5, 0, 0)
    context_free = kv_cache.plan(layout_of(other, [DOC_A], QUESTION, context="none"))
    assert summary(context_free)[1] == ("chunk", "reuse", 5, 5, 6)


def test_tenants_share_nothing():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION), salt="one")
    assert kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION), "two").reused_tokens == 0
    assert kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION), "one").reused_tokens == 11


def test_a_plain_prompt_reuses_its_longest_known_beginning_to_the_token():
    kv_cache = make_kv_cache()
    warmed(kv_cache, plain([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert summary(kv_cache.plan(plain([1, 2, 3, 4, 5, 6, 7, 8, 9]))) == [("plain", "compute", 9, 8, 0)]
    longer = kv_cache.plan(plain([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]))
    assert summary(longer) == [("plain", "compute", 11, 9, 0)] and longer.spans[0].num_copied == 1
    other = kv_cache.plan(plain([1, 2, 3, 4, 5, 0, 7, 8, 9]))
    assert summary(other) == [("plain", "compute", 9, 5, 0)] and other.spans[0].num_copied == 1
    assert kv_cache.plan(plain([1, 2, 3, 0])).reused_tokens == 0, "3 tokens at the very beginning are not worth a copy"
    short = make_kv_cache()
    warmed(short, plain([1, 2, 3]))
    assert short.plan(plain([1, 2, 3, 4])).reused_tokens == 3, "unless they are all that is known"


def test_at_least_one_token_of_the_last_span_is_computed():
    kv_cache = make_kv_cache()
    warmed(kv_cache, plain([1, 2, 3, 4, 5, 6, 7, 8]))
    assert summary(kv_cache.plan(plain([1, 2, 3, 4, 5, 6, 7, 8]))) == [("plain", "compute", 8, 7, 0)]
    small = make_kv_cache(block_size=1)
    warmed(small, layout_of([1], [], [2]))
    assert summary(small.plan(layout_of([1], [], [2])))[-1] == ("question", "compute", 1, 0, 0)


def test_a_warm_up_that_ends_with_a_known_chunk_computes_nothing():
    kv_cache = make_kv_cache()
    layout = warm_up(SYSTEM, DOC_A, DOC_B)
    warmed(kv_cache, layout)
    assert kv_cache.plan(layout).computed_tokens == 0
    assert kv_cache.plan(layout_of(SYSTEM, [DOC_B], QUESTION)).computed_tokens == 3


def test_a_plain_prompt_begins_with_what_is_known_of_a_system_prompt():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [], QUESTION))
    assert summary(kv_cache.plan(plain([*SYSTEM, 7, 7, 7]))) == [("plain", "compute", 9, 6, 0)]


def test_a_system_prompt_shares_the_block_of_a_plain_prompt_that_begins_with_its_end():
    kv_cache = make_kv_cache()
    warmed(kv_cache, plain([*SYSTEM, 7, 7, 7]))
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [], QUESTION)))
    assert (allocation.spans[0].action, allocation.copies) == ("reuse", [])
    assert allocation.spans[0].table.num_tokens == 6 and kv_cache.request_pool.num_shared == 2
    compute_all(kv_cache, allocation)
    kv_cache.check_invariants()
    kv_cache.release(allocation)
    kv_cache.check_invariants()


def test_a_question_behind_the_same_chunks_in_another_order_reuses_its_own_blocks():
    kv_cache = make_kv_cache()
    question = [5] * 9
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B], question))
    assert summary(kv_cache.plan(layout_of(SYSTEM, [DOC_B, DOC_A], question)))[-1] == ("question", "compute", 9, 8, 0)
    assert summary(kv_cache.plan(layout_of(SYSTEM, [DOC_B], question)))[-1][3] == 0


def test_whatever_a_span_saw_and_however_is_in_its_root():
    one, other = [10, 11, 12, 13], [20, 21, 22, 23]
    asked = layout_of(SYSTEM, [one, other], [5, 6], strategy="sequential")
    chosen = ({1: (0,)}, {1: (1,)}, {2: (0,)}, {2: (0, 1)}, {1: (0,), 2: (0,)})
    layouts = [
        asked,
        layout_of(SYSTEM, [other, one], [5, 6], strategy="sequential"),
        *(repaired(asked, tokens) for tokens in chosen),
    ]
    roots = [kv_cache.plan(layout).spans[-1].root for kv_cache in [make_kv_cache()] for layout in layouts]
    assert len(set(roots)) == len(layouts)
    repairs = [make_kv_cache().plan(layout).spans[layout.repair].root for layout in layouts if layout.repair]
    assert len(set(repairs)) == len(chosen)


def test_a_chunk_that_sees_another_one_is_reused_only_where_it_sees_it():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, sees={1: (0,)}))
    assert summary(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], [9], sees={1: (0,)})))[2][1] == "reuse"
    assert summary(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], [9])))[2][1] == "compute"


def test_a_chunk_that_another_request_computes_is_waited_for():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    first = kv_cache.allocate(kv_cache.plan(layout))
    assert summary(kv_cache.plan(layout))[1] == ("chunk", "wait", 5, 5, 0)
    compute_all(kv_cache, first)
    assert summary(kv_cache.plan(layout))[1] == ("chunk", "reuse", 5, 5, 0)


def test_the_second_place_of_a_missing_chunk_waits_for_the_first():
    plan = make_kv_cache().plan(layout_of(SYSTEM, [DOC_A, DOC_B, DOC_A], QUESTION))
    assert [span.action for span in plan.spans] == ["compute", "compute", "compute", "wait", "compute"]
    assert plan.spans[1].key == plan.spans[3].key
    assert plan.computed_tokens == 6 + 5 + 9 + 3


def test_without_prefix_caching_chunks_are_still_reused():
    kv_cache = make_kv_cache(prefix_caching=False)
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    warmed(kv_cache, layout)
    assert [span.action for span in kv_cache.plan(layout).spans] == ["compute", "reuse", "compute"]
    assert kv_cache.request_pool.num_used == 0


def test_planning_changes_nothing_but_the_number_of_lookups():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    warmed(kv_cache, layout)
    before = state_of(kv_cache), kv_cache.statistics()
    kv_cache.plan(layout)
    kv_cache.plan(layout_of(SYSTEM, [DOC_B], QUESTION))
    after = replace(kv_cache.statistics(), planned_chunks=before[1].planned_chunks)
    assert (state_of(kv_cache), after) == before


def test_names_are_not_in_the_key():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION, names=["first"]))
    plan = kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION, names=["second"]))
    assert plan.spans[1].action == "reuse" and plan.spans[1].name == "second"


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_a_plan_prints_as_a_small_table(algorithm):
    kv_cache = make_kv_cache(hash_algorithm=algorithm)
    first = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_B], QUESTION, strategy="sequential")))
    compute_all(kv_cache, first)
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, names=["a.txt", "b.txt"], strategy="sequential")
    assert str(kv_cache.plan(layout)).splitlines() == [
        "span  kind      name   tokens  reused  moved by  action",
        "   0  system    -           6       6         0  reuse",
        "   1  chunk     a.txt       5       0         0  compute",
        "   2  chunk     b.txt       9       9        +5  reuse",
        "   3  question  -           3       0         0  compute",
        "23 tokens: 15 reused, 8 computed",
    ]


def test_chunks_have_keys_of_the_chosen_hash_and_later_spans_see_their_sha256():
    kv_caches = {algorithm: make_kv_cache(hash_algorithm=algorithm) for algorithm in ("sha256", "xxh3_128")}
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION, sees={1: (0,)})
    plans = {}
    for algorithm, kv_cache in kv_caches.items():
        cold = kv_cache.plan(layout)
        warmed(kv_cache, layout)
        plans[algorithm] = kv_cache.plan(layout)
        assert [span.root for span in cold.spans] == [span.root for span in plans[algorithm].spans]
    slow, fast = plans["sha256"].spans, plans["xxh3_128"].spans
    assert [len(chunk.key) for chunk in kv_caches["xxh3_128"].chunks()] == [16, 16]
    assert [len(chunk.key) for chunk in kv_caches["sha256"].chunks()] == [32, 32]
    assert [span.root for span in fast] == [span.root for span in slow], "no weak hash enters another key"
    assert [span.identity for span in fast] == [span.identity for span in slow] == [span.key for span in slow]
    assert all(span.action == "reuse" for span in fast[1:3])


@pytest.mark.parametrize("verify", [True, False])
def test_chunks_with_equal_xxh3_keys_are_told_apart_by_their_tokens(verify, monkeypatch):
    monkeypatch.setattr(KeyChain, "chunk", lambda *_: Key(b"taken"))
    kv_cache = make_kv_cache(hash_algorithm="xxh3_128", verify_tokens=verify)
    other_saw = layout_of([99], [DOC_A], QUESTION)
    for layout in (layout_of(SYSTEM, [DOC_A], QUESTION), layout_of(SYSTEM, [DOC_B], QUESTION), other_saw):
        assert kv_cache.plan(layout).spans[1].action == "compute", "the key is taken by something else"
        warmed(kv_cache, layout)
        assert kv_cache.plan(layout).spans[1].action == "reuse"
    assert sorted(len(chunk.key) for chunk in kv_cache.chunks()) == [5, 32, 32]
    assert [chunk.token_ids for chunk in kv_cache.chunks()] == [tuple(DOC_A), tuple(DOC_B), tuple(DOC_A)]


def test_a_question_is_not_found_behind_a_chunk_that_took_the_key_of_another(monkeypatch):
    monkeypatch.setattr(KeyChain, "chunk", lambda *_: Key(b"taken"))
    kv_cache = make_kv_cache(hash_algorithm="xxh3_128")
    question = list(range(30, 42))
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], question, names=["a"]))
    kv_cache.delete("a")
    twin = [token + 1 for token in DOC_A]  # as long, so that the question stands at the same place
    plan = kv_cache.plan(layout_of(SYSTEM, [twin], question))
    assert [span.num_reused for span in plan.spans] == [6, 0, 0]
    warmed(kv_cache, layout_of(SYSTEM, [twin], question))
    assert kv_cache.plan(layout_of(SYSTEM, [DOC_A], question)).spans[2].num_reused > 0, "that of the first one is kept"
