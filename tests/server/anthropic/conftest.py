from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from support.server import RunningServer

if TYPE_CHECKING:
    import anthropic


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic  # takes seconds, and this file is read whatever runs

    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
