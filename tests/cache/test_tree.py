"""The tree of what is known, written out for small caches and bounded for large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cache.world import Clock, compute_all, layout_of, make_kv_cache, plain, warm_up, warmed
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.cache import PrefixTree, TreeDocument, TreeLimits, TreePlace, TreeRun, TreeSystem, prefix_tree
from kvmosaic.errors import InvalidConfig

SYSTEM, FERRY, MILL = [1] * 6, [2] * 5, [3] * 9
FIRST = [4, 5, 6, 7, 8]
NAMES = ["ferry", "mill"]


def talked(kv_cache, *turns, tenant="", salt="", documents=(FERRY, MILL), names=NAMES):
    """A conversation, turn by turn: each is a question and its answer, of which the last token is never computed."""
    history = []
    for question, answer in turns:
        layout = layout_of(SYSTEM, documents, [*history, *question], names=names)
        allocation = kv_cache.allocate(kv_cache.plan(layout, salt, tenant))
        compute_all(kv_cache, allocation)
        kv_cache.begin_step()
        kv_cache.append_slots(allocation, answer[:-1])
        kv_cache.advance(allocation, len(allocation.spans) - 1, len(answer) - 1)
        kv_cache.end_step()
        kv_cache.release(allocation)
        history += [*question, *answer]


def run(num_tokens, num_blocks, hits, token_ids, children=(), **changes):
    """A run that nobody reads; the clock stands still."""
    return TreeRun(num_tokens, num_blocks, hits, 0, 0.0, tuple(token_ids), tuple(children), **changes)


def test_a_conversation_and_its_forks_are_a_tree_under_their_system_text():
    kv_cache = make_kv_cache()
    talked(kv_cache, (FIRST, [9, 9, 9]), ([10, 11], [12, 13]))
    talked(kv_cache, (FIRST, [9, 9, 9]), ([20, 21], [22, 23]))
    tree = kv_cache.prefix_tree(TreeLimits(tokens=3))
    tree.check_invariants(TreeLimits(tokens=3))
    forks = [run(3, 1, 0, [10, 11, 12]), run(3, 1, 0, [20, 21, 22])]
    first_turn = run(4, 1, 3, [4, 5, 6], [run(4, 1, 1, [8, 9, 9], forks)])
    assert tree == PrefixTree(
        systems=(
            TreeSystem(
                tenant="",
                is_salted=False,
                num_tokens=6,
                token_ids=(1, 1, 1),
                documents=(
                    TreeDocument("mill", 9, 3, 3, 0, False, True, 0.0),
                    TreeDocument("ferry", 5, 2, 3, 0, False, True, 0.0),
                ),
                places=(TreePlace(("ferry", "mill"), 15, (first_turn,)),),
            ),
            TreeSystem("", False, 0, places=(TreePlace((), 0, (run(6, 2, 3, [1, 1, 1]),)),)),
        ),
        block_size=4,
    )


def test_documents_that_nobody_has_asked_about_are_shown_under_their_system_text():
    kv_cache = make_kv_cache()
    warmed(kv_cache, warm_up(SYSTEM, FERRY))
    (system,) = (each for each in kv_cache.prefix_tree().systems if each.num_tokens)
    assert [document.num_tokens for document in system.documents] == [5] and system.places == ()


def test_running_sequences_are_counted_where_they_read():
    kv_cache = make_kv_cache()
    clock = kv_cache._clock
    talked(kv_cache, (FIRST, [9, 9, 9]))
    clock.wait(7)
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [FERRY, MILL], [*FIRST, 9, 9, 9, 50], names=NAMES)))
    system = kv_cache.prefix_tree().systems[0]
    (first,) = system.places[0].runs
    assert [(each.users, each.idle_seconds) for each in system.documents] == [(1, 0.0), (1, 0.0)]
    assert (first.users, first.idle_seconds, first.hits) == (1, 0.0, 1)
    kv_cache.release(allocation)


def test_tenants_see_their_own_and_salts_are_told_apart_but_not_shown():
    kv_cache = make_kv_cache()
    talked(kv_cache, (FIRST, [9, 9]), tenant="one", salt="secret")
    talked(kv_cache, (FIRST, [9, 9]), tenant="one")
    talked(kv_cache, (FIRST, [9, 9]), tenant="two")
    shown = {name: kv_cache.prefix_tree(tenant=name) for name in ("one", "two", "three", "")}
    assert {name: {each.tenant for each in tree.systems} for name, tree in shown.items()} == {
        "one": {"one"},
        "two": {"two"},
        "three": set(),
        "": set(),
    }
    assert sorted(each.is_salted for each in shown["one"].systems) == [False, False, True, True]
    assert "secret" not in str(shown["one"].to_dict())
    everything = kv_cache.prefix_tree(tenant=None)
    assert {each.tenant for each in everything.systems} == {"one", "two"}
    mine = everything.without_tokens(lambda tenant: tenant == "one").with_texts(
        lambda ids: f"{len(ids)} tokens", lambda tenant: tenant == "one"
    )
    for system in mine.systems:
        is_mine = system.tenant == "one"
        assert (system.text is not None) == is_mine
        assert all((document.name in NAMES) == is_mine for document in system.documents)
        assert all(
            place.documents == (("ferry", "mill") if is_mine else ("?", "?"))
            for place in system.places[:1]
            if system.num_tokens
        )
    foreign = [each for each in mine.systems if each.tenant == "two"]
    runs = replace(mine, systems=tuple(foreign)).runs
    assert runs and all(each.token_ids == () and each.text is None for each in runs)


def test_what_has_left_is_not_shown():
    kv_cache = make_kv_cache()
    talked(kv_cache, (FIRST, [9, 9, 9]))
    kv_cache.reset()
    assert kv_cache.prefix_tree() == PrefixTree((), 4)


def test_long_lists_of_names_are_cut_and_the_memory_for_names_is_bounded(monkeypatch):
    kv_cache = make_kv_cache(request_blocks=256, chunk_blocks=512)
    many = [[number] * 2 for number in range(2, prefix_tree.MAX_NAMED + 4)]
    talked(kv_cache, (FIRST, [9, 9, 9]), documents=many, names=[f"name {number}" for number in range(len(many))])
    shown = [place.documents for system in kv_cache.prefix_tree().systems for place in system.places]
    assert (*(f"name {number}" for number in range(prefix_tree.MAX_NAMED)), "…") in shown
    monkeypatch.setattr(prefix_tree, "MAX_ORIGIN_CHARACTERS", 9_000)
    for number in range(20):
        talked(kv_cache, (FIRST, [9, 9, number]), documents=(FERRY, [number + 20]), names=["x" * 4_000, str(number)])
        kept = [origin for _, origin in kv_cache._origins.newest_first()]
        assert sum(origin.num_characters for origin in kept) <= 9_000
        assert kept[0].documents == ("x" * 4_000, str(number))
    places = [place for system in kv_cache.prefix_tree().systems for place in system.places]
    assert [place.documents[1] for place in places if len(place.documents) > 1] == ["19", "18"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 0), ("depth", 33), ("children", 101), ("runs", 2_001), ("tokens", 65), ("runs", True)],
)
def test_limits_have_bounds(field, value):
    with pytest.raises(InvalidConfig, match=f"{field} of the tree must be between"):
        TreeLimits(**{field: value})


def test_a_view_looks_at_no_more_than_it_shows(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MAX_LOOKED_AT", 50)
    monkeypatch.setattr(prefix_tree, "MAX_ORIGINS", 20)
    kv_cache = make_kv_cache(request_blocks=4_000, chunk_blocks=400)
    warmed(kv_cache, plain([9] * 400))
    for number in range(100):
        warmed(kv_cache, layout_of([7] * 4, [[number] * 4], [*([8] * 40), number], names=[str(number)]))
    limits = TreeLimits(depth=2, children=3, runs=5)
    tree = kv_cache.prefix_tree(limits)
    tree.check_invariants(limits)
    (system,) = (each for each in tree.systems if each.num_tokens)
    assert [document.name for document in system.documents] == ["99", "98", "97"]
    assert system.num_hidden_documents <= 50 and system.num_hidden_places <= 20
    assert len(tree.runs) == 5
    assert sum(each.num_blocks for each in tree.runs) <= 50 + 5
    assert len(kv_cache._origins._origins) <= 20


conversations = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=3),
        st.sampled_from(["", "one"]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
)


@settings(max_examples=examples(40))
@given(
    conversations,
    st.builds(
        TreeLimits,
        depth=st.integers(1, 4),
        children=st.integers(1, 4),
        runs=st.integers(1, 9),
        tokens=st.integers(0, 9),
    ),
    st.integers(14, 60),
    st.randoms(use_true_random=False),
)
def test_every_tree_is_within_its_limits_and_a_large_one_shows_every_block(talks, limits, num_blocks, chance):
    kv_cache = make_kv_cache(request_blocks=num_blocks, chunk_blocks=12, clock=Clock())
    for lengths, tenant, has_ferry, has_mill in talks:
        turns = [([chance.randrange(2) for _ in range(a)], [chance.randrange(2) for _ in range(b)]) for a, b in lengths]
        documents = [FERRY] * has_ferry + [MILL] * has_mill
        talked(kv_cache, *turns, tenant=tenant, documents=documents, names=["d"] * len(documents))
        kv_cache._clock.wait(1)
    kv_cache.check_invariants()
    for tenant in ("", "one", None):
        kv_cache.prefix_tree(limits, tenant).check_invariants(limits)
    everything = TreeLimits(depth=32, children=100, runs=2_000)
    shown = sum(each.num_blocks for each in kv_cache.prefix_tree(everything, None).runs)
    assert shown == len(kv_cache._prefix)
