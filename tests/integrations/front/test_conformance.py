"""/v1/documents behind the middleware: the same cases as for our own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.document_conformance import CASES, LIMITS, run_case
from support.vllm.front import App


@pytest.mark.parametrize("case", [case for case in CASES if case != "warming_is_for_models_that_are_served"])
def test_conformance(case: str, tmp_path: Path) -> None:
    run_case(case, App().client(documents_dir=str(tmp_path), **LIMITS))
