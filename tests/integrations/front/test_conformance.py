"""/v1/documents behind the middleware: the same cases as for our own server."""

from __future__ import annotations

from typing import Any

import pytest
from support.document_conformance import CASES, LIMITS, run_case
from support.vllm.front import App

MODELS = "warming_is_for_models_that_are_served"
"""The stand-in takes any model."""


SAME = (
    "created_document_is_described_and_read",
    "ids_are_any_line_but_no_path_and_no_verb",
    "list_is_read_in_parts",
)
"""What the shared routes alone do, so that before a commit it is enough to ask our own server."""


@pytest.fixture(scope="module")
def client() -> Any:
    return App().client(**LIMITS)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in SAME else ()) for case in CASES if case != MODELS],
)
def test_conformance(case: str, client: Any) -> None:
    run_case(case, client)
