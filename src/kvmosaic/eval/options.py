"""Options that are shared by `kvmosaic eval` and `kvmosaic tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.model_options import ModelOptions
from kvmosaic.console.option_groups import Takes
from kvmosaic.layout.strategies import strategy_names

if TYPE_CHECKING:
    from kvmosaic.eval.case import Case
    from kvmosaic.eval.measure import EvalModel

ALL_STRATEGIES = ",".join(strategy_names(offsets=False))

Strategies = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help=f"Positions of documents: {', '.join(strategy_names(offsets=False))}; parted by commas."
    ),
]
Contexts = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help="What documents saw when they were computed: system, lead_in, none, parted by commas."
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Write every finished question to this file at once, and do not ask again what it has. "
        "Default: a file in the folder for temporary files, removed in the end.",
    ),
]
Capacity = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory for documents, and as much again for answers, per context.")
]
TASKS_HELP = (
    "one-hop(documents), two-hop, story, order, needle(documents), long(tokens), parted by commas. Default: {}; none "
    "with --data or --questions."
)
CASES_HELP = "Questions of each task, and at most of each file. Default: {}; all of a file."
OpenedModel = Annotated[ModelOptions, Takes("dtype device num_threads quantization")]


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """Which questions are asked besides those of tasks."""

    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed asks the same questions.")] = 0
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Questions of your own, as JSON or JSONL; several times for more."),
    ] = None
    data_format: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="The format of --data. Default: found by its fields."),
    ] = None
    documents: Annotated[
        Path | None,
        typer.Option("--documents", metavar="DIR", help="Documents of your own, .txt and .md files; with --questions."),
    ] = None
    questions: Annotated[
        Path | None,
        typer.Option(
            "--questions",
            metavar="FILE",
            help="Questions about --documents, one in each line, or JSONL: question, and if known answer and "
            "documents.",
        ),
    ] = None
    documents_per_prompt: Annotated[
        int,
        typer.Option(
            "--documents-per-prompt",
            min=1,
            max=1_000,
            help="Documents of a prompt, where nothing says which ones belong to a question (SQuAD, --questions).",
        ),
    ] = 3

    @property
    def is_own(self) -> bool:
        """Whether questions of one's own are given."""
        return bool(self.data or self.documents or self.questions)

    def cases(self, tasks: str | None, default_tasks: Sequence[str], count: int | None) -> Sequence[Case]:
        """The cases of these tasks and files; `default_tasks` without either.

        Raises:
            KVMosaicError: an unknown task, or a file that cannot be read.
        """
        from kvmosaic.eval.cases import gather, own_questions, parts_of

        own = own_questions(self.documents, self.questions)
        names = parts_of("--tasks", tasks) if tasks is not None else () if self.data or own else tuple(default_tasks)
        return gather(
            names,
            tuple(self.data or ()),
            count=count,
            seed=self.seed,
            form=self.data_format,
            documents=self.documents_per_prompt,
            own=own,
        )


def eval_model(opening: ModelOptions, capacity: str) -> EvalModel:
    """The model to evaluate."""
    from kvmosaic.eval.measure import EvalModel

    config = opening.config()
    return EvalModel(
        opening.model,
        config.model.dtype,
        config.model.device,
        config.engine.num_threads,
        config.model.quantization,
        capacity,
    )
