"""Commands `kvmosaic eval` and `kvmosaic tune`: their options; modules that need torch are imported when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmosaic.console.options import AsReport, ModelOptions, Output, Takes, grouped
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.repair.policy import FORMS

if TYPE_CHECKING:
    from kvmosaic.lab.eval.case import Case
    from kvmosaic.lab.eval.measure import EvalModel
    from kvmosaic.tuned_settings import Goal


ALL_STRATEGIES = ",".join(strategy_names(offsets=False))

Strategies = Annotated[
    str,
    typer.Option(
        metavar="NAMES", help=f"Positions of documents: {', '.join(strategy_names(offsets=False))}; parted by commas."
    ),
]
SAW = "What documents saw when they were computed: system, companions, none, parted by commas."
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
    "similar(documents), one-hop(documents), two-hop, story, order, needle(documents), long(tokens), similar-among, "
    "similar-long, and similar-de, -es, -fr, -ru, -zh, parted by commas. Default: {} (for the bundled reader without "
    "similar); none with --data or --questions."
)
CASES_HELP = "Questions of each task, and at most of each file. Default: {}; all of a file."
_LOADING = "dtype device num_threads engine kv_cache_dtype"


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
        typer.Option("--documents", metavar="DIR", help="A folder of documents of your own; with --questions."),
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
        from kvmosaic.lab.eval.cases import gather, own_questions, parts_of

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
    from kvmosaic.lab.eval.measure import EvalModel

    config = opening.config()
    return EvalModel(
        opening.model,
        config.model.dtype,
        config.model.device,
        config.engine.num_threads,
        capacity,
        config.model.engine,
        config.model.kv_cache_dtype,
        config.model.adapter,
    )


@grouped
def eval_command(
    opening: Annotated[ModelOptions, Takes(f"{_LOADING} adapter")],
    asked: QuestionOptions,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=TASKS_HELP.format("the first seven")),
    ] = None,
    repair: Annotated[
        str,
        typer.Option(
            metavar="POLICIES",
            help=f"{FORMS}, parted by commas.",
        ),
    ] = "none,first(8),query(0.15),full",
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Annotated[
        str | None, typer.Option(metavar="NAMES", help=f"{SAW} Default: companions; system for the bundled reader.")
    ] = None,
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
    from kvmosaic.assembly import usual_context
    from kvmosaic.lab.eval.cases import parts_of
    from kvmosaic.lab.eval.tasks import USUAL_TASKS
    from kvmosaic.lab.eval.variants import OTHER_ORDER, variants

    model = eval_model(opening, capacity)
    full, *others = variants(
        parts_of("--repair", repair),
        parts_of("--strategies", strategies),
        parts_of("--contexts", contexts or usual_context(model.model)),
        model.adapter_names,
    )
    found = asked.cases(tasks, _learned(USUAL_TASKS, model.model), cases)

    from kvmosaic.lab.eval.measure import run_evaluation

    run_evaluation(model, found, (full, OTHER_ORDER, *others), asked.seed, output, as_json=as_json, log=resume)


def _learned(tasks: Sequence[str], model: str) -> tuple[str, ...]:
    """The tasks for a model: the bundled reader has learned no records, and ratios of nothing say nothing."""
    from kvmosaic.assembly import BUNDLED_READER

    return tuple(task for task in tasks if task != "similar" or model != BUNDLED_READER)


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
    max_work: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Most work for choosing and repairing; 1 is what computing all documents once costs."
        ),
    ] = 1.0

    def goal(self, *, is_labelled: bool) -> Goal:
        """The goal; what it is by default depends on whether answers are known."""
        from kvmosaic.lab.eval.tuner import goal_of

        return goal_of(
            self.loss,
            self.max_work,
            max_divergence=self.max_divergence,
            min_agreement=self.min_agreement,
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
    opening: Annotated[ModelOptions, Takes(f"{_LOADING} adapter")],
    goal: GoalOptions,
    asked: QuestionOptions,
    target: ProfileOptions,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help=TASKS_HELP.format("similar,two-hop,story")),
    ] = None,
    repair: Annotated[
        str | None,
        typer.Option(metavar="POLICIES", help="What is tried, parted by commas; see kvmosaic eval. Default: a ladder."),
    ] = None,
    strategies: Strategies = ALL_STRATEGIES,
    contexts: Annotated[str, typer.Option(metavar="NAMES", help=SAW)] = "system,companions",
    cases: Annotated[int | None, typer.Option(min=1, max=100_000, help=CASES_HELP.format("64"))] = None,
    capacity: Capacity = "1GiB",
    resume: Resume = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Find the cheapest settings within a stated loss of accuracy, and write them to the profile of the model.

    kvmosaic tune path/of/model --documents texts --questions questions.txt --max-divergence 0.02 --max-work 0.15

    kvmosaic tune path/of/model --tasks two-hop,story --loss 0.02

    LLM, serve and the other commands follow the profile of a model unless an option overrides it. Exit code 1 if no
    way is good enough; then nothing is written.
    """
    from kvmosaic.lab.eval.cases import parts_of
    from kvmosaic.lab.eval.tuner import LADDER
    from kvmosaic.lab.eval.variants import FULL, variants
    from kvmosaic.repair import repair_policy

    repairs = LADDER if repair is None else parts_of("--repair", repair)
    model = eval_model(opening, capacity)
    chosen = variants(
        repairs, parts_of("--strategies", strategies), parts_of("--contexts", contexts), model.adapter_names
    )
    usual = _learned(("similar", "two-hop", "story"), model.model)
    found = asked.cases(tasks, usual, 64 if cases is None and not asked.is_own else cases)
    found = [replace(case, companions=()) for case in found]  # a profile has none: what serves is what is measured
    aim = goal.goal(is_labelled=any(case.is_labelled for case in found))
    with_full = any(str(repair_policy(each)) == FULL.repair for each in repairs)

    from kvmosaic.lab.eval.tuner import Tuning, tune

    if not tune(
        Tuning(model, found, chosen, aim, asked.seed, target.profile, target.best_effort, with_full, resume),
        as_json=as_json,
    ):
        raise typer.Exit(1)
