"""What takes too much processor time to read is given up, and the next request is answered."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.server import RunningServer

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may end any callback

LONG = "The ferry goes to Oak Island. " * 60_000
ROLLING = {"sink_tokens": 4, "window_tokens": 64, "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(request_cpu_seconds=0.05) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG, **ROLLING}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], **ROLLING}),
        (
            "/tokenize",
            {"prompt": "?", "documents": [{"text": f"The ferry number {n} goes. " * 40} for n in range(4_000)]},
        ),
    ],
)
def test_reading_ends_at_its_limit(server: RunningServer, path: str, body: dict[str, object]) -> None:
    reply = httpx.post(server.url + path, json=body, timeout=60)
    assert reply.status_code == 422
    error = reply.json()["error"]
    assert error["code"] == "too_much_work"
    assert error["message"] == "reading this took more than 0.05 s of processor time; send less at once"
    reply = httpx.post(server.url + "/v1/completions", json={"prompt": "The ferry", "max_tokens": 2}, timeout=60)
    assert reply.status_code == 200
