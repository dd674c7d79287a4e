"""Run of `kvmosaic bench`: measures with a progress bar, prints tables, writes files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from kvmosaic.bench.campaign import Campaign, run_campaign
from kvmosaic.bench.plots import can_plot, save_plots
from kvmosaic.bench.progress import ProgressBar
from kvmosaic.bench.report import BenchReport
from kvmosaic.model.quiet import quiet_libraries


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
        paths = report.save(output, name)
        if can_plot():
            paths += save_plots(report, output, name)
        else:
            notices.print("no plots: matplotlib is missing; pip install 'kvmosaic[bench]'", markup=False)
        notices.print("written: " + ", ".join(map(str, paths)), markup=False, style="dim")
    return report
