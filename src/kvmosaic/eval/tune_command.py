"""Options of `kvmosaic tune`; modules that need torch are imported when it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.option_groups import grouped
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

if TYPE_CHECKING:
    from kvmosaic.tuned_settings import Goal


@dataclass(frozen=True, slots=True)
class GoalOptions:
    """How far answers may be from those of full attention, and at which cost."""

    loss: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Most of full attention's accuracy that may be lost, on average and on each task. Default: 0.02 where "
            "answers are known and no other goal is set.",
        ),
    ] = None
    task_loss: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The same for each task, if more may be lost there.")
    ] = None
    max_divergence: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            help="Most divergence from full attention. Needs no answers. Default: 0.02 where no answer is known and no "
            "other goal is set.",
        ),
    ] = None
    min_agreement: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Least share of the same greedy tokens as full attention."),
    ] = None
    max_loss_increase: Annotated[
        float | None,
        typer.Option(metavar="NATS", help="How far the loss of the accepted answer may be above full attention."),
    ] = None
    max_work: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Most work for choosing and repairing; 1 is what computing all documents once costs."
        ),
    ] = 1.0

    def goal(self, *, is_labelled: bool) -> Goal:
        """The goal; what it is by default depends on whether answers are known."""
        from kvmosaic.eval.tuner import goal_of

        return goal_of(
            self.loss,
            self.task_loss,
            self.max_work,
            max_divergence=self.max_divergence,
            min_agreement=self.min_agreement,
            max_loss_increase=self.max_loss_increase,
            is_labelled=is_labelled,
        )


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Where the profile goes, and when it is written."""

    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where the profile is written. Default: kvmosaic_profile.json in the model's folder."
        ),
    ] = None
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="Write the closest way if none reaches the goal.")
    ] = False


@grouped
def tune_command(
    opening: OpenedModel,
    goal: GoalOptions,
    asked: QuestionOptions,
    target: ProfileOptions,
    tasks: Annotated[str | None, typer.Option(metavar="NAMES", help=TASKS_HELP.format("two-hop,story"))] = None,
    repair: Annotated[
        str | None,
        typer.Option(metavar="POLICIES", help="What is tried, parted by commas; see kvmosaic eval. Default: a ladder."),
    ] = None,
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Contexts = "system,lead_in",
    cases: Annotated[int | None, typer.Option(min=1, max=100_000, help=CASES_HELP.format("64"))] = None,
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
    from kvmosaic.eval.cases import parts_of
    from kvmosaic.eval.tuner import LADDER
    from kvmosaic.eval.variants import FULL, variants
    from kvmosaic.repair import repair_policy

    repairs = LADDER if repair is None else parts_of("--repair", repair)
    chosen = variants(repairs, parts_of("--strategies", strategies), parts_of("--contexts", contexts))
    found = asked.cases(tasks, ("two-hop", "story"), 64 if cases is None and not asked.is_own else cases)
    aim = goal.goal(is_labelled=any(case.is_labelled for case in found))
    with_full = any(str(repair_policy(each)) == FULL.repair for each in repairs)

    from kvmosaic.eval.tune import Tuning, tune

    model = eval_model(opening, capacity)
    if not tune(
        Tuning(model, found, chosen, aim, asked.seed, target.profile, target.best_effort, with_full, resume),
        as_json=as_json,
    ):
        raise typer.Exit(1)
