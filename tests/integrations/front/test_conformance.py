"""/v1/documents behind the middleware: the same cases as for our own server."""

from __future__ import annotations

from typing import Any

import pytest
from support.document_conformance import CASES, LIMITS, run_case
from support.vllm.front import App

MODELS = "warming_is_for_models_that_are_served"
"""The stand-in takes any model."""


@pytest.fixture(scope="module")
def client() -> Any:
    return App().client(**LIMITS)


@pytest.mark.parametrize("case", [case for case in CASES if case != MODELS])
def test_conformance(case: str, client: Any) -> None:
    run_case(case, client)
