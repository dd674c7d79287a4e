"""Tests of the llama.cpp engine; those that run llama.cpp are skipped where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("llama_cpp") else ["test_conformance.py", "test_engine.py", "test_faces.py", "test_storms.py"]
)
