"""What a result has to say about where it was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Model and number of cores."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    """The commit that was measured, with "-dirty" if something was changed since."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def save(name: str, report: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes a report as `name`.json, with the facts of the machine in front: what it is, and how busy it was."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    facts = {"processor": processor(), "load_average": os.getloadavg()[0], "commit": commit()}
    path.write_text(json.dumps(facts | report, indent=2) + "\n")
    return path
