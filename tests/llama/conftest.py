"""Tests of the llama.cpp engine; those that run llama.cpp are skipped where it is not installed."""

from __future__ import annotations

from kvmosaic.llama.interface import is_installed

_RUNS_IT = (
    "bench",
    "commands",
    "conformance",
    "engine",
    "faces",
    "families",
    "kinds",
    "rotations",
    "server",
    "storms",
    "tiles",
    "tokens",
)
collect_ignore = [] if is_installed() else [f"test_{name}.py" for name in _RUNS_IT]
