"""/v1/documents of a real vLLM server: the same cases as for our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.document_conformance import CASES, LIMITS, run_case
from support.vllm.serving import COMPOSING, ForkedServer

KEY = "sesame"


@pytest.fixture(scope="module")
def client(vllm_model: Callable[[str], Path]) -> Iterator[httpx.Client]:
    limits = {f"KVMOSAIC_{name.upper()}": str(value) for name, value in LIMITS.items()}
    server = ForkedServer(vllm_model("llama"), *COMPOSING, f"--api-key={KEY}", environment=limits)
    server.http.headers["Authorization"] = f"Bearer {KEY}"
    yield server.http
    server.stop()


@pytest.mark.parametrize("case", CASES)
def test_conformance(case: str, client: httpx.Client) -> None:
    run_case(case, client)
