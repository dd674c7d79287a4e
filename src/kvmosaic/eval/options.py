"""Options shared by `kvmosaic eval` and `kvmosaic tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.layout.strategies import strategy_names

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
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed asks the same questions.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Questions of your own, as JSON or JSONL; several times for more."),
]
DataFormat = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="The format of --data. Default: found by its fields."),
]
Documents = Annotated[
    Path | None,
    typer.Option("--documents", metavar="DIR", help="Documents of your own, .txt and .md files; with --questions."),
]
Questions = Annotated[
    Path | None,
    typer.Option(
        "--questions",
        metavar="FILE",
        help="Questions about --documents, one in each line, or JSONL: question, and if known answer and documents.",
    ),
]
DocumentsPerPrompt = Annotated[
    int,
    typer.Option(
        "--documents-per-prompt",
        min=1,
        max=1_000,
        help="Documents of a prompt, where nothing says which ones belong to a question (SQuAD, --questions).",
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
