"""Benchmark campaign: one model, several engines, all workloads, the limits of the machine, one report.

The run of `kvmosaic bench` shows its progress, prints its tables and writes its files.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from kvmosaic.lab.bench.measurement import BenchRow, measure, num_answers
from kvmosaic.lab.bench.models import Limits, TokenCost, measure_limits, open_subject
from kvmosaic.lab.bench.peers import Peer, PeerOptions, open_peers
from kvmosaic.lab.bench.report import BenchReport, save_plots
from kvmosaic.lab.bench.results import facts, save_report
from kvmosaic.lab.bench.sizes import FULL, Sizes
from kvmosaic.lab.bench.workloads import Workload, build_workloads
from kvmosaic.model import LoadedModel, quiet_libraries
from kvmosaic.prompt import Prompt
from kvmosaic.server.process.logs import progress_bar


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to measure."""

    model: str = "reader"
    dtypes: tuple[str, ...] = ("auto",)
    sizes: Sizes = FULL
    preset: str = "full"
    workloads: tuple[str, ...] = ()
    """Names of `FAMILIES`; none: all."""
    peers: PeerOptions = field(default_factory=PeerOptions)
    seed: int = 0


def run_campaign(campaign: Campaign, watcher: ProgressBar) -> BenchReport:
    """Measures everything.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    begin = time.monotonic()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(campaign.peers.threads)
    try:
        with ExitStack() as stack, TemporaryDirectory(prefix="kvmosaic-bench-") as scratch:
            return _run(campaign, watcher, stack, Path(scratch), begin)
    finally:
        torch.set_num_threads(threads_before)


def _run(campaign: Campaign, watcher: ProgressBar, stack: ExitStack, scratch: Path, begin: float) -> BenchReport:
    machine = facts(campaign.peers.threads)
    watcher.stage(f"loading {campaign.model}")
    subject = open_subject(campaign.model, campaign.dtypes, scratch)
    sizes = campaign.sizes.within(subject.first.max_positions)
    notes = [] if sizes == campaign.sizes else [f"Fewer documents per prompt: {campaign.model} has fewer positions."]
    workloads = build_workloads(list(campaign.workloads), sizes, subject.first.vocab_size, campaign.seed)
    weights = subject.weights
    formats = [name for name, model in subject.models.items() if isinstance(model, LoadedModel)]
    watcher.stage("measuring the limits of this machine")
    limits = measure_limits(campaign.peers.threads, formats)
    watcher.stage("opening the engines")
    options = replace(campaign.peers, max_tokens=sizes.longest + 64)
    peers, left_out = open_peers(subject, options, stack)
    rows, was_interrupted = _measure_all(workloads, peers, watcher)
    # a limit measured in a busy moment is too low
    limits = limits.best_of(measure_limits(campaign.peers.threads, formats))
    for row in rows:
        add_shares(row, limits, weights[row.dtype])
    if was_interrupted:
        notes.append("Interrupted: what came later was not measured.")
    return BenchReport(
        model=campaign.model,
        preset=campaign.preset,
        seed=campaign.seed,
        machine=machine | {"load_average_after": [round(load, 2) for load in os.getloadavg()]},
        sizes=sizes,
        limits=limits,
        weights=weights,
        rows=rows,
        notes=notes + left_out,
        seconds=time.monotonic() - begin,
    )


def _measure_all(workloads: list[Workload], peers: list[Peer], watcher: ProgressBar) -> tuple[list[BenchRow], bool]:
    """Returns the rows of all workloads; after an interrupt, the finished ones, and True."""
    rows: list[BenchRow] = []
    try:
        for peer in peers:
            # the first forward of a process pays for the start of libraries
            peer.answer([Prompt.plain(range(16, 48))], 2)
        watcher.total(sum(num_answers(workload, peers) for workload in workloads))
        for workload in workloads:
            rows += measure(workload, peers, watcher.answered)
    except KeyboardInterrupt:
        if not rows:
            raise
        return rows, True
    return rows, False


def add_shares(row: BenchRow, limits: Limits, weight: TokenCost) -> None:
    """Writes the shares of the limits into a row.

    Prompts of one batch that share documents read them once; the others read their own. For prompts asked together, the
    last first token counts: until then, all of them were computed.
    """
    if row.first is None or not row.num_prompt:
        return
    num_prompt = max(row.num_prompt)
    is_shared = row.workload.startswith("shared-")
    num_context = num_prompt * (1 if is_shared else row.width)
    if row.num_computed:
        num_computed = fmean(row.num_computed) * row.width
        least = limits.first_token_seconds(weight, row.dtype, round(num_computed), num_context)
        lasts = [max(row.first_seconds[begin:][: row.width]) for begin in range(0, len(row.first_seconds), row.width)]
        row.first_share = least / fmean(lasts)
    if row.token is not None:
        row.token_share = limits.token_seconds(weight, num_context) / row.token.median


def bench(campaign: Campaign, output: Path | None, *, as_json: bool = False) -> BenchReport:
    """Measures, prints, and writes JSON, Markdown and plots into `output` if it is given.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    quiet_libraries()
    notices, console = Console(stderr=True), Console()
    with ProgressBar(notices) as bar:
        report = run_campaign(campaign, bar)
    if as_json:
        console.file.write(report.to_json())
    else:
        console.print(report.to_tables(console.width))
    if output is not None:
        name = f"bench-{Path(campaign.model).resolve().name}-{campaign.preset}"
        save_report(report, output, name, lambda: save_plots(report, output, name), notices, plots="plots")
    return report


class ProgressBar:
    """Progress line with the current stage and the remaining answers."""

    def __init__(self, notices: Console) -> None:
        self._notices = notices
        self._progress = progress_bar(notices)
        self._task = self._progress.add_task("beginning", total=None)
        self._said = ""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, what: str) -> None:
        """A stage without a known length begins."""
        self._progress.update(self._task, description=what, total=None)
        self._say(what)

    def total(self, count: int) -> None:
        """Announces the number of answers."""
        self._progress.update(self._task, total=count, completed=0)

    def answered(self, what: str) -> None:
        """One more answer is finished."""
        self._progress.update(self._task, description=what, advance=1)
        self._say(what.split(":")[0])

    def _say(self, what: str) -> None:
        """Without a terminal, logs one line per stage."""
        if not self._notices.is_terminal and what != self._said:
            self._said = what
            self._notices.print(what, markup=False)
