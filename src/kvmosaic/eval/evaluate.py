"""Run of `kvmosaic eval`: evaluates, prints tables, writes files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from kvmosaic.assembly import AnyModel
from kvmosaic.bench.models import weigh
from kvmosaic.bench.plots import can_plot
from kvmosaic.eval.case import Case
from kvmosaic.eval.measure import EvalModel, measure
from kvmosaic.eval.report import EvalReport
from kvmosaic.eval.variants import Variant
from kvmosaic.model import LoadedModel


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
        _save(report, output, notices)
    return report


def _save(report: EvalReport, output: Path, notices: Console) -> None:
    name = f"eval-{report.model}"
    paths = report.save(output, name)
    if can_plot():
        from kvmosaic.eval.plot import save_plot

        paths.append(save_plot(report, output / f"{name}.png"))
    else:
        notices.print("no plot: matplotlib is missing; pip install 'kvmosaic[bench]'", markup=False)
    notices.print("written: " + ", ".join(map(str, paths)), markup=False, style="dim")


def _about(model: AnyModel) -> str:
    if not isinstance(model, LoadedModel):
        return f"{model.num_parameters / 1e6:.1f} M parameters, {model.kind}, {model.weights_text}"
    parameters = weigh(model.config, model.dtype.itemsize, 0).num_parameters
    dtype = str(model.dtype).removeprefix("torch.")
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else model.device.type
    return f"{parameters / 1e6:.1f} M parameters, {dtype}, {device}"
