"""Model loading and measurement with progress, shared with `kvmosaic tune`; and the run of `kvmosaic eval`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from types import TracebackType
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvmosaic.assembly import BUNDLED_READER, AnyModel, EngineName, adapter_folders, open_model
from kvmosaic.console.text import printable
from kvmosaic.lab.bench.models import weigh
from kvmosaic.lab.bench.results import facts, save_report
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.report import (
    NARROW_HEADINGS,
    EvalReport,
    narrow_cells,
    percent,
    save_plot,
    terminal_table,
    way_text,
)
from kvmosaic.lab.eval.rows import Summary, TaskRow, summarize
from kvmosaic.lab.eval.run import Evaluation, evaluate
from kvmosaic.lab.eval.variants import Variant
from kvmosaic.model import LoadedModel, quiet_libraries
from kvmosaic.server.process.logs import progress_bar

_TABLE_SECONDS, _LINE_SECONDS = 1.0, 30.0
"""Minimum seconds between updates of the table, and between lines: with many short questions, counting costs more than
generating."""


class Display:
    """Shows the progress of a run. Use it as a context manager, and pass `progress` and `news` to `evaluate`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = progress_bar(console)
        self._line = self._bar.add_task("answering", total=None)
        self._live = Live(self._bar, console=console, transient=True, refresh_per_second=4) if _shows(console) else None
        self._shown = time.monotonic()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def progress(self, done: int, total: int) -> None:
        """Counts answers."""
        self._bar.update(self._line, completed=done, total=total)

    def news(self, rows: Sequence[TaskRow]) -> None:
        """Shows the results of all questions so far."""
        now, every = time.monotonic(), _LINE_SECONDS if self._live is None else _TABLE_SECONDS
        if now - self._shown < every:
            return
        self._shown = now
        summaries = summarize(rows)
        with_context = len({summary.way.context for summary in summaries}) > 1
        if self._live is None:
            count = sum(row.num_cases for row in rows if row.way.is_full)
            self._console.print(Text(printable(_one_line(count, summaries, with_context)), style="dim"))
            return
        cells = (narrow_cells(summary, with_context=with_context) for summary in summaries)
        self._live.update(Group(terminal_table(NARROW_HEADINGS, cells), self._bar))


def _shows(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _one_line(count: int, summaries: Sequence[Summary], with_context: bool) -> str:
    """Returns divergence and agreement of every variant so far."""
    found = (
        f"{way_text(each.way, with_context=with_context)} {each.divergence:.4f} {percent(each.agreement)}"
        for each in summaries
        if not each.way.is_full
    )
    return f"{count} question{'s' if count > 1 else ''}: {'; '.join(found)}"


@dataclass(frozen=True, slots=True)
class EvalModel:
    """The model to evaluate, and how it runs."""

    model: str = BUNDLED_READER
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    capacity: str = "1GiB"
    """Memory for chunks, and as much again for questions and answers, for each chunk context."""
    engine: EngineName = "auto"
    kv_cache_dtype: str = "auto"
    adapter: tuple[str, ...] = ()
    """Adapters beside its weights, as "[NAME=]FOLDER"."""

    @property
    def name(self) -> str:
        """The last part of a folder or of a hub name: a report need not say where the folder was."""
        return Path(self.model).resolve().name or "model"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of its adapters."""
        return tuple(adapter_folders(self.adapter))

    def load(self) -> AnyModel:
        """The model.

        Raises:
            KVMosaicError: it cannot be loaded.
        """
        return open_model(
            self.model,
            engine=self.engine,
            kv_cache_dtype=self.kv_cache_dtype,
            dtype=self.dtype,
            device=self.device,
            adapters=adapter_folders(self.adapter),
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a run, and its model."""

    model: AnyModel
    evaluation: Evaluation
    machine: dict[str, Any]
    seconds: float


def measure(
    opening: EvalModel,
    cases: Sequence[Case],
    ways: Sequence[Variant],
    notices: Console,
    *,
    log: Path | None = None,
    is_scored: bool = True,
) -> Measured:
    """Loads a model and runs the cases; `notices` shows progress and results so far.

    Args:
        opening: the model.
        cases: cases to run.
        ways: variants to compare.
        notices: console for progress.
        log: the file of finished cases, to be continued; None: a temporary one, which is left where the run was killed
            or interrupted.
        is_scored: see `evaluate`.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    quiet_libraries()
    begin, threads_before = time.monotonic(), torch.get_num_threads()
    try:
        if opening.num_threads is not None:
            torch.set_num_threads(opening.num_threads)
        machine = facts(torch.get_num_threads())
        with notices.status(f"loading {opening.model}"):
            model = opening.load()
        if model.weights_note:
            notices.print(model.weights_note, style="dim", markup=False, highlight=False)
        path = log or Path(mkdtemp(prefix="kvmosaic-eval-")) / "finished.jsonl"
        notices.print(f"finished questions: {path} (go on with --resume)", markup=False, style="dim", soft_wrap=True)
        with Display(notices) as display:
            evaluation = evaluate(
                model,
                cases,
                ways,
                capacity=opening.capacity,
                progress=display.progress,
                news=display.news,
                log=path,
                is_scored=is_scored,
            )
        if log is None and not evaluation.is_interrupted:
            rmtree(path.parent)
    finally:
        torch.set_num_threads(threads_before)
    return Measured(model, evaluation, machine, time.monotonic() - begin)


def run_evaluation(
    opening: EvalModel,
    cases: Sequence[Case],
    ways: Sequence[Variant],
    seed: int,
    output: Path | None = None,
    *,
    as_json: bool = False,
    log: Path | None = None,
) -> EvalReport:
    """Evaluates, prints, and writes JSON, Markdown and a plot into `output` if it is given.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    notices, console = Console(stderr=True), Console()
    measured = measure(opening, cases, ways, notices, log=log)
    rows = measured.evaluation.rows
    asked = {reading.case for row in rows for reading in row.readings}
    report = EvalReport(
        opening.name,
        _about(measured.model),
        seed,
        measured.machine,
        [case for case in cases if case.id in asked],
        rows,
        measured.evaluation.notes,
        measured.seconds,
    )
    if as_json:
        console.file.write(report.to_json())
    else:
        console.print(report.to_tables(console.width))
    if output is not None:
        name = f"eval-{report.model}"
        save_report(report, output, name, lambda: [save_plot(report, output / f"{name}.png")], notices)
    return report


def _about(model: AnyModel) -> str:
    if not isinstance(model, LoadedModel):
        return f"{model.num_parameters / 1e6:.1f} M parameters, {model.kind}, {model.weights_text}"
    parameters = weigh(model.config, model.dtype.itemsize, 0).num_parameters
    dtype = str(model.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return f"{parameters / 1e6:.1f} M parameters, {dtype}, {device}"
