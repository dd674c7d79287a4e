"""Results of a benchmark: the facts of the machine, and the files of a report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from kvmosaic.errors import pip_install

_PACKAGES = ("kvmosaic", "torch", "transformers", "numpy")


def facts(threads: int) -> dict[str, Any]:
    """Returns machine, cores, threads, load, versions and commit."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "waiting_threads": _waiting_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def _waiting_threads() -> str:
    """Returns the waiting policy of threads, by the environment variables that torch has read."""
    spins = os.environ.get("GOMP_SPINCOUNT")
    return os.environ.get("OMP_WAIT_POLICY", f"{spins} spins" if spins else "default")


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Returns the commit of this package's checkout, with "-dirty" if it has changes."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() or None


class Report(Protocol):
    """What is written of a run."""

    def to_json(self) -> str:
        """Everything."""

    def to_markdown(self) -> str:
        """Tables for people."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def save_report(
    report: Report, folder: Path, name: str, plot: Callable[[], list[Path]], notices: Console, *, plots: str = "plot"
) -> None:
    """Writes JSON, Markdown and, where matplotlib is installed, what `plot` draws; says where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    for path, text in zip(paths, (report.to_json(), report.to_markdown()), strict=True):
        path.write_text(text, encoding="utf-8")
    if can_plot():
        paths += plot()
    else:
        notices.print(f"no {plots}: matplotlib is missing; {pip_install('bench')}", markup=False)
    notices.print("written: " + ", ".join(map(str, paths)), markup=False, style="dim")
