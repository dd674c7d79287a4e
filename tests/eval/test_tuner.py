"""The cheapest way that loses little: the choice is made from counted work, beside its obvious twin."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.rows import CaseResult, TaskRow
from kvmosaic.lab.eval.tuner import choose, goal_of
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.tuned_settings import Goal

NONE, FIRST, QUERY = Variant(repair="none"), Variant(repair="first(4)"), Variant(repair="query(0.15)")
SHARED = Variant("shared", "system", "none")
TASKS = ("two-hop", "story")


def _reading(case: str, is_right: bool, work: float) -> CaseResult:
    numbers = {field.name: 1 for field in fields(CaseResult)} | {"document_tokens": 100, "work": work}
    return CaseResult(**{**numbers, "case": case, "answer": "", "score": float(is_right)})


def rows_of(table: dict[Variant, tuple[float, list[int]]], full: tuple[int, ...] = (10, 10)) -> list[TaskRow]:
    """For each way its work and how many of ten questions it answers, by task."""
    rows = []
    for number, task in enumerate(TASKS[: len(full)]):
        for way, (work, right) in {FULL: (1.0, list(full)), **table}.items():
            readings = tuple(_reading(f"{task}:{case}", case < right[number], work) for case in range(10))
            rows.append(TaskRow(way, task, "exact", readings, full[number] / 10))
    return rows


def test_the_cheapest_way_that_reaches_the_goal_is_chosen() -> None:
    rows = rows_of({NONE: (0.0, [8, 10]), QUERY: (0.3, [10, 10]), FIRST: (0.1, [10, 9])})
    tuned = choose(rows, goal_of(0.1))
    assert (tuned.chosen.way, tuned.is_reached) == (FIRST, True)
    assert tuned.said == (
        "sequential, system, first(4): 95.0% of full attention on average, 90.0% on story, 10.0% work. It is the "
        "cheapest way that reaches 90.0% of full attention on average and on every task.",
    )
    assert choose(rows, goal_of(0.02)).chosen.way == QUERY


def test_of_ways_that_cost_the_same_the_first_is_chosen() -> None:
    both = {SHARED: (0.0, [10, 10]), NONE: (0.0, [10, 10])}
    assert choose(rows_of(both), goal_of(0)).chosen.way == SHARED
    assert choose(rows_of(dict(reversed(both.items()))), goal_of(0)).chosen.way == NONE


def test_if_nothing_reaches_the_goal_the_closest_is_told_with_what_fails() -> None:
    rows = rows_of({NONE: (0.0, [5, 10]), FIRST: (0.1, [7, 8]), QUERY: (0.3, [8, 7])})
    tuned = choose(rows, goal_of(0.02))
    assert (tuned.chosen.way, tuned.is_reached) == (FIRST, False)
    assert tuned.said == (
        "Nothing with at most 100.0% work reaches 98.0% of full attention on average and on every task.",
        "The closest: sequential, system, first(4): 75.0% of full attention on average, 70.0% on two-hop, 10.0% work.",
        "two-hop fails: 70.0% of full attention, which answers 100.0%; the best reached there is 80.0%, by sequential, "
        "system, query(0.15).",
        "story fails: 80.0% of full attention, which answers 100.0%; the best reached there is 100.0%, by sequential, "
        "system, none.",
    )


def test_what_costs_too_much_is_not_looked_at() -> None:
    rows = rows_of({NONE: (0.0, [5, 5]), QUERY: (0.3, [10, 10])})
    assert choose(rows, goal_of(0.02, max_work=0.3)).chosen.way == QUERY
    tuned = choose(rows, goal_of(0.02, max_work=0.2))
    assert (tuned.chosen.way, tuned.is_reached) == (NONE, False)
    assert "query" not in " ".join(tuned.said)
    with pytest.raises(InvalidConfig, match=r"at most 0\.2 of the work .* the cheapest costs 0\.300"):
        choose(rows_of({QUERY: (0.3, [10, 10])}), goal_of(0.02, max_work=0.2))


def test_full_attention_is_chosen_only_if_it_was_asked_for() -> None:
    rows = rows_of({NONE: (0.0, [5, 5])})
    assert not choose(rows, goal_of(0.02)).is_reached
    tuned = choose(rows, goal_of(0.02), with_full=True)
    assert (tuned.chosen.way, tuned.is_reached) == (FULL, True)


def test_a_task_that_full_attention_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="full attention answers nothing of 'story'"):
        choose(rows_of({NONE: (0.0, [5, 0])}, (10, 0)), goal_of(0.02))


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((1.1,), "--loss must be a number from 0 to 1, got 1.1"),
        ((float("nan"),), "--loss must be"),
        ((0.1, 101.0), "--max-work must be a number from 0 to 100, got 101.0"),
    ],
)
def test_goals_have_limits(numbers: tuple[float, ...], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told):
        goal_of(*numbers)
    assert goal_of(0.1) == Goal(0.1, 1.0)


correct = st.integers(0, 10)
ways = st.sampled_from([NONE, FIRST, QUERY, SHARED, Variant("shared", "none", "first(4)")])


@given(
    st.dictionaries(
        ways, st.tuples(st.integers(0, 8).map(lambda work: work / 4), st.tuples(correct, correct).map(list))
    ),
    st.tuples(st.integers(1, 10), st.integers(1, 10)),
    st.integers(0, 10).map(lambda loss: loss / 10),
    st.integers(0, 8).map(lambda work: work / 4),
)
def test_the_choice_is_that_of_its_obvious_twin(
    table: dict[Variant, tuple[float, list[int]]],
    full: tuple[int, int],
    loss: float,
    max_work: float,
) -> None:
    def is_good(right: list[int]) -> bool:
        lost = all(10 * each >= round(10 - 10 * loss) * whole for each, whole in zip(right, full, strict=True))
        return lost and 10 * sum(right) >= round(10 - 10 * loss) * sum(full)

    affordable = {way: entry for way, entry in table.items() if entry[0] <= max_work}
    good = {way: entry for way, entry in affordable.items() if is_good(entry[1])}
    goal = goal_of(loss, max_work)
    if not affordable:
        with pytest.raises(InvalidConfig):
            choose(rows_of(table, full), goal)
        return
    tuned = choose(rows_of(table, full), goal)
    assert tuned.is_reached == bool(good)
    assert tuned.chosen.way in affordable
    if good:
        assert tuned.chosen.way == min(good, key=lambda way: good[way][0])
