"""Tuning: choice of the cheapest variant within a loss limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.report import percent
from kvmosaic.lab.eval.rows import Summary, TaskRow, nearness_text, summarize
from kvmosaic.tuned_settings import Goal

LADDER = (
    "none",
    "first(4)",
    "first(16)",
    "names",
    "query(0.05)",
    "query(0.08)",
    "query(0.15)",
    "deviation(0.15)",
    "combined(0.15)",
    "query(0.3)",
)
"""Default policies to try."""
USUAL_LOSS, USUAL_DIVERGENCE = 0.02, 0.02
"""Default goals: loss of right answers where labels are known, divergence in nats where they are not."""
_DIGITS = 6
"""Work that differs by less is the same."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The chosen variant."""

    chosen: Summary
    is_reached: bool
    """False: no variant reaches the goal, and this is the closest."""
    said: tuple[str, ...]
    """Remarks for the reader, in sentences."""


def goal_of(
    loss: float | None = None,
    max_work: float = 1.0,
    *,
    max_divergence: float | None = None,
    min_agreement: float | None = None,
    is_labelled: bool = True,
) -> Goal:
    """Returns the goal; no task may lose more right answers than all of them together.

    The default is 98% of the right answers for labelled questions, and a divergence of 0.02 for unlabelled ones.

    Raises:
        InvalidConfig: a number outside its range, or a goal that needs labels that are missing.
    """
    if loss is max_divergence is min_agreement is None:
        loss, max_divergence = (USUAL_LOSS, None) if is_labelled else (None, USUAL_DIVERGENCE)
    for name, value, most in (
        ("loss", loss, 1.0),
        ("max-work", max_work, 100.0),
        ("max-divergence", max_divergence, 100.0),
        ("min-agreement", min_agreement, 1.0),
    ):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise InvalidConfig(f"--{name} must be a number from 0 to {most:g}, got {value!r}")
    if loss is not None and not is_labelled:
        raise InvalidConfig(
            "--loss needs the right answers, and no question has one; use --max-divergence and --min-agreement"
        )
    return Goal(loss, max_work, max_divergence=max_divergence, min_agreement=min_agreement)


def choose(rows: Sequence[TaskRow], goal: Goal, *, with_full: bool = False) -> Tuned:
    """Chooses the variant with the least work that reaches the goal; the first of equals; if none does, the closest.

    Work is counted, not timed, so the same answers give the same choice on every machine.

    Args:
        rows: of a run; see `evaluate`.
        goal: limits on loss and work.
        with_full: whether full attention may be chosen, too.

    Raises:
        InvalidConfig: full attention answers nothing of a task, or every variant costs too much.
    """
    if goal.loss is not None and (unknown := [row.task for row in rows if row.full_accuracy == 0]):
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
        why = f"{_described(chosen, goal)} It is the cheapest way that reaches {_wanted(goal)}."
        return Tuned(chosen, True, (why,))
    closest = max(
        affordable, key=lambda summary: (round(_margin(summary, goal), _DIGITS), -round(summary.work, _DIGITS))
    )
    said = [f"Nothing with at most {percent(goal.max_work)} work reaches {_wanted(goal)}."]
    said += [f"The closest: {_described(closest, goal)}", *_failing(rows, affordable, closest, goal)]
    said += _too_far(affordable, closest, goal)
    return Tuned(closest, False, tuple(said))


def _margin(summary: Summary, goal: Goal) -> float:
    """Returns the worst excess of a variant over the goals, relative to the limits, except for answers.

    Answers count relative to full attention's, whatever the limit.
    """
    margins = [_share_left(value, most) for value, most in _distances(summary, goal)]
    if goal.loss is not None:
        assert summary.ratio is not None and summary.worst_ratio is not None
        margins.append(min(summary.ratio, summary.worst_ratio) - 1 + goal.loss)
    return round(min(margins, default=0.0), 9)


def _distances(summary: Summary, goal: Goal) -> list[tuple[float, float]]:
    """Returns the distances to minimize, each with its value and limit."""
    pairs = [
        (summary.divergence, goal.max_divergence),
        (1 - summary.agreement, None if goal.min_agreement is None else 1 - goal.min_agreement),
    ]
    return [(value, most) for value, most in pairs if most is not None]


def _share_left(value: float, most: float) -> float:
    return (most - value) / most if most else -value


def _wanted(goal: Goal) -> str:
    parts = []
    if goal.loss is not None:
        parts.append(f"{percent(1 - goal.loss)} of full attention on average and on every task")
    if goal.max_divergence is not None:
        parts.append(f"a divergence of at most {goal.max_divergence:g} nats")
    if goal.min_agreement is not None:
        parts.append(f"at least {percent(goal.min_agreement)} of the same greedy tokens")
    return ", ".join(parts)


def _described(summary: Summary, goal: Goal) -> str:
    parts = []
    if goal.loss is not None:
        parts.append(
            f"{percent(summary.ratio)} of full attention on average, {percent(summary.worst_ratio)} on "
            f"{summary.worst_task}"
        )
    if _distances(summary, goal):
        parts.append(nearness_text(summary))
    return f"{summary.way}: {', '.join(parts)}, {percent(summary.work)} work."


def _failing(rows: Sequence[TaskRow], ways: Sequence[Summary], closest: Summary, goal: Goal) -> list[str]:
    """Returns, for each task that loses too many right answers, what the best variant for that task reaches."""
    allowed, said = {summary.way for summary in ways}, list[str]()
    if goal.loss is None:
        return said
    for row in rows:
        if row.way != closest.way or row.ratio is None or row.ratio >= 1 - goal.loss:
            continue
        best = max(
            (each for each in rows if each.task == row.task and each.way in allowed),
            key=lambda each: each.accuracy or 0.0,
        )
        said.append(
            f"{row.task} fails: {percent(row.ratio)} of full attention, which answers {percent(row.full_accuracy)}; "
            f"the best reached there is {percent(best.ratio)}, by {best.way}."
        )
    return said


def _too_far(ways: Sequence[Summary], closest: Summary, goal: Goal) -> list[str]:
    """Returns, for each distance from full attention beyond its limit, the minimum reached, and by which variant."""
    said = []
    if goal.max_divergence is not None and closest.divergence > goal.max_divergence:
        best = min(ways, key=lambda each: each.divergence)
        said.append(f"The least divergence reached is {best.divergence:.4f} nats, by {best.way}.")
    if goal.min_agreement is not None and closest.agreement < goal.min_agreement:
        best = max(ways, key=lambda each: each.agreement)
        said.append(f"The most of the same greedy tokens is {percent(best.agreement)}, by {best.way}.")
    return said
