"""Tuning: of all ways of answering, the cheapest that loses no more than is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.rows import Row
from kvmosaic.eval.summary import Summary, summarize
from kvmosaic.eval.table import percent
from kvmosaic.profile import Goal

LADDER = (
    "none",
    "first(4)",
    "first(16)",
    "query(0.05)",
    "query(0.15)",
    "deviation(0.15)",
    "combined(0.15)",
    "query(0.3)",
)
"""Policies that are tried if nothing is said."""
_DIGITS = 6
"""Work that differs by less is the same."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen."""

    chosen: Summary
    is_reached: bool
    """False: nothing reaches the goal, and this comes closest."""
    said: tuple[str, ...]
    """What a reader has to know, in sentences."""


def goal_of(loss: float, task_loss: float | None = None, max_work: float = 1.0) -> Goal:
    """What is wanted; without `task_loss` no task may lose more than all of them together.

    Raises:
        InvalidConfig: a number outside its range.
    """
    goal = Goal(loss, loss if task_loss is None else task_loss, max_work)
    for name, value, most in (
        ("loss", goal.loss, 1.0),
        ("task-loss", goal.task_loss, 1.0),
        ("max-work", max_work, 100.0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise InvalidConfig(f"--{name} must be a number from 0 to {most:g}, got {value!r}")
    return goal


def choose(rows: Sequence[Row], goal: Goal, *, with_full: bool = False) -> Tuned:
    """The way with the least work that reaches the goal; of equal ones the first. If none does, the closest one.

    Work is counted, not timed, so the same answers give the same choice on every machine.

    Args:
        rows: of a run; see `evaluate`.
        goal: what may be lost and spent.
        with_full: whether full attention may be chosen, too.

    Raises:
        InvalidConfig: full attention answers nothing of a task, or every way costs too much.
    """
    if unknown := [row.task for row in rows if row.ratio is None]:
        raise InvalidConfig(
            f"full attention answers nothing of {unknown[0]!r} with this model, so there is nothing to lose; leave it "
            "out of --tasks"
        )
    ways = [summary for summary in summarize(rows) if with_full or not summary.way.is_full]
    affordable = [summary for summary in ways if summary.work <= goal.max_work]
    if not affordable:
        least = min((summary.work for summary in ways), default=0.0)
        raise InvalidConfig(
            f"no way costs at most {goal.max_work:g} of the work of computing all documents once (--max-work); the "
            f"cheapest costs {least:.3f}: raise it, or add 'none' to --repair"
        )
    reaching = [summary for summary in affordable if _margin(summary, goal) >= 0]
    if reaching:
        chosen = min(reaching, key=lambda summary: round(summary.work, _DIGITS))
        return Tuned(chosen, True, (f"{_described(chosen)} It is the cheapest way that reaches {_wanted(goal)}.",))
    closest = max(
        affordable, key=lambda summary: (round(_margin(summary, goal), _DIGITS), -round(summary.work, _DIGITS))
    )
    said = [f"Nothing with at most {percent(goal.max_work)} work reaches {_wanted(goal)}."]
    said += [f"The closest: {_described(closest)}", *_failing(rows, affordable, closest, goal)]
    return Tuned(closest, False, tuple(said))


def _margin(summary: Summary, goal: Goal) -> float:
    """How far a way is above the goal, or below it, where it is worst."""
    assert summary.ratio is not None and summary.worst_ratio is not None
    return round(min(summary.ratio - 1 + goal.loss, summary.worst_ratio - 1 + goal.task_loss), 9)


def _wanted(goal: Goal) -> str:
    return f"{percent(1 - goal.loss)} of full attention on average and {percent(1 - goal.task_loss)} on every task"


def _described(summary: Summary) -> str:
    return (
        f"{summary.way}: {percent(summary.ratio)} of full attention on average, {percent(summary.worst_ratio)} on "
        f"{summary.worst_task}, {percent(summary.work)} work."
    )


def _failing(rows: Sequence[Row], ways: Sequence[Summary], closest: Summary, goal: Goal) -> list[str]:
    """For each task that the closest way fails: what the best way for that task reaches."""
    allowed, said = {summary.way for summary in ways}, []
    for row in rows:
        if row.way != closest.way or row.ratio is None or row.ratio >= 1 - goal.task_loss:
            continue
        best = max(
            (each for each in rows if each.task == row.task and each.way in allowed), key=lambda each: each.accuracy
        )
        said.append(
            f"{row.task} fails: {percent(row.ratio)} of full attention, which answers {percent(row.full_accuracy)}; "
            f"the best reached there is {percent(best.ratio)}, by {best.way}."
        )
    return said
