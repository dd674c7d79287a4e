from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
from support.server import RunningServer


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@contextmanager
def opened(server: RunningServer) -> Iterator[openai.OpenAI]:
    http = httpx.Client(timeout=60, trust_env=False)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with opened(server) as client:
        yield client


@pytest.fixture(scope="module")
def calling(tool_server: RunningServer) -> Iterator[openai.OpenAI]:
    """A client of the module's own server, whose model calls tools."""
    with opened(tool_server) as client:
        yield client
