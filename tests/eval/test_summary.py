"""Summaries: what rows say together, and the sentences about a small budget."""

from __future__ import annotations

import pytest

from kvmosaic.lab.eval.rows import CaseResult, TaskRow, findings, percentile, summarize
from kvmosaic.lab.eval.variants import FULL, Variant

NONE, SOME, MUCH = Variant(), Variant(repair="query(0.15)"), Variant(repair="first(64)")


def row(way: Variant, task: str, right: int, full: int, *, repaired: int = 0, first: float = 0.1) -> TaskRow:
    """20 questions, of which some are right, over 100 tokens of documents each."""
    readings = tuple(
        CaseResult(f"{task}:{n}", "x", float(n < right), first, 10, 100, repaired, repaired / 100) for n in range(20)
    )
    return TaskRow(way, task, "only" if task == "similar" else "exact", readings, full / 20)


def rows(some: tuple[int, int], much: tuple[int, int] = (20, 20)) -> list[TaskRow]:
    """Two tasks in four ways."""
    found = []
    for task, of_some, of_much in (("one", some[0], much[0]), ("two", some[1], much[1])):
        found += [
            row(FULL, task, 20, 20, repaired=100, first=0.9),
            row(NONE, task, 10, 20),
            row(SOME, task, of_some, 20, repaired=15, first=0.2),
            row(MUCH, task, of_much, 20, repaired=60, first=0.5),
        ]
    return found


def test_right_answers_among_similar_records_come_first() -> None:
    found = [row(FULL, "similar", 18, 18), row(NONE, "similar", 7, 18), row(SOME, "similar", 12, 18, repaired=15)]
    said, *_ = findings([*rows(some=(20, 20)), *found])
    assert said == (
        "Right answers among similar records (similar), of 20: full attention 18; sequential, system, none 7; "
        "sequential, system, query(0.15) 12."
    )


def test_row_tells_accuracy_cost_and_times() -> None:
    some = row(SOME, "one", 15, 18, repaired=15, first=0.25)
    assert (some.num_cases, some.accuracy, some.repaired) == (20, 0.75, 0.15)
    assert some.work == pytest.approx(0.15)
    assert some.ratio == pytest.approx(0.75 / 0.9)
    assert some.first_median == some.first_p90 == 0.25
    assert row(SOME, "one", 0, 0).ratio is None


def test_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([float(n) for n in range(1, 11)], 0.9) == 9
    assert percentile([3.0, 1.0, 2.0], 0.9) == 3
    assert percentile([5.0], 0.9) == 5


def test_summary_averages_over_tasks_and_names_the_worst() -> None:
    full, none, some, much = summarize(rows(some=(20, 17)))
    assert (full.ratio, none.ratio, none.worst_task) == (1, 0.5, "one")
    assert some.ratio == pytest.approx(0.925)
    assert (some.worst_task, some.worst_ratio) == ("two", 0.85)
    assert [each.is_in_budget for each in (full, none, some, much)] == [False, True, True, False]
    assert [each.is_good for each in (full, none, some, much)] == [True, False, False, True]


def test_findings_say_that_a_small_budget_is_enough() -> None:
    said, *_ = findings(rows(some=(20, 20)))
    assert said.startswith(
        "With at most 15% of the documents' tokens repaired, sequential, system, query(0.15) is best"
    )
    assert "100.0% of full attention on average" in said
    assert "It reaches 98% on average with no task below 95%" in said


def test_findings_say_which_task_is_missed_and_the_best_that_was_reached_there() -> None:
    best, missed, nearest, few = findings(rows(some=(20, 17)))
    assert "92.5% of full attention on average, 85.0% on its worst task (two). It misses 98%" in best
    assert missed.startswith("two is below 95% with it: 85.0% right, 85.0% of full attention (100.0%).")
    assert "The best reached there in this budget is 85.0%, by sequential, system, query(0.15)." in missed
    assert nearest.startswith("Nearest to full attention with so few is sequential, system, none: divergence 0.0000")
    assert few.startswith("With 20 questions of a task, one of them is 5.0% of its accuracy")


def test_cheapest_of_the_good_ones_is_best() -> None:
    found = rows(some=(20, 20))
    found += [row(Variant(repair="first(4)"), task, 20, 20, repaired=8) for task in ("one", "two")]
    assert "sequential, system, first(4) is best" in findings(found)[0]


def test_findings_warn_of_tasks_that_full_attention_does_not_know() -> None:
    said = findings([row(FULL, "hard", 4, 4), row(NONE, "hard", 4, 4)])
    assert said[-1].startswith("Full attention itself answers only 20% of hard")


def test_task_that_nothing_answers_has_no_ratio_and_spoils_nothing() -> None:
    known = [row(FULL, "one", 20, 20), row(NONE, "one", 20, 20)]
    summary = summarize([*known, row(FULL, "hard", 0, 0), row(NONE, "hard", 0, 0)])[1]
    assert (summary.ratio, summary.worst_task) == (1, "one")
    assert summarize([row(FULL, "hard", 0, 0), row(NONE, "hard", 0, 0)])[1].ratio is None
    assert findings([row(FULL, "hard", 0, 0), row(NONE, "hard", 0, 0)])
