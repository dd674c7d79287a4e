"""Workloads: the same for the same seed, with the shares they promise."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.bench.sizes import FULL, QUICK, Sizes
from kvmosaic.lab.bench.workloads import EXPECTED_REUSE, FAMILIES, Workload, build_workloads, draw, zipf_weights

SMALL = Sizes(4, 4, 8, 3, 4, 16, 3, 5, 20, 50, 30, 4)


def build(*names: str, seed: int = 0, sizes: Sizes = SMALL) -> list[Workload]:
    return build_workloads(list(names), sizes, 1_000, seed)


def chunks(workload: Workload) -> list[list[tuple[int, ...]]]:
    return [[chunk.token_ids for chunk in prompt.chunks] for batch in workload.batches for prompt in batch]


def known(workload: Workload) -> set[tuple[int, ...]]:
    return {chunk.token_ids for prompt in workload.warm for chunk in prompt.chunks}


def test_same_seed_asks_the_same_and_another_seed_something_else() -> None:
    assert build() == build()
    for one, other in zip(build(seed=1), build(seed=2), strict=True):
        assert one.batches != other.batches


def test_a_workload_asked_for_alone_is_the_one_of_the_whole_run() -> None:
    everything = {workload.name: workload for workload in build()}
    for name in FAMILIES:
        assert all(everything[workload.name] == workload for workload in build(name))


@given(st.integers(34, 3_000))
def test_three_percent_of_the_documents_take_sixty_percent_of_the_requests(count: int) -> None:
    weights = zipf_weights(count)
    assert sum(weights) == pytest.approx(1)
    assert sum(weights[: max(1, round(0.03 * count))]) == pytest.approx(0.6, abs=1e-6)
    assert weights == sorted(weights, reverse=True)


def test_drawn_documents_follow_their_weights_and_differ_within_a_prompt() -> None:
    source = random.Random(0)
    weights = zipf_weights(200)
    singles = [draw(weights, 1, source)[0] for _ in range(5_000)]
    assert sum(rank < 6 for rank in singles) / len(singles) == pytest.approx(0.6, abs=0.03)
    assert all(len(set(draw(weights, 5, source))) == 5 for _ in range(100))


@pytest.mark.parametrize("reuse", EXPECTED_REUSE)
def test_expected_reuse_is_the_share_of_known_documents(reuse: float) -> None:
    workload = next(workload for workload in build("zipf") if workload.x == reuse)
    asked = [document for documents in chunks(workload) for document in documents]
    assert len(asked) == 100
    assert sum(document in known(workload) for document in asked) == round(100 * reuse)


def test_new_documents_are_asked_once_only() -> None:
    for workload in build("fresh", "known", "zipf"):
        new = [document for documents in chunks(workload) for document in documents if document not in known(workload)]
        assert len(new) == len(set(new))


def test_permuted_documents_are_known_and_never_in_the_order_of_the_last_prompt() -> None:
    (workload,) = build("permuted")
    orders = chunks(workload)
    assert all(set(order) == known(workload) for order in orders)
    assert all(one != next_one for one, next_one in itertools.pairwise(orders))


def test_number_of_known_documents_is_the_place_on_the_plot() -> None:
    for workload in build("fresh", "known", "permuted"):
        assert workload.figure == "documents"
        assert {sum(d in known(workload) for d in documents) for documents in chunks(workload)} == {workload.x}


def test_private_copies_ask_the_same_with_a_salt_each() -> None:
    shared, private = build("sharers")[-2:]
    assert (shared.name, private.name) == ("shared-4", "private-4")
    assert {prompt.salt for prompt in shared.batches[0]} == {""}
    assert len({prompt.salt for prompt in private.batches[0]}) == 4
    assert len(shared.warm) == 1 and len(private.warm) == 4
    assert known(shared) == known(private)


def test_turns_repeat_what_was_said_before() -> None:
    (workload,) = build("turns")
    questions = [prompt.segments[-1].token_ids for (prompt,) in workload.batches]
    assert all(later[: len(one)] == one for one, later in itertools.pairwise(questions))


def test_agents_share_tools_in_orders_of_their_own() -> None:
    (workload,) = build("agents")
    tools = chunks(workload)
    assert {tool for own in tools for tool in own} <= known(workload)
    assert len({tuple(own) for own in tools}) == 3


def test_plain_prompts_have_no_documents_and_nothing_in_common() -> None:
    one, eight = build("plain")
    assert [len(batch) for batch in one.batches] == [1] * 3 and [len(batch) for batch in eight.batches] == [8] * 3
    prompts = [prompt for batch in one.batches + eight.batches for prompt in batch]
    assert all(prompt.is_plain for prompt in prompts)
    assert len({prompt.segments[0].token_ids for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("sizes", [FULL, QUICK, SMALL])
def test_no_prompt_with_its_answer_is_longer_than_said(sizes: Sizes) -> None:
    workloads = build_workloads([], sizes, 1_000)
    lengths = [p.num_tokens + w.num_answer for w in workloads for batch in w.batches for p in batch]
    assert max(lengths) <= sizes.longest


def test_sizes_are_made_smaller_until_the_model_has_positions_for_them() -> None:
    smaller = FULL.within(2_048)
    assert smaller.longest <= 2_048 and smaller.documents < FULL.documents
    assert FULL.within(None) == FULL
    with pytest.raises(InvalidConfig, match="--document-tokens"):
        FULL.within(256)


def test_unknown_workload_is_refused_with_the_names() -> None:
    with pytest.raises(InvalidConfig, match="no workload 'nonsense'; choose from question"):
        build("nonsense")


def test_sizes_have_limits() -> None:
    with pytest.raises(InvalidConfig, match="documents must be a whole number between 1 and 1000"):
        Sizes(documents=0)
    with pytest.raises(InvalidConfig, match="catalogue"):
        Sizes(catalogue=3)
