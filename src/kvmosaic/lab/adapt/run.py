"""Run of `kvmosaic adapt`: loads the model, shows progress, writes the adapter and its report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kvmosaic.assembly import BUNDLED_READER, bundled_reader, usual_context
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.adapt.corpus import Corpus, invented_questions
from kvmosaic.lab.adapt.trainer import AdaptSettings, Evaluated, Trained, Trainer
from kvmosaic.lab.eval.cases import DEFAULT_SYSTEM, Library
from kvmosaic.lab.eval.commands import QuestionOptions
from kvmosaic.llm import LLM
from kvmosaic.model import LoadedModel, load_model, quiet_libraries
from kvmosaic.server.process.logs import progress_bar

_INVENTED = 3
"""Questions that the model asks about each document."""


@dataclass(frozen=True, slots=True)
class Adapting:
    """What the command was asked for."""

    model: str
    asked: QuestionOptions
    settings: AdaptSettings
    output: Path
    tasks: str | None = None
    cases: int | None = None
    device: str = "auto"
    num_threads: int | None = None


def adapt(adapting: Adapting) -> bool:
    """Trains and prints; returns whether the adapter is nearer to full attention than the model without it.

    Raises:
        KVMosaicError: the model or the documents cannot be used.
    """
    notices, console = Console(stderr=True), Console()
    quiet_libraries()
    if adapting.num_threads is not None:
        torch.set_num_threads(adapting.num_threads)
    with notices.status(f"loading {adapting.model}"):
        name = bundled_reader() if adapting.model == BUNDLED_READER else adapting.model
        model = load_model(name, dtype="float32", device=adapting.device, prepack="never")
    corpus = _corpus(adapting, model, notices)
    trainer = Trainer(model, corpus, adapting.settings, adapting.output)
    if trainer.first_step:
        notices.print(f"goes on after step {trainer.first_step}", style="dim")
    trained = _train(trainer, adapting.settings.steps, notices)
    console.print(_table(trained))
    first, best = trained.history[0], trained.best
    end = "interrupted; the same command goes on" if trained.is_interrupted else "done"
    console.print(
        f"{end}: divergence {first.divergence:.4f} -> {best.divergence:.4f}, equal greedy tokens "
        f"{first.agreement:.1%} -> {best.agreement:.1%}, {best.seconds / 60:.1f} minutes of processor time"
    )
    context = adapting.settings.context
    said = "" if context == usual_context(adapting.model) else f" --chunk-context {context}"
    console.print(f"adapter in {adapting.output}: kvmosaic serve {adapting.model} --adapter {adapting.output}{said}")
    return best.divergence < first.divergence


def _corpus(adapting: Adapting, model: LoadedModel, notices: Console) -> Corpus:
    asked = adapting.asked
    if adapting.tasks is not None:
        if asked.is_own:
            raise InvalidConfig("--tasks are learned alone; leave out --data, --documents and --questions")
        return Corpus.of_cases(asked.cases(adapting.tasks, (), adapting.cases), lambda _: True)
    if asked.data or asked.questions:
        # where a file does not say which documents a question needs, it needs any of its own
        return Corpus.of_cases(
            asked.cases(None, (), adapting.cases), lambda case: not case.needs and asked.questions is None
        )
    if asked.documents is None:
        raise InvalidConfig(
            "there is nothing to learn from; give --documents, with or without --questions, --data, or --tasks"
        )
    library = Library.read(asked.documents)
    with notices.status(f"the model asks about {len(library.documents)} documents"), LLM(model, profile=False) as llm:
        questions = invented_questions(llm, library.documents, _INVENTED, asked.seed)
    notices.print(f"{len(questions)} questions by the model itself", style="dim")
    return Corpus(library.documents, tuple(questions), DEFAULT_SYSTEM)


def _train(trainer: Trainer, steps: int, notices: Console) -> Trained:
    with progress_bar(notices) as bar:
        line = bar.add_task("reading held-out documents", total=steps, completed=trainer.first_step)
        last = [time.monotonic()]

        def progress(done: int, total: int, mean: float | None) -> None:
            text = "training" if mean is None else f"training, divergence {mean:.4f}"
            bar.update(line, completed=done, total=total, description=text)
            if not notices.is_terminal and time.monotonic() - last[0] > 60:
                last[0] = time.monotonic()
                notices.print(f"step {done} of {total}: {text}")

        def news(evaluated: Evaluated) -> None:
            notices.print(
                f"step {evaluated.step}: held-out divergence {evaluated.divergence:.4f}, equal greedy tokens "
                f"{evaluated.agreement:.1%}"
            )

        return trainer.train(progress, news)


def _table(trained: Trained) -> Table:
    table = Table("step", "held-out divergence", "equal greedy tokens", "tokens", "processor minutes")
    for each in trained.history:
        table.add_row(
            str(each.step),
            f"{each.divergence:.4f}",
            f"{each.agreement:.1%}",
            f"{each.num_tokens:,}",
            f"{each.seconds / 60:.1f}",
        )
    return table
