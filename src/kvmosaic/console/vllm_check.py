"""Terminal output of the check of vLLM with the plugin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import fact_table, printable
from kvmosaic.integrations.vllm.front.command import check_installed

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.check import EngineCheck


def show_engine_check(model: str, options: Sequence[str]) -> bool:
    """Prints the check results of vLLM with the plugin; returns whether documents can be composed.

    Raises:
        InvalidConfig: there is no vLLM.
    """
    check_installed()
    from kvmosaic.assembly import BUNDLED_READER, bundled_reader
    from kvmosaic.integrations.vllm.check import check_engine

    check = check_engine(str(bundled_reader()) if model == BUNDLED_READER else model, options)
    console = Console()
    console.print(engine_table(check))
    console.print()
    console.print(worker_table(check))
    if check.findings:
        console.print()
        console.print(finding_table(check))
    console.print()
    console.print(verdict(check))
    return check.passed


def engine_table(check: EngineCheck) -> Table:
    """Returns a table of the checked engine."""
    table = fact_table()
    table.add_row("vllm", Text(f"{printable(check.version)} on {printable(check.platform)}"))
    table.add_row("model", Text(f"{printable(check.model)} in {check.dtype}"))
    if check.compiled:
        table.add_row("compiled", Text(printable(check.compiled)))
    table.add_row("blocks", Text(f"of {check.block_size} tokens"))
    return table


def worker_table(check: EngineCheck) -> Table:
    """Returns one block of rows per worker: KV layout, rotation and capabilities."""
    table = fact_table()
    for worker in check.workers:
        table.add_row("worker", Text(f"{worker.rank} on {printable(worker.device)}, {worker.num_layers} layers"))
        for name, lines in (("  cache", worker.layouts), ("  rotation", worker.rotations)):
            for line in lines:
                table.add_row(name, Text(printable(line)))
        if worker.tested:
            table.add_row("  tested", Text(printable(worker.tested)))
        table.add_row("  moving", _possible(worker.trouble))
        if not worker.trouble:
            table.add_row("  repair", _possible(worker.no_repair, "yellow"))
            table.add_row("  shared positions", _possible(worker.no_shift, "yellow"))
        if worker.no_reading:
            table.add_row("  reading in place", _possible(worker.no_reading))
    return table


def finding_table(check: EngineCheck) -> Table:
    """Returns the findings, one row each."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("tried", "compared with", "found", "allowed"):
        table.add_column(heading)
    for finding in check.findings:
        style = "green" if finding.passed else "red"
        row = (finding.what, finding.compared_with, finding.found, finding.allowed)
        table.add_row(*(Text(printable(part), style=style if part is finding.found else "") for part in row))
    return table


def verdict(check: EngineCheck) -> Text:
    """The result in one line."""
    if check.passed:
        return Text("passed: documents are composed here.", style="bold green")
    failed = next((finding.what for finding in check.findings if not finding.passed), "nothing was composed")
    return Text(f"failed: {printable(check.trouble or failed)}. Do not compose documents here.", style="bold red")


def _possible(reason: str, style: str = "red") -> Text:
    return Text(f"no: {printable(reason)}", style=style) if reason else Text("yes", style="green")
