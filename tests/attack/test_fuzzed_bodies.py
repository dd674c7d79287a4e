"""Bodies that are almost right, thousands of them: nothing fails inside, nothing hangs, and the server goes on.

Runs for about 20 seconds of CPU time, or for KVMOSAIC_FUZZ=1000000 bodies from seed KVMOSAIC_FUZZ_SEED. A failure
prints the seed, the number and the body; the same seed gives the same bodies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from support.fuzz import SEEDS, Case, Fuzzer
from support.server import RunningServer
from support.target import slowness

from kvmosaic.lab.bench.measurement import resident_bytes

COUNT = int(os.environ.get("KVMOSAIC_FUZZ", "0"))
SEED = int(os.environ.get("KVMOSAIC_FUZZ_SEED", "1"))
CPU_SECONDS = 20.0
"""Without a count, bodies are sent for so long."""
CASE_CPU_SECONDS = 3.0
CASE_SECONDS = 120.0
LOOK_EVERY = 500
GROWTH_BYTES = 96 * 2**20
KEYS = {"hostile": "hostile-key", "honest": "honest-key"}
RIGHT = {
    "messages": [{"role": "user", "content": "Where does the ferry go?"}],
    "documents": [{"text": "The ferry goes to Oak Island."}],
    "temperature": 0,
    "max_tokens": 8,
}


@dataclass
class Reply:
    """What the app sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(
        "".join(f"- {{key: {key}, tenant: {name}, quota: 8MiB, admin: true}}\n" for name, key in KEYS.items())
    )
    small = {"max_model_len": 256, "max_num_seqs": 8, "max_documents": 40, "max_documents_bytes": 200_000}
    with RunningServer(keys_file=keys, chunk_tier=("host:8MiB",), **small) as running:
        yield running


def ask(server: RunningServer, case: Case, tenant: str = "hostile") -> Reply:
    """Sends a case straight to the app, on the event loop that it was built for."""
    reply: Reply = server.call(answered, server.app, case, tenant)
    return reply


async def answered(app: Any, case: Case, tenant: str) -> Reply:
    """One request as uvicorn would bring it; nobody leaves before the end of the reply."""
    path, _, query = case.path.partition("?")
    reply, unread, ended = Reply(), [case.body], asyncio.Event()

    async def receive() -> dict[str, Any]:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            return
        reply.body += message.get("body", b"")
        reply.is_whole = not message.get("more_body", False)

    named = {"Host": "127.0.0.1", "Authorization": f"Bearer {KEYS[tenant]}", **case.headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": case.method,
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    async with asyncio.timeout(CASE_SECONDS):
        await app(scope, receive, send)
    ended.set()
    return reply


def fault_of(reply: Reply) -> str | None:
    """What is wrong with a reply, whatever was asked."""
    if not reply.is_whole:
        return "the reply has no end"
    if reply.status >= 500:
        return f"status {reply.status}"
    if not reply.headers.get("x-request-id"):
        return "no X-Request-Id"
    if "text/event-stream" in reply.headers.get("content-type", ""):
        has_failed = any(said in spaced(reply.body) for said in (b'"code": "internal_error"', b'"type": "api_error"'))
        return "an internal error in a stream" if has_failed else None
    if reply.status in (204, 304) or not reply.body:
        return None
    read = json.loads(reply.body)
    is_of_messages = read.get("type") == "error" and set(read) == {"type", "error", "request_id"}
    expected = {"message", "type"} if is_of_messages else {"message", "type", "param", "code"}
    if reply.status >= 400 and set(read["error"]) != expected:
        return "an error of another shape"
    return "an internal error inside" if "internal_error" in str(read.get("data", "")) else None


def spaced(body: bytes) -> bytes:
    return body.replace(b'"code":"', b'"code": "').replace(b'"type":"', b'"type": "')


class Errors(logging.Handler):
    """Whatever the server logs as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(logging.Formatter().format(record))


@contextmanager
def logged_errors() -> Iterator[list[str]]:
    handler, logger = Errors(), logging.getLogger("kvmosaic")
    logger.addHandler(handler)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)


def right_answer(server: RunningServer) -> str:
    body = json.dumps(RIGHT).encode()
    reply = ask(server, Case("POST", "/v1/chat/completions", body), "honest")
    assert reply.status == 200, reply.body
    return str(json.loads(reply.body)["choices"][0]["message"]["content"])


def told(seed: int, number: int, case: Case, what: str) -> str:
    """A failure that can be repeated."""
    return (
        f"{what}\nKVMOSAIC_FUZZ_SEED={seed}, number {number}: {case.method} {case.path} {case.headers}\n{case.body!r}"
    )


def test_no_body_fails_inside_or_hangs(server: RunningServer) -> None:
    fuzzer = Fuzzer(Random(SEED), SEEDS, server.app.openapi())
    ask(server, Case("PUT", "/v1/documents/kept", json.dumps({"text": "It rains.", "ttl_seconds": None}).encode()))
    expected, statuses, memory = right_answer(server), Counter[str](), list[int]()
    limit, number, end = CASE_CPU_SECONDS * slowness(), 0, time.process_time() + CPU_SECONDS
    with logged_errors() as errors:
        while number < COUNT or (not COUNT and time.process_time() < end):
            case = fuzzer.case()
            begin = time.process_time()
            try:
                reply = ask(server, case)
            except Exception as failure:
                raise AssertionError(told(SEED, number, case, f"the app raised {failure!r}")) from failure
            used = time.process_time() - begin
            try:
                fault = fault_of(reply)
            except (ValueError, KeyError, TypeError, AttributeError) as failure:
                fault = f"a reply that is no error and no JSON: {failure!r}, {reply.body[:500]!r}"
            assert fault is None, told(SEED, number, case, f"{fault}: {reply.body[:500]!r} {errors}")
            assert not errors, told(SEED, number, case, errors[0])
            assert used < limit, told(SEED, number, case, f"{used:.1f} s of CPU time")
            statuses[f"{reply.status}"] += 1
            number += 1
            if number % LOOK_EVERY == 0:
                assert right_answer(server) == expected, told(SEED, number, case, "another answer after this")
                memory.append(resident_bytes(os.getpid()) or 0)
    shown = [size // 2**20 for size in memory[:: len(memory) // 20 + 1]]
    print(f"{number} bodies, seed {SEED}: {dict(statuses)}, {shown} MiB")
    assert right_answer(server) == expected
    assert statuses["200"] > number // 20, "hardly anything was let in; the seeds are not valid any more"
    check_nothing_runs(server)
    if len(memory) > 2:
        assert memory[-1] - memory[len(memory) // 2] < GROWTH_BYTES, f"memory grew: {memory}"


def check_nothing_runs(server: RunningServer) -> None:
    """Every request has left, and gave back what it held."""
    engine = server.services.engine
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    server.call(engine.call, lambda inner: inner.check_invariants())


def test_seeds_are_valid_and_cover_every_route_with_a_body(server: RunningServer) -> None:
    api = server.app.openapi()
    with_body = {
        (method.upper(), path)
        for path, operations in api["paths"].items()
        for method, operation in operations.items()
        if "application/json" in operation.get("requestBody", {}).get("content", {})
    }
    assert with_body <= {(seed.method, seed.route or seed.path) for seed in SEEDS}
    for stored in json.loads(ask(server, Case("GET", "/v1/documents?limit=100", b"")).body)["data"]:
        ask(server, Case("DELETE", f"/v1/documents/{stored['id']}", b"", {}))
    ask(server, Case("PUT", "/v1/documents/kept", b'{"text": "It rains."}'))
    for name in ("ferry", "mill"):
        ask(server, Case("PUT", f"/v1/documents/{name}", b'{"text": "The ferry goes."}'))
    for seed in SEEDS:
        if seed.path == "/v1/documents":
            ask(server, Case("DELETE", "/v1/documents/ferry", b"", {}))
        reply = ask(server, Case(seed.method, seed.path, json.dumps(seed.value).encode()))
        assert reply.status in (200, 201), (seed, reply.body)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bodies(server: RunningServer) -> None:
    api = server.app.openapi()
    one, other = Fuzzer(Random(7), SEEDS, api), Fuzzer(Random(7), SEEDS, api)
    assert [one.case() for _ in range(300)] == [other.case() for _ in range(300)]


def test_a_body_that_fails_inside_would_be_seen() -> None:
    head = {"x-request-id": "1", "content-type": "application/json"}
    inside = {"error": {"message": "x", "type": "server_error", "param": None, "code": "internal_error"}}
    assert fault_of(Reply(500, head, json.dumps(inside).encode(), True)) == "status 500"
    stream = {**head, "content-type": "text/event-stream"}
    assert fault_of(Reply(200, stream, b"data: " + json.dumps(inside).encode() + b"\n\n", True))
    assert fault_of(Reply(200, head, b"{}", False)) == "the reply has no end"
