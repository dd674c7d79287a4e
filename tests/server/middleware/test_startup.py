from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response

from kvmosaic.server.middleware import StartupMiddleware
from kvmosaic.server.tenants import AccessKey, Tenant, Tenants

CROWD = 200


async def come(
    startup: StartupMiddleware, path: str, method: str = "GET", root_path: str = "", key: str = "crowd"
) -> None:
    async def nothing(*_: Any) -> Any:
        return {}

    scope = {"type": "http", "method": method, "path": root_path + path, "root_path": root_path}
    scope["headers"] = [(b"authorization", f"Bearer {key}".encode())]
    await startup(scope, nothing, nothing)


def num_before(path: str, method: str = "GET", root_path: str = "", key: str = "crowd") -> int:
    """How many of a crowd are let in before one that comes last."""

    async def look() -> int:
        let_in: list[str] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            let_in.append(scope["path"].removeprefix(root_path))

        startup = StartupMiddleware()
        startup.open(app, Tenants(AccessKey.of(name, Tenant(name)) for name in ("crowd", "one")))
        crowd = [come(startup, f"/v1/chat/completions/{number}", "POST", root_path) for number in range(CROWD)]
        await asyncio.gather(*crowd, come(startup, path, method, root_path, key))
        return let_in.index(path)

    return asyncio.run(look())


@pytest.mark.parametrize("root_path", ["", "/kv"])
@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/metrics"])
def test_probes_and_scrapes_go_before_a_crowd(path: str, root_path: str) -> None:
    assert num_before(path, root_path=root_path) < 10


@pytest.mark.parametrize(
    ("path", "method"),
    [("/v1/documents/livez", "GET"), ("/v1/documents/metrics", "GET"), ("/metrics", "POST"), ("/health", "PUT")],
)
def test_what_only_looks_like_a_probe_waits_with_the_others(path: str, method: str) -> None:
    assert num_before(path, method) == CROWD


@pytest.mark.parametrize("key", ["one", "not known"])
def test_crowd_of_one_tenant_makes_no_other_wait(key: str) -> None:
    assert num_before("/v1/models", key=key) < 10


def test_a_client_that_sends_its_body_first_reads_the_refusal() -> None:
    startup = StartupMiddleware()
    server = uvicorn.Server(uvicorn.Config(startup, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/documents", b"x" * 8_000_000)
        for status in (503, 413):  # while the model loads, and by the app
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked)
            assert refused.value.code == status
            refused.value.close()
            startup.open(Response("too large", 413, {"Connection": "close"}), Tenants())
    finally:
        server.should_exit = True
        thread.join()
