"""Run of `kvmosaic tune`: evaluates many variants, and writes the cheapest good one as the model's profile."""

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
from kvmosaic.lab.eval.rows import Summary, TaskRow, doubts, similar_text, summarize
from kvmosaic.lab.eval.tuner import Tuned, choose
from kvmosaic.lab.eval.variants import FULL, Variant
from kvmosaic.tuned_settings import Goal, Profile, TaskResult, write_profile


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
