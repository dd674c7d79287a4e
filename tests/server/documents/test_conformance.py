"""/v1/documents of our own server: the same cases as inside vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.document_conformance import CASES, LIMITS, run_case
from support.server import RunningServer


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("- {key: sesame-1, tenant: alpha}")
    headers = {"Authorization": "Bearer sesame-1"}
    with (
        RunningServer(keys_file=keys, **LIMITS) as server,
        httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize("case", CASES)
def test_conformance(case: str, client: httpx.Client) -> None:
    run_case(case, client)
