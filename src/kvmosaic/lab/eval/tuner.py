"""Tuning: the cheapest variant within a loss limit, which `kvmosaic tune` writes as the profile of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.assembly import adapter_folders, profile_place
from kvmosaic.console.text import duration_text, printable
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.measure import EvalModel, Measured, measure
from kvmosaic.lab.eval.report import increase, percent, terminal_table, way_text
from kvmosaic.lab.eval.rows import Summary, TaskRow, doubts, nearness_text, similar_text, summarize
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.tuned_settings import Goal, Profile, TaskResult, write_profile

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


@dataclass(frozen=True, slots=True)
class Tuning:
    """Model, cases, goal and output of a tuning run."""

    opening: EvalModel
    cases: Sequence[Case]
    ways: tuple[Variant, ...]
    goal: Goal
    seed: int
    file: Path | None = None
    """Where the profile is written; None: next to the model."""
    is_best_effort: bool = False
    """Write the closest way if none reaches the goal."""
    with_full: bool = False
    """Whether full attention may be chosen as well."""
    log: Path | None = None
    """Log of finished questions, written and reused; see `evaluate`."""


def tune(tuning: Tuning, *, as_json: bool = False) -> bool:
    """Evaluates, prints the results, and writes the profile; False: no variant reaches the goal, nothing is written.

    Raises:
        KVMosaicError: the model cannot be loaded, a setting cannot work, or the profile cannot be written.
    """
    place = _place(tuning)
    notices, console = Console(stderr=True), Console()
    is_scored = tuning.goal.loss is not None
    measured = measure(tuning.opening, tuning.cases, tuning.ways, notices, log=tuning.log, is_scored=is_scored)
    rows = measured.evaluation.rows
    tuned = choose(rows, tuning.goal, with_full=tuning.with_full)
    profile = _profile(tuning, measured, tuned, place)
    is_written = tuned.is_reached or tuning.is_best_effort
    if is_written:
        write_profile(profile, place)
    said = [*similar_text(rows), *tuned.said, *_slow(tuned, rows), *doubts(rows), *measured.evaluation.notes]
    if as_json:
        console.file.write(json.dumps(_fields(measured, profile, said, place if is_written else None), indent=1) + "\n")
        return is_written
    console.print(_table(tuned, summarize(rows)))
    console.print()
    for sentence in said:
        console.print(Text(printable(sentence)))
    written = f"written: {place}" if is_written else "nothing is written; --best-effort writes the closest"
    console.print(Text(printable(written)))
    return is_written


def _table(tuned: Tuned, summaries: Sequence[Summary]) -> Table:
    """Returns the variants tried, with the values of their goals: accuracy, or divergence from full attention."""
    with_context = len({summary.way.context for summary in summaries}) > 1
    is_scored = any(summary.ratio is not None for summary in summaries)
    middle = ("of full", "worst task", "divergence") if is_scored else ("divergence", "agreement", "loss")
    lines = [
        (
            ("▸ " if summary.way == tuned.chosen.way else "  ") + way_text(summary.way, with_context=with_context),
            *(_answers_cells(summary) if is_scored else _nearness_cells(summary)),
            percent(summary.work),
            duration_text(summary.first_median),
        )
        for summary in summaries
    ]
    return terminal_table(("  tried", *middle, "work", "first token"), lines)


def _answers_cells(summary: Summary) -> tuple[str, ...]:
    worst = "–" if summary.worst_ratio is None else f"{summary.worst_task} {percent(summary.worst_ratio)}"
    return percent(summary.ratio), worst, _nearness_cells(summary)[0]


def _nearness_cells(summary: Summary) -> tuple[str, ...]:
    if summary.way.is_full:
        return ("–",) * 3
    return f"{summary.divergence:.4f}", percent(summary.agreement), increase(summary.loss_increase)


def _slow(tuned: Tuned, rows: Sequence[TaskRow]) -> list[str]:
    """Warns if the variant is slower than full attention: with short prompts, less work may take more time."""
    times = {summary.way: summary.first_median for summary in summarize(rows)}
    full, chosen = times[FULL], tuned.chosen.first_median
    if tuned.chosen.way.is_full or chosen <= full:
        return []
    return [
        f"Here it is slower than full attention all the same (first token after {duration_text(chosen)}, not "
        f"{duration_text(full)}): these prompts are short. Ask with prompts as long as yours (--data)."
    ]


def _place(tuning: Tuning) -> Path:
    """Returns the profile's path; checks that it is writable before hours of evaluation.

    Raises:
        InvalidConfig: there is no such folder, or it cannot be written.
    """
    way_out = "name a file that can be written: --profile FILE"
    if tuning.file is None:
        found = profile_place(tuning.opening.model)
        if found is None:
            raise InvalidConfig(
                f"{tuning.opening.model!r} has no folder here, and a profile lies next to a model; {way_out}"
            )
        place = found
    else:
        place = tuning.file.expanduser()
    if place.is_dir() or not place.parent.is_dir() or not os.access(place.parent, os.W_OK):
        raise InvalidConfig(f"{place} cannot be written; {way_out}")
    return place


def _profile(tuning: Tuning, measured: Measured, tuned: Tuned, place: Path) -> Profile:
    way = tuned.chosen.way
    folder = adapter_folders(tuning.opening.adapter)[way.adapter] if way.adapter else None
    rows = [row for row in measured.evaluation.rows if row.way == way]
    return Profile(
        model=printable(tuning.opening.name),
        fingerprint=measured.model.fingerprint,
        position_strategy=way.strategy,
        chunk_context=way.context,
        repair=way.repair,
        goal=replace(tuning.goal, is_reached=tuned.is_reached),
        date=datetime.now(UTC).date().isoformat(),
        seed=tuning.seed,
        work=tuned.chosen.work,
        tasks=tuple(
            TaskResult(
                printable(row.task),
                row.num_cases,
                row.accuracy,
                row.full_accuracy,
                row.divergence,
                row.agreement,
                row.loss_increase,
            )
            for row in rows
        ),
        adapter="" if folder is None else _seen_from(place.parent, folder),
        adapter_digest=measured.model.adapters[way.adapter].digest if way.adapter else "",
    )


def _seen_from(folder: Path, adapter: Path) -> str:
    """The adapter's folder relative to another one that contains it, so that both can be moved; else absolute."""
    path, base = adapter.expanduser().resolve(), folder.resolve()
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)


def _fields(measured: Measured, profile: Profile, said: list[str], place: Path | None) -> dict[str, Any]:
    return {
        "profile": profile.to_dict(),
        "written": None if place is None else str(place),
        "said": said,
        "summaries": [summary.to_dict() for summary in summarize(measured.evaluation.rows)],
        "machine": measured.machine,
        "seconds": measured.seconds,
    }
