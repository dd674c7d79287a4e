from __future__ import annotations

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic.server.middleware import OPEN_PATHS

PROBES = ("/livez", "/readyz", "/health", "/healthz")


@pytest.mark.parametrize("path", PROBES)
def test_running_server_is_alive_and_ready(server: RunningServer, path: str) -> None:
    reply = httpx.get(server.url + path)
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})


def test_draining_server_lives_but_is_not_ready() -> None:
    with RunningServer() as server:
        server.services.admission.is_draining = True
        assert httpx.get(server.url + "/livez").status_code == 200
        for path in PROBES[1:]:
            reply = httpx.get(server.url + path)
            assert (reply.status_code, reply.json()) == (503, {"status": "draining"})
            assert int(reply.headers["retry-after"]) >= 1


def test_server_whose_engine_stopped_is_neither_alive_nor_ready() -> None:
    with RunningServer() as server:
        server.call(server.services.engine.close)
        wait_until(lambda: not server.services.engine.is_alive)
        for path in PROBES:
            reply = httpx.get(server.url + path)
            assert (reply.status_code, reply.json()) == (503, {"status": "failed"})


def test_server_whose_engine_fails_is_not_ready_refuses_prompts_and_is_started_anew_after_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("the device is gone")

    body = {"model": "reader", "prompt": "a", "max_tokens": 1}
    with RunningServer() as server:
        engine = server.services.engine
        with monkeypatch.context() as broken:
            broken.setattr(server.llm.engine.runner, "run", fail)
            for _ in range(5):
                assert httpx.post(server.url + "/v1/completions", json=body).status_code == 500
            refused = httpx.post(server.url + "/v1/completions", json=body)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "device" not in refused.text
            assert httpx.get(server.url + "/readyz").json() == {"status": "failed"}
            assert httpx.get(server.url + "/livez").status_code == 200
            broken.setattr("kvmosaic.server.engine_routes.HOPELESS_SECONDS", 0.0)
            assert httpx.get(server.url + "/livez").status_code == 503
        wait_until(lambda: engine.failure is None)
        assert all(httpx.get(server.url + path).status_code == 200 for path in PROBES)
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("HEAD", "/", 200), ("HEAD", "/health", 200), ("HEAD", "/healthz", 200), ("GET", "/favicon.ico", 204)],
)
def test_monitors_and_browsers_get_what_they_ask_for(
    server: RunningServer, method: str, path: str, status: int
) -> None:
    reply = httpx.request(method, server.url + path)
    assert (reply.status_code, reply.content) == (status, b"")


def test_probes_need_no_key() -> None:
    assert set(PROBES) < OPEN_PATHS
