"""`kvmosaic sleep` and `wake`: a running server, asked over HTTP."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from support.server import RunningServer, wait_until
from typer.testing import CliRunner, Result

from kvmosaic.cli import app

DOCUMENTS = [{"id": f"d{number}", "text": f"The ferry number {number} leaves at noon."} for number in range(3)]
CHAT = {
    "model": "reader",
    "messages": [{"role": "user", "content": "When?"}],
    "documents": DOCUMENTS,
    "max_tokens": 1,
}


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVMOSAIC_API_KEY", raising=False)


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer(chunk_tier=["host:64MiB"], chunk_loading="always") as running:
        yield running


@pytest.fixture
def server(own_server: RunningServer) -> Iterator[RunningServer]:
    yield own_server
    assert httpx.post(own_server.url + "/wake_up", timeout=60).status_code == 200


def kvmosaic(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line that is said when something is refused."""
    result = kvmosaic(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == "" and result.stderr.startswith("kvmosaic: ") and result.stderr.count("\n") == 1
    return result.stderr


def is_sleeping(server: RunningServer) -> bool:
    return bool(httpx.get(server.url + "/is_sleeping").json()["is_sleeping"])


@contextmanager
def stranger(status: int, body: bytes = b"", **headers: str) -> Iterator[tuple[str, list[str]]]:
    """A server that answers every POST alike; its address, and what it was asked."""
    asked: list[str] = []

    class Replies(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Replies) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.parametrize("level", [1, 2])
def test_server_sleeps_and_wakes(server: RunningServer, level: int) -> None:
    asleep = kvmosaic("sleep", "--level", str(level), "--url", server.url)
    assert (asleep.exit_code, asleep.stdout) == (0, f"{server.url} sleeps; prompts wait until `kvmosaic wake`\n")
    assert is_sleeping(server) and server.llm.engine.sleep_level == level
    awake = kvmosaic("wake", "--url", server.url + "/")
    assert (awake.exit_code, awake.stdout) == (0, f"{server.url}/ is awake\n")
    assert not is_sleeping(server)


def test_a_sleeper_may_refuse_prompts(server: RunningServer) -> None:
    assert "prompts are refused until" in kvmosaic("sleep", "--refuse", "--url", server.url).stdout
    assert httpx.get(server.url + "/readyz").status_code == 503


def test_cold_chunks_move_while_the_server_works(server: RunningServer) -> None:
    assert httpx.post(server.url + "/v1/chat/completions", json=CHAT, timeout=60).status_code == 200
    assert kvmosaic("sleep", "--cold", "--url", server.url).stdout == f"0 chunks of {server.url} moved to its tiers\n"
    options = ("--min-accesses", "10", "--idle-seconds", "0")
    moved = kvmosaic("sleep", "--cold", *options, "--url", server.url)
    assert (moved.exit_code, moved.stdout) == (0, f"3 chunks of {server.url} moved to its tiers\n")
    assert not is_sleeping(server)
    kvmosaic("sleep", "--url", server.url)
    assert "cannot do it now: the engine sleeps" in refused("sleep", "--cold", "--url", server.url)


def test_one_that_is_woken_before_it_slept_is_exit_code_1(server: RunningServer) -> None:
    body = {"model": "reader", "prompt": "Who?", "max_tokens": 400, "ignore_eos": True, "stream": True}
    results: list[Result] = []
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        thread = threading.Thread(target=lambda: results.append(kvmosaic("sleep", "--url", server.url)))
        thread.start()
        wait_until(lambda: server.llm.engine.sleep_level or results)
        httpx.post(server.url + "/wake_up", timeout=60)
        thread.join(30)
    assert results[0].exit_code == 1
    assert results[0].stderr == f"kvmosaic: {server.url} was woken before it slept\n"


def test_without_tiers_and_without_an_admins_key_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: alpha-key-1, tenant: alpha}\n- {key: admin-key-1, tenant: operations, admin: true}\n")
    with RunningServer(keys_file=keys) as server:
        assert "needs a key; set KVMOSAIC_API_KEY to that of an admin" in refused("sleep", "--url", server.url)
        for key, told in (
            ("unknown-key-1", "does not know the API key in KVMOSAIC_API_KEY"),
            ("alpha-key-1", "the API key in KVMOSAIC_API_KEY is not that of an admin"),
            ("two words", "the key in KVMOSAIC_API_KEY must be at most"),
            ("with\nheader: new", "the key in KVMOSAIC_API_KEY must be at most"),
        ):
            monkeypatch.setenv("KVMOSAIC_API_KEY", key)
            said = refused("sleep", "--url", server.url)
            assert told in said and key not in said
        monkeypatch.setenv("KVMOSAIC_API_KEY", "admin-key-1,alpha-key-1")
        assert "refuses (409): chunks sleep in tiers, and there are none" in refused(
            "sleep", "--cold", "--url", server.url
        )
        assert kvmosaic("sleep", "--url", server.url).exit_code == 0
        assert kvmosaic("wake", "--url", server.url).exit_code == 0


def test_no_memory_to_wake_is_one_line(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise MemoryError

    kvmosaic("sleep", "--url", server.url)
    with monkeypatch.context() as broken:
        broken.setattr(server.llm.engine.runner, "wake", fail)
        said = refused("wake", "--url", server.url)
        assert "could not wake (MemoryError) and sleeps on (try again in " in said


def test_nothing_that_listens_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for command in ("sleep", "wake"):
        assert "nothing listens at" in refused(command, "--url", f"http://127.0.0.1:{port}")


def test_one_that_never_answers_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert "no answer from" in refused("sleep", "--url", url, "--timeout", "0.2")


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (404, b"", "has no /sleep: not a kvmosaic server, or an older one"),
        (501, b"<html>", "has no /sleep: not a kvmosaic server"),
        (200, b"", "answers, but not as a kvmosaic server does"),
        (200, b'{"is_sleeping": 1}', "answers, but not as a kvmosaic server does"),
        (200, b"[" * 100_000, "answers, but not as a kvmosaic server does"),
        (503, b"", "cannot do it now: it answers 503 and nothing else (try again later)"),
        (500, b'{"error": {"message": "a\\u001b[31m\\nb"}}', "refuses (500): a\N{REPLACEMENT CHARACTER}[31m b"),
    ],
)
def test_strangers_are_told_apart(status: int, body: bytes, told: str) -> None:
    with stranger(status, body) as (url, asked):
        assert told in refused("sleep", "--url", url + "/kv/")
    assert asked == ["/kv/sleep?level=1&mode=wait None"]


def test_a_key_is_not_sent_on_to_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_API_KEY", "admin-key-1")
    with stranger(200) as (other, asked), stranger(307, Location=other) as (url, first):
        monkeypatch.setenv("http_proxy", other)
        assert "sends to another address" in refused("wake", "--url", url)
    assert (first, asked) == (["/wake_up Bearer admin-key-1"], [])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--cold", "--level", "2"), "leave out --level and --refuse"),
        (("--cold", "--refuse"), "leave out --level and --refuse"),
        (("--min-accesses", "2"), "give --cold, too"),
        (("--url", "127.0.0.1:8000"), "is no address; give one such as http://127.0.0.1:8000"),
        (("--url", "file:///etc/hosts"), "is no address"),
        (("--url", "http://127.0.0.1:x"), "is no address"),
        (("--url", "http://127.0.0.1/?key=1"), "is no address"),
        (("--url", f"http://{'a' * 70}.test"), "cannot be asked"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: tuple[str, ...], told: str) -> None:
    assert told in refused("sleep", *options)


@pytest.mark.parametrize("option", ["--timeout", "--idle-seconds"])
@pytest.mark.parametrize("seconds", ["nan", "-1", "inf"])
def test_seconds_have_limits(option: str, seconds: str) -> None:
    assert kvmosaic("sleep", "--cold", option, seconds).exit_code == 2


def test_a_password_in_the_address_is_not_shown() -> None:
    assert "hidden" not in refused("wake", "--url", "http://me:hidden@127.0.0.1:x")
