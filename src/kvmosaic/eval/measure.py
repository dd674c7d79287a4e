"""Model loading and measurement with progress, shared by `kvmosaic eval` and `kvmosaic tune`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import torch
from rich.console import Console

from kvmosaic.assembly import BUNDLED_READER, bundled_reader
from kvmosaic.bench.facts import facts
from kvmosaic.eval.case import Case
from kvmosaic.eval.display import Display
from kvmosaic.eval.run import Evaluation, evaluate
from kvmosaic.eval.scores import check_metrics
from kvmosaic.eval.variants import Variant
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.int8 import Quantization
from kvmosaic.model.quiet import quiet_libraries


@dataclass(frozen=True, slots=True)
class EvalModel:
    """The model to evaluate, and how it runs."""

    model: str = BUNDLED_READER
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    quantization: Quantization = "none"
    capacity: str = "1GiB"
    """Memory for chunks, and as much again for questions and answers, for each chunk context."""

    @property
    def name(self) -> str:
        """The last part of a folder or of a hub name: a report need not say where the folder was."""
        return Path(self.model).resolve().name or "model"

    def load(self) -> LoadedModel:
        """The model.

        Raises:
            KVMosaicError: it cannot be loaded.
        """
        source = bundled_reader() if self.model == BUNDLED_READER else self.model
        return load_model(source, dtype=self.dtype, device=self.device, quantization=self.quantization)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of a run, and its model."""

    model: LoadedModel
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
    check_metrics(case.metric for case in cases if is_scored and case.is_labelled)
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
