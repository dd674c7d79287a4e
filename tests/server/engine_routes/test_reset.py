from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic import __version__

CHAT = {
    "messages": [{"role": "user", "content": "When does it leave?"}],
    "documents": [{"id": "ferry", "text": "The ferry leaves at noon, from the old pier of Tolbury."}],
    "max_tokens": 4,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tier")
    with RunningServer(chunk_tier=[f"disk:{folder}?quota=1GiB"], chunk_loading="always") as running:
        yield running


def reset(server: RunningServer, query: str = "", **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/reset_prefix_cache{query}", timeout=60, **options)


def action(server: RunningServer) -> tuple[str, str | None]:
    (document,) = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT).json()["kvmosaic"]["documents"]
    return document["action"], document["tier"]


def test_reset_drops_the_device_and_leaves_the_tiers(server: RunningServer) -> None:
    assert reset(server, "?reset_external=true").json() == {"is_empty": True}
    assert action(server) == ("computed", None)
    assert action(server)[1] == "device"
    assert reset(server).json() == {"is_empty": True}
    assert action(server)[1] == "disk"
    assert reset(server, "?reset_external=true&reset_running_requests=false").json() == {"is_empty": True}
    assert action(server) == ("computed", None)


def test_reset_leaves_what_a_running_request_uses(server: RunningServer) -> None:
    body = {**CHAT, "stream": True, "ignore_eos": True, "max_tokens": 100_000, "window_tokens": 64}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # closing it would end the request
        assert next(lines).startswith("data: {")
        assert reset(server).json() == {"is_empty": False}
    wait_until(lambda: reset(server).json() == {"is_empty": True})


def test_pinned_document_is_pinned_again_when_it_is_computed(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.put("/v1/documents/pier", json={"text": "The pier of Tolbury is old.", "pinned": True})
        client.post("/v1/documents:warm", json={"ids": ["pier"]}).raise_for_status()
        assert reset(server).json() == {"is_empty": True}
        client.post("/v1/documents:warm", json={"ids": ["pier"]}).raise_for_status()
        assert client.get("/v1/documents/pier").json()["chunks"][0]["pinned"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?reset_running_requests=true", "not supported: abort the requests first"),
        ("?reset_external=perhaps", "must be a valid boolean"),
        ("?reset_externl=true", "unknown field 'reset_externl'"),
    ],
)
def test_query_that_cannot_be_used_says_why(server: RunningServer, query: str, said: str) -> None:
    reply = reset(server, query)
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


def test_only_an_admin_may_reset_and_the_version_needs_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: key-of-acme, tenant: acme}\n- {key: key-of-boss, tenant: boss, admin: true}\n")
    with RunningServer(keys_file=keys) as closed:
        acme, boss = ({"Authorization": f"Bearer key-of-{name}"} for name in ("acme", "boss"))
        assert reset(closed, headers=acme).status_code == 403
        assert reset(closed, headers=boss).json() == {"is_empty": True}
        assert httpx.get(closed.url + "/version").status_code == 401
        assert httpx.get(closed.url + "/version", headers=acme).json() == {"version": __version__}


def test_reset_goes_on_while_others_ask(server: RunningServer) -> None:
    failed: list[int] = []

    def ask() -> None:
        for _ in range(10):
            reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
            failed.extend([reply.status_code] if reply.status_code != 200 else [])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert reset(server).status_code == 200
    assert not failed
    server.call(server.services.engine.call, lambda engine: engine.check_invariants())
