"""Run of `kvmosaic bench`: measures with a progress bar, prints tables, writes files."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvmosaic.bench.campaign import Campaign, Watcher, run_campaign
from kvmosaic.bench.plots import can_plot, save_plots
from kvmosaic.bench.report import BenchReport
from kvmosaic.model.quiet import quiet_libraries


def bench(campaign: Campaign, output: Path | None, *, as_json: bool = False) -> BenchReport:
    """Measures, prints, and writes JSON, Markdown and plots into `output` if it is given.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    quiet_libraries()
    notices, console = Console(stderr=True), Console()
    with _Bar(notices) as bar:
        report = run_campaign(campaign, bar)
    if as_json:
        console.file.write(report.to_json())
    else:
        console.print(report.to_tables(console.width))
    if output is not None:
        name = f"bench-{Path(campaign.model).resolve().name}-{campaign.preset}"
        paths = report.save(output, name)
        if can_plot():
            paths += save_plots(report, output, name)
        else:
            notices.print("no plots: matplotlib is missing; pip install 'kvmosaic[bench]'", markup=False)
        notices.print("written: " + ", ".join(map(str, paths)), markup=False, style="dim")
    return report


class _Bar(Watcher):
    """Progress line with the current stage and the remaining answers."""

    def __init__(self, notices: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._notices = notices
        self._progress = Progress(*columns, console=notices, transient=True)
        self._task = self._progress.add_task("beginning", total=None)
        self._said = ""

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, what: str) -> None:
        self._progress.update(self._task, description=what, total=None)
        self._say(what)

    def total(self, count: int) -> None:
        self._progress.update(self._task, total=count, completed=0)

    def answered(self, what: str) -> None:
        self._progress.update(self._task, description=what, advance=1)
        self._say(what.split(":")[0])

    def _say(self, what: str) -> None:
        """Without a terminal, logs one line per stage."""
        if not self._notices.is_terminal and what != self._said:
            self._said = what
            self._notices.print(what, markup=False)
