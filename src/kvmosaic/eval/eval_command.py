"""Options of `kvmosaic eval`; modules that need torch are imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.options import Device, DType, Model, Rounding, Threads
from kvmosaic.eval.options import (
    ALL_STRATEGIES,
    Capacity,
    Contexts,
    Data,
    DataFormat,
    Documents,
    DocumentsPerPrompt,
    Questions,
    Resume,
    Seed,
    Strategies,
)


def eval_command(
    model: Model = "reader",
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="one-hop(documents), two-hop, story, order, needle(documents), long(tokens), parted by commas. "
            "Default: all; none with --data or --questions.",
        ),
    ] = None,
    repair: Annotated[
        str,
        typer.Option(
            metavar="POLICIES",
            help="none, first(k), deviation(fraction), query(fraction), combined(fraction), temperature(t, scale), "
            "full, parted by commas.",
        ),
    ] = "none,first(8),query(0.15),full",
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Contexts = "system",
    cases: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Questions of each task, and at most of each file. Default: 16; all of a file."
        ),
    ] = None,
    seed: Seed = 0,
    data: Data = None,
    data_format: DataFormat = None,
    documents: Documents = None,
    questions: Questions = None,
    documents_per_prompt: DocumentsPerPrompt = 3,
    dtype: DType = "auto",
    device: Device = "auto",
    num_threads: Threads = None,
    quantization: Rounding = "none",
    capacity: Capacity = "1GiB",
    resume: Resume = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write JSON, Markdown and a plot here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole report as JSON.")] = False,
) -> None:
    """Compare answers from cached documents with full attention on the same model: divergence, accuracy, work, time.

    kvmosaic eval

    kvmosaic eval reader --tasks two-hop,story --repair "none,first(8),query(0.05),query(0.15)" --cases 100 -o results
    """
    from kvmosaic.eval.cases import gather, own_questions, parts_of
    from kvmosaic.eval.tasks import TASKS
    from kvmosaic.eval.variants import variants

    chosen = variants(
        parts_of("--repair", repair), parts_of("--strategies", strategies), parts_of("--contexts", contexts)
    )
    own = own_questions(documents, questions)
    names = parts_of("--tasks", tasks) if tasks is not None else () if data or own else tuple(TASKS)
    asked = gather(
        names,
        tuple(data or ()),
        count=cases,
        seed=seed,
        form=data_format,
        documents=documents_per_prompt,
        own=own,
    )

    from kvmosaic.eval.command import run_evaluation
    from kvmosaic.eval.measure import EvalModel

    opening = EvalModel(model, dtype, device, num_threads, quantization, capacity)
    run_evaluation(opening, asked, chosen, seed, output, as_json=as_json, log=resume)
