"""No reply to a tenant's key changes with what other tenants store, pin, ask and compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import RunningServer, wait_until

PATHS = (
    "/livez",
    "/readyz",
    "/health",
    "/metrics",
    "/is_sleeping",
    "/v1/models",
    "/v1/documents?limit=1",
    "/v1/documents?include_chunks=true",
    "/v1/documents/two",
    "/dashboard/examples",
)
CHANGING = ("idle_seconds", "created", "last_used_at", "X-Request-Id")
WORDS = "The ferry leaves the harbour at noon and comes back when the bells of the tower ring. "


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("".join(f"- {{key: {name}-key, tenant: {name}}}\n" for name in ("acme", "zenith")))
    settings = {"chunk_cache_size": "3MiB", "max_num_seqs": 2, "max_queue": 1}
    with RunningServer(keys_file=Path(keys), **settings) as running:
        yield running


def call(server: RunningServer, tenant: str, path: str, body: Any = None, method: str = "") -> httpx.Response:
    method = method or ("GET" if body is None else "POST")
    headers = {"Authorization": f"Bearer {tenant}-key"}
    return httpx.request(method, server.url + path, json=body, headers=headers, timeout=120)


def ask(server: RunningServer, tenant: str, *texts: str, **fields: Any) -> httpx.Response:
    body = {"model": "reader", "max_tokens": 2, "messages": [{"role": "user", "content": "When?"}], **fields}
    return call(server, tenant, "/v1/chat/completions", {**body, "documents": [{"text": text} for text in texts]})


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name not in CHANGING}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def seen(server: RunningServer) -> dict[str, Any]:
    """All that acme is told where it only looks."""
    replies = {path: call(server, "acme", path) for path in PATHS}
    return {path: (reply.status_code, without_times(reply.json())) for path, reply in replies.items()}


def test_what_others_do_is_in_no_reply(server: RunningServer) -> None:
    for name in ("one", "two"):
        document = {"id": name, "text": f"{name}: {WORDS}", "ttl_seconds": None}
        assert call(server, "acme", "/v1/documents", document).status_code == 201
    assert call(server, "acme", "/v1/documents:warm", {}).status_code == 200
    before = seen(server)
    assert before["/metrics"][0] == before["/is_sleeping"][0] == 403
    for number in range(5):
        document = {"id": f"z{number}", "text": f"{number}: {WORDS}", "pinned": True, "ttl_seconds": None}
        assert call(server, "zenith", "/v1/documents", document).status_code == 201
    assert call(server, "zenith", "/v1/documents:warm", {}).status_code == 200
    assert ask(server, "zenith", WORDS).status_code == 200
    assert seen(server) == before
    third = {"id": "three", "text": f"three: {WORDS}", "ttl_seconds": None}
    assert call(server, "acme", "/v1/documents", third).status_code == 201
    page = call(server, "acme", "/v1/documents?limit=1").json()
    assert page["next_after"] == "~3", "a number of all documents would tell how many the others have stored"


def test_an_answer_for_lack_of_room_does_not_tell_what_others_hold(server: RunningServer) -> None:
    messages = []
    for number in (1, 2):
        document = {"id": f"pinned-{number}", "text": f"{number} pinned: {WORDS}" * 2, "pinned": True}
        assert call(server, "zenith", "/v1/documents", document).status_code == 201
        assert call(server, "zenith", "/v1/documents:warm", {"ids": [document["id"]]}).status_code == 200
        reply = ask(server, "acme", *(f"{part} of many: {WORDS * 2}" for part in range(12)))
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["kvmosaic"]["composition"])
    assert messages[0] == messages[1]
    assert "more than the chunk cache has for them" in messages[0]


def test_a_full_queue_does_not_tell_how_many_wait(server: RunningServer) -> None:
    def busy() -> None:
        ask(server, "zenith", n=2, max_tokens=400, ignore_eos=True)

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        wait_until(lambda: server.services.engine.num_running == 2)
        reply = ask(server, "acme", n=2)
        assert reply.status_code == 429
        assert reply.json()["error"]["message"].startswith("too many requests wait already (--max-queue 1)")
    finally:
        thread.join()
