from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.server import RunningServer, ServeCommand, metric, send, wait_until

ASK = {"model": "reader", "prompt": "Who is the mayor?", "max_tokens": 4, "temperature": 0}
DOCUMENTS = [{"id": f"d{number}", "text": f"The ferry number {number} leaves at noon."} for number in range(4)]
CHAT = {
    "model": "reader",
    "messages": [{"role": "user", "content": "When does it leave?"}],
    "documents": DOCUMENTS,
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer(chunk_tier=["host:64MiB"], chunk_loading="always", max_queue=2, max_num_seqs=1) as running:
        yield running


@pytest.fixture
def server(own_server: RunningServer) -> Iterator[RunningServer]:
    yield own_server
    assert post(own_server, "/wake_up").status_code == 200
    wait_until(lambda: not own_server.services.admission.num_under_way)


def post(server: RunningServer, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def get(server: RunningServer, path: str) -> tuple[int, Any]:
    reply = httpx.get(server.url + path)
    return reply.status_code, reply.json()


def test_prompts_wait_for_the_wake_and_are_answered_as_ever(server: RunningServer) -> None:
    expected = post(server, "/v1/completions", ASK).json()["choices"]
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": False})
    assert post(server, "/sleep?level=1").json() == {"is_sleeping": True}
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": True})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, server, "/v1/completions", ASK)
        wait_until(lambda: server.services.engine.num_waiting == 1)
        assert not waiting.done()
        assert post(server, "/wake_up").json() == {"is_sleeping": False}
        assert waiting.result(30).json()["choices"] == expected


@pytest.mark.parametrize("level", [1, 2])
def test_chunks_are_kept_on_level_one_and_dropped_on_level_two(server: RunningServer, level: int) -> None:
    post(server, "/v1/chat/completions", CHAT)
    found = server.call(server.services.engine.call, lambda engine: len(engine.kv_cache.chunks()))
    assert found == len(DOCUMENTS)
    post(server, f"/sleep?level={level}")
    post(server, "/wake_up")
    left = server.call(server.services.engine.call, lambda engine: len(engine.kv_cache.chunks()))
    assert left == (found if level == 1 else 0)


def test_what_runs_is_finished_first(server: RunningServer) -> None:
    body = {**ASK, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        with ThreadPoolExecutor(1) as pool:
            sleep = pool.submit(post, server, "/sleep")
            rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"error"' not in "".join(rest)
            assert sleep.result(30).json() == {"is_sleeping": True}


def test_a_sleeper_that_refuses_gives_503_and_a_time_to_try_again(server: RunningServer) -> None:
    post(server, "/sleep?mode=refuse")
    warm = {"documents": DOCUMENTS}
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT), ("/v1/documents:warm", warm)):
        for stream in (False, True):
            reply = post(server, path, {**body, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_asleep"), path
            assert int(reply.headers["retry-after"]) >= 1
    assert get(server, "/readyz") == (503, {"status": "asleep"})
    assert get(server, "/health") == (200, {"status": "asleep"})
    assert post(server, "/sleep?mode=wait").json() == {"is_sleeping": True}
    assert get(server, "/readyz") == (200, {"status": "asleep"})
    assert get(server, "/livez") == (200, {"status": "ok"})


def test_those_who_wait_count_in_the_queue_and_may_leave(server: RunningServer) -> None:
    post(server, "/sleep")
    admission = server.services.admission

    clients = [send(server, "/v1/completions", ASK) for _ in range(3)]
    wait_until(lambda: server.services.engine.num_waiting == 3)
    refused = post(server, "/v1/completions", ASK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    for client in clients:
        client.close()
    wait_until(lambda: not admission.num_under_way and not server.services.engine.num_waiting)
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": True})


def test_everything_else_works_while_it_sleeps(server: RunningServer) -> None:
    post(server, "/sleep")
    assert httpx.put(server.url + "/v1/documents/guide", json={"text": "A guide."}).status_code == 201
    assert get(server, "/v1/documents/guide")[0] == 200
    assert httpx.delete(server.url + "/v1/documents/guide").status_code == 200
    assert 'kvmosaic:engine_asleep{model_name="reader"} 1.0' in httpx.get(server.url + "/metrics").text
    assert post(server, "/tokenize", {"model": "reader", "prompt": "a"}).status_code == 200
    reply = post(server, "/v1/documents:sleep", {"idle_seconds": 0})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_asleep")


def test_without_memory_to_wake_it_sleeps_on(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory on the secret device")

    post(server, "/sleep")
    with monkeypatch.context() as broken:
        broken.setattr(server.llm.engine.runner, "wake", fail)
        reply = post(server, "/wake_up")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_asleep")
        assert "secret" not in reply.text and int(reply.headers["retry-after"]) >= 1
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": True})
    post(server, "/wake_up")
    assert post(server, "/v1/completions", ASK).status_code == 200


@pytest.mark.parametrize("query", ["level=0", "level=3", "level=x", "mode=abort"])
def test_other_levels_and_modes_are_refused(server: RunningServer, query: str) -> None:
    reply = post(server, f"/sleep?{query}")
    assert reply.status_code == 400 and query.partition("=")[0] in reply.json()["error"]["param"]
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": False})


@pytest.mark.parametrize("path", ["/sleep?levle=2", "/sleep?level=1&levle=2", "/wake_up?levle=2"])
def test_unknown_parameters_are_refused_by_their_name(server: RunningServer, path: str) -> None:
    reply = post(server, path)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "levle")
    assert "unknown field 'levle'" in reply.json()["error"]["message"]
    assert get(server, "/is_sleeping") == (200, {"is_sleeping": False})


def test_cold_chunks_move_to_the_tiers_and_come_back(server: RunningServer) -> None:
    post(server, "/sleep?level=2")
    post(server, "/wake_up")
    expected = post(server, "/v1/chat/completions", CHAT).json()
    assert post(server, "/v1/documents:sleep").json() == {"object": "documents.asleep", "num_chunks": 0}
    cold = {"min_accesses": 10, "idle_seconds": 0}
    assert post(server, "/v1/documents:sleep", cold).json()["num_chunks"] == len(DOCUMENTS)
    again = post(server, "/v1/chat/completions", CHAT).json()
    assert again["choices"][0]["message"] == expected["choices"][0]["message"]
    assert server.llm.engine.kv_cache.statistics().loaded_chunks >= 1, "some may be faster to compute"


@pytest.mark.parametrize(
    "body", [{"min_accesses": -1}, {"min_accesses": 2**41}, {"idle_seconds": -1}, {"idle_seconds": 1e13}, {"other": 1}]
)
def test_numbers_of_cold_chunks_have_limits(server: RunningServer, body: dict[str, Any]) -> None:
    reply = post(server, "/v1/documents:sleep", body)
    assert reply.status_code == 400 and next(iter(body)) in reply.json()["error"]["param"]


def test_without_tiers_no_chunk_sleeps() -> None:
    with RunningServer() as server:
        reply = post(server, "/v1/documents:sleep", {})
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "no_tiers")


def test_only_an_admin_may_let_it_sleep(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: alpha-key-1, tenant: alpha}\n- {key: admin-key-1, tenant: operations, admin: true}\n")
    with RunningServer(keys_file=keys) as server:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            assert httpx.request(method, server.url + path).status_code == 401
            reply = httpx.request(method, server.url + path, headers={"Authorization": "Bearer alpha-key-1"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (403, "admin_only")
            reply = httpx.request(method, server.url + path, headers={"Authorization": "Bearer admin-key-1"})
            assert reply.status_code == 200


def test_a_sleeper_that_is_told_to_stop_ends_at_once_and_its_tiers_are_written(tmp_path: Path) -> None:
    arguments = ("--drain-seconds", "3600", "--chunk-tier", f"disk:{tmp_path / 'cache'}?quota=64MiB")
    arguments += ("--repair", "none")  # the documents are alike, and would be read in full
    with ServeCommand(*arguments) as command, ThreadPoolExecutor(1) as pool:
        command.until_ready()
        command.until(r"tiers +disk .*cache \(64 MiB\)")
        assert httpx.post(command.url + "/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
        httpx.post(command.url + "/sleep", timeout=60)
        waiting = pool.submit(httpx.post, command.url + "/v1/completions", json=ASK, timeout=60)
        wait_until(lambda: metric(command.url, "vllm:num_requests_waiting") == 1)
        command.stop()
        assert command.wait() == 0, command.log
        assert waiting.exception() is not None or waiting.result().status_code in (200, 503)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == len(DOCUMENTS)
