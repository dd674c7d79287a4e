"""Builds the C extension into the package if there is a C compiler, and goes without it if there is none."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = Path("src/kvmosaic/attention/native")
LIBRARY = SOURCES / "paged.so"
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-Wno-psabi")
PATHS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma"),
}
"""Instruction sets that tile.c and rows.c are compiled for; the processor chooses when it runs."""
PER_PATH = ("tile", "rows")


class ExtensionHook(BuildHookInterface):
    """hatchling calls this before it packs a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds the extension; a wheel that has it is for this platform only."""
        try:
            problem = build(Path(self.root))
        except OSError as error:
            problem = str(error)
        if problem:
            self.app.display_warning(f"kvmosaic is built without its C extension: {problem}")
            return
        build_data["artifacts"].append(LIBRARY.as_posix())
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def build(root: Path, compiler: str | None = None) -> str:
    """Compiles the extension if its sources are newer; returns why it could not be, or nothing."""
    library = root / LIBRARY
    sources = [Path(__file__), *(root / SOURCES).glob("*.[ch]")]
    if library.exists() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return ""
    command = (*shlex.split(compiler or os.environ.get("CC") or "cc"), *FLAGS)
    common = [root / SOURCES / name for name in ("paged.c", "gather.c")]
    known = ["portable"]
    if platform.machine() in ("x86_64", "AMD64"):
        known = list(PATHS)
    with tempfile.TemporaryDirectory() as folder:
        objects, chosen, problem = [], [], ""
        for path in known:
            made = []
            for name in PER_PATH:
                source, target = root / SOURCES / f"{name}.c", Path(folder) / f"{name}_{path}.o"
                problem = problem or _run(*command, *PATHS[path], f"-DPATH={path}", "-c", source, "-o", target)
                made.append(target)
            if problem:
                break
            objects += made
            chosen.append(f"-DHAS_{path.upper()}")
        if not chosen:
            library.unlink(missing_ok=True)
            return problem
        finished = Path(folder) / LIBRARY.name
        problem = _run(*command, *chosen, "-shared", *common, *objects, "-lm", "-o", finished)
        if problem:
            library.unlink(missing_ok=True)
        else:
            # a new file under the old name: a process that has loaded the old one keeps it
            replacement = library.with_name(f"{Path(folder).name}.so")
            replacement.write_bytes(finished.read_bytes())
            replacement.replace(library)
        return problem


def _run(*command: object) -> str:
    """Runs a command; returns what went wrong."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=600)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit status {done.returncode}"
