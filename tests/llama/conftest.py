"""Tests of the llama.cpp engine; those that run llama.cpp are skipped where it is not installed."""

from __future__ import annotations

from kvmosaic.llama.interface import is_installed

collect_ignore = (
    []
    if is_installed()
    else [
        "test_bench.py",
        "test_conformance.py",
        "test_engine.py",
        "test_faces.py",
        "test_families.py",
        "test_kinds.py",
        "test_rotations.py",
        "test_storms.py",
    ]
)
