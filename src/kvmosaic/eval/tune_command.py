"""Options of `kvmosaic tune`; modules that need torch are imported when it runs."""

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


def tune_command(
    model: Model = "reader",
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="one-hop(documents), two-hop, story, order, needle(documents), long(tokens), parted by commas. "
            "Default: two-hop,story; none with --data or --questions.",
        ),
    ] = None,
    loss: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Most of full attention's accuracy that may be lost, on average and on each task. Default: 0.02 where "
            "answers are known and no other goal is set.",
        ),
    ] = None,
    task_loss: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The same for each task, if more may be lost there.")
    ] = None,
    max_divergence: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Most divergence from full attention. Needs no answers. Default: 0.02 where no answer is known and no "
            "other goal is set.",
        ),
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Least share of the same greedy tokens as full attention."),
    ] = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="How far the loss of the accepted answer may be above full attention."),
    ] = None,
    max_work: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Most work for choosing and repairing; 1 is what computing all documents once costs."
        ),
    ] = 1.0,
    repair: Annotated[
        str | None,
        typer.Option(metavar="POLICIES", help="What is tried, parted by commas; see kvmosaic eval. Default: a ladder."),
    ] = None,
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Contexts = "system,lead_in",
    cases: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Questions of each task, and at most of each file. Default: 64; all of a file."
        ),
    ] = None,
    seed: Seed = 0,
    data: Data = None,
    data_format: DataFormat = None,
    documents: Documents = None,
    questions: Questions = None,
    documents_per_prompt: DocumentsPerPrompt = 3,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the profile is written. Default: kvmosaic_profile.json in the model's folder."
        ),
    ] = None,
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Write the closest way if none reaches the goal.")
    ] = False,
    dtype: DType = "auto",
    device: Device = "auto",
    num_threads: Threads = None,
    quantization: Rounding = "none",
    capacity: Capacity = "1GiB",
    resume: Resume = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find the cheapest way to answer from cached documents that a model loses little with, and write its profile.

    kvmosaic tune path/of/model --documents texts --questions questions.txt --max-divergence 0.02 --max-work 0.15

    kvmosaic tune path/of/model --tasks two-hop,story --loss 0.02

    LLM, serve and the other commands follow the profile of a model unless an option overrides it. Exit code 1 if no
    way is good enough; then nothing is written.
    """
    from kvmosaic.eval.cases import gather, own_questions, parts_of
    from kvmosaic.eval.tuner import LADDER, goal_of
    from kvmosaic.eval.variants import FULL, variants
    from kvmosaic.repair import repair_policy

    repairs = LADDER if repair is None else parts_of("--repair", repair)
    chosen = variants(repairs, parts_of("--strategies", strategies), parts_of("--contexts", contexts))
    own = own_questions(documents, questions)
    names = parts_of("--tasks", tasks) if tasks is not None else () if data or own else ("two-hop", "story")
    count = 64 if cases is None and not data and own is None else cases
    asked = gather(
        names,
        tuple(data or ()),
        count=count,
        seed=seed,
        form=data_format,
        documents=documents_per_prompt,
        own=own,
    )
    goal = goal_of(
        loss,
        task_loss,
        max_work,
        max_divergence=max_divergence,
        min_agreement=min_agreement,
        max_loss_increase=max_loss_increase,
        is_labelled=any(case.is_labelled for case in asked),
    )
    with_full = any(str(repair_policy(each)) == FULL.repair for each in repairs)

    from kvmosaic.eval.measure import EvalModel
    from kvmosaic.eval.tune import Tuning, tune

    opening = EvalModel(model, dtype, device, num_threads, quantization, capacity)
    if not tune(Tuning(opening, asked, chosen, goal, seed, profile, best_effort, with_full, resume), as_json=as_json):
        raise typer.Exit(1)
