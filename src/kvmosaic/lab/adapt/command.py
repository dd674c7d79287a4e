"""Command `kvmosaic adapt`: its options; modules that need torch are imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.options import grouped, option
from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.bench.bench_command import Threads
from kvmosaic.lab.eval.commands import QuestionOptions


def _numbers(name: str, text: str) -> tuple[int, ...]:
    from kvmosaic.lab.eval.cases import parts_of

    parts = parts_of(name, text)
    try:
        return tuple(int(part) for part in parts)
    except ValueError:
        raise InvalidConfig(f"{name} is {text!r:.80}; give whole numbers, parted by commas") from None


@dataclass(frozen=True, slots=True)
class LessonOptions:
    """What a lesson is made of."""

    strategies: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Positions of documents to learn, sequential or shared or both, parted by commas."
        ),
    ] = "sequential"
    context: Annotated[
        str | None,
        typer.Option(
            "--chunk-context",
            metavar="NAME",
            help="What documents saw: system, companions or none. Default: as served.",
        ),
    ] = None
    prompt_documents: Annotated[
        str,
        typer.Option(metavar="NUMBERS", help="Documents of a prompt, drawn from these numbers, parted by commas."),
    ] = "2,3,3,4,6"
    sampled_answers: Annotated[
        int, typer.Option(min=0, max=16, help="Answers to each question that are sampled, beside the greedy one.")
    ] = 1
    held_out_lessons: Annotated[
        int, typer.Option(min=1, max=10_000, help="Lessons of one held-out question each, in every evaluation.")
    ] = 24
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Our generated tasks, as in kvmosaic eval, in place of documents."),
    ] = None
    cases: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Questions of each task, and at most of each file.")
    ] = None


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """What is updated, how far and how often."""

    steps: Annotated[int, typer.Option(min=1, max=10**6, help="Most steps of training.")] = 150
    rank: Annotated[int, typer.Option(min=1, max=1_024, help="Rank of the updates.")] = 16
    targets: Annotated[
        str, typer.Option(metavar="NAMES", help="Endings of the names of linear layers that are updated.")
    ] = "q_proj,k_proj,v_proj,o_proj"
    learning_rate: Annotated[float, typer.Option(help="Largest step of the optimizer.")] = 4e-4


@grouped
def adapt_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, a name on the hub, or reader.")],
    asked: QuestionOptions,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where adapter, report and state go.")],
    lessons: LessonOptions,
    update: UpdateOptions,
    device: Annotated[str, option("device")] = "auto",
    num_threads: Threads = None,
) -> None:
    """Teach a model to read documents apart as it reads them together, without labels.

    kvmosaic adapt MODEL --documents texts --questions questions.txt -o adapter

    The model's own full attention is the teacher: an adapter (LoRA) is trained until answers from cached documents are
    as near to it as they get. Without --questions the model asks itself. An interrupt keeps the best adapter so far;
    the same command goes on. Serve it with --adapter.
    """
    from kvmosaic.assembly import usual_context
    from kvmosaic.lab.adapt.run import Adapting, adapt
    from kvmosaic.lab.adapt.trainer import AdaptSettings
    from kvmosaic.lab.eval.cases import parts_of

    settings = AdaptSettings(
        rank=update.rank,
        targets=parts_of("--targets", update.targets),
        learning_rate=update.learning_rate,
        steps=update.steps,
        strategies=parts_of("--strategies", lessons.strategies),
        context=lessons.context or usual_context(model),  # type: ignore[arg-type]  # checked there
        num_documents=_numbers("--prompt-documents", lessons.prompt_documents),
        sampled_answers=lessons.sampled_answers,
        held_out_lessons=lessons.held_out_lessons,
        seed=asked.seed,
    )
    adapting = Adapting(model, asked, settings, output, lessons.tasks, lessons.cases, device, num_threads)
    if not adapt(adapting):
        raise typer.Exit(1)
