"""Options of `kvmosaic eval`; modules that need torch are imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from kvmosaic.console.option_groups import grouped
from kvmosaic.console.options import AsReport, Output
from kvmosaic.eval.options import (
    ALL_STRATEGIES,
    CASES_HELP,
    TASKS_HELP,
    Capacity,
    Contexts,
    OpenedModel,
    QuestionOptions,
    Resume,
    Strategies,
    eval_model,
)
from kvmosaic.repair.parser import FORMS


@grouped
def eval_command(
    opening: OpenedModel,
    asked: QuestionOptions,
    tasks: Annotated[str | None, typer.Option(metavar="NAMES", help=TASKS_HELP.format("all"))] = None,
    repair: Annotated[
        str,
        typer.Option(
            metavar="POLICIES",
            help=f"{FORMS}, parted by commas.",
        ),
    ] = "none,first(8),query(0.15),full",
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Contexts = "system",
    cases: Annotated[int | None, typer.Option(min=1, max=100_000, help=CASES_HELP.format("16"))] = None,
    capacity: Capacity = "1GiB",
    resume: Resume = None,
    output: Output = None,
    as_json: AsReport = False,
) -> None:
    """Compare answers from cached documents with full attention on the same model: divergence, accuracy, work, time.

    kvmosaic eval

    kvmosaic eval reader --tasks two-hop,story --repair "none,first(8),query(0.05),query(0.15)" --cases 100 -o results
    """
    from kvmosaic.eval.cases import parts_of
    from kvmosaic.eval.tasks import TASKS
    from kvmosaic.eval.variants import variants

    chosen = variants(
        parts_of("--repair", repair), parts_of("--strategies", strategies), parts_of("--contexts", contexts)
    )
    found = asked.cases(tasks, tuple(TASKS), cases)

    from kvmosaic.eval.command import run_evaluation

    run_evaluation(eval_model(opening, capacity), found, chosen, asked.seed, output, as_json=as_json, log=resume)
