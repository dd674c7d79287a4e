"""`kvmosaic eval`: runs an evaluation with signs of life, prints its tables, writes its files."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmosaic.assembly import bundled_reader
from kvmosaic.bench.facts import facts
from kvmosaic.bench.models import weigh
from kvmosaic.bench.plots import can_plot
from kvmosaic.eval.case import Case
from kvmosaic.eval.report import EvalReport
from kvmosaic.eval.run import evaluate
from kvmosaic.eval.scores import check_metrics
from kvmosaic.eval.ways import Way
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.int8 import Quantization
from kvmosaic.model.quiet import quiet_libraries

_BUNDLED = "reader"


@dataclass(frozen=True, slots=True)
class EvalModel:
    """Which model is looked at, and how it runs."""

    model: str = _BUNDLED
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    quantization: Quantization = "none"
    capacity: str = "1GiB"
    """Memory for chunks, and as much again for questions and answers, for each chunk context."""


def run_evaluation(
    opening: EvalModel,
    cases: list[Case],
    ways: tuple[Way, ...],
    seed: int,
    output: Path | None = None,
    *,
    as_json: bool = False,
) -> EvalReport:
    """Asks, prints, and writes JSON, Markdown and a plot into `output` if it is given.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    quiet_libraries()
    check_metrics(case.metric for case in cases)
    notices, console = Console(stderr=True), Console()
    begin, threads_before = time.monotonic(), torch.get_num_threads()
    try:
        if opening.num_threads is not None:
            torch.set_num_threads(opening.num_threads)
        machine = facts(torch.get_num_threads())
        with notices.status(f"loading {opening.model}"):
            model = _load(opening)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=notices, transient=True) as bar:
            line = bar.add_task("answering", total=None)
            evaluation = evaluate(
                model,
                cases,
                ways,
                capacity=opening.capacity,
                progress=lambda done, total: bar.update(line, completed=done, total=total),
            )
    finally:
        torch.set_num_threads(threads_before)
    asked = {reading.case for row in evaluation.rows for reading in row.readings}
    report = EvalReport(
        _name(opening.model),
        _about(model),
        seed,
        machine,
        [case for case in cases if case.id in asked],
        evaluation.rows,
        evaluation.notes,
        time.monotonic() - begin,
    )
    if as_json:
        console.file.write(report.to_json())
    else:
        console.print(report.to_tables(console.width))
    if output is not None:
        _save(report, output, notices)
    return report


def _load(opening: EvalModel) -> LoadedModel:
    source = bundled_reader() if opening.model == _BUNDLED else opening.model
    return load_model(source, dtype=opening.dtype, device=opening.device, quantization=opening.quantization)


def _save(report: EvalReport, output: Path, notices: Console) -> None:
    name = f"eval-{report.model}"
    paths = report.save(output, name)
    if can_plot():
        from kvmosaic.eval.plot import save_plot

        paths.append(save_plot(report, output / f"{name}.png"))
    else:
        notices.print("no plot: matplotlib is missing; pip install 'kvmosaic[bench]'", markup=False)
    notices.print("written: " + ", ".join(map(str, paths)), markup=False, style="dim")


def _name(model: str) -> str:
    """The last part of a folder or of a hub name: a report need not say where the folder was."""
    return Path(model).resolve().name or "model"


def _about(model: LoadedModel) -> str:
    parameters = weigh(model.config, model.dtype.itemsize, 0).num_parameters
    dtype = str(model.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return f"{parameters / 1e6:.1f} M parameters, {dtype}, {device}"
