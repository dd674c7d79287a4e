from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from support.server import RunningServer, send, wait_until

from kvmosaic.sampling import SamplingParams
from kvmosaic.server.tenants import current_tenant
from kvmosaic.web.errors import as_api_error
from kvmosaic.web.json_body import ParsedRoute
from kvmosaic.web.request_body import SMALL_BODY_BYTES

LIMIT = 2**17
ENDLESS = SamplingParams(max_tokens=1_500, ignore_eos=True, temperature=0.0)


class Numbers(BaseModel):
    """A body that remembers where it was validated."""

    numbers: list[int]
    thread: str = Field(default_factory=lambda: threading.current_thread().name)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that runs one sequence at a time, with small routes of its own."""
    with RunningServer(max_num_seqs=1, max_queue=2, max_body_bytes=LIMIT) as running:
        add_routes(running)
        yield running


def add_routes(server: RunningServer) -> None:
    async def echo(body: Annotated[Any, Body()]) -> Any:
        return {"got": body}

    async def fail() -> None:
        raise RuntimeError("the inside of the server")

    async def break_off() -> StreamingResponse:
        async def parts() -> Any:
            yield "a part"
            raise RuntimeError("the inside of the server")

        return StreamingResponse(parts())

    async def answer(request: Request, stream: bool = False, seconds: float = 0.0) -> Any:
        services, tenant = server.services, await current_tenant(request)
        prompt = await services.threads.run("one", services.llm.encoder.encode, "Once upon a time")
        deltas = services.runner.run(tenant, prompt, ENDLESS, route="/test/answer", request_id=request.state.request_id)
        if stream:
            return StreamingResponse(str(delta.num_prompt_tokens) async for delta in deltas)
        return [delta.num_prompt_tokens async for delta in deltas]

    async def count(body: Numbers) -> Any:
        return {"count": len(body.numbers), "validated in": body.thread}

    server.app.add_api_route("/test/echo", echo, methods=["POST"])
    counting = APIRouter(route_class=ParsedRoute)
    counting.add_api_route("/test/count", count, methods=["POST"])
    server.app.include_router(counting)
    server.app.add_api_route("/test/fail", fail)
    server.app.add_api_route("/test/break-off", break_off)
    server.app.add_api_route("/test/answer", answer, methods=["GET", "POST"])


def is_idle(server: RunningServer) -> bool:
    engine, admission = server.services.engine, server.services.admission
    return not (engine.num_running or engine.num_waiting or admission.num_under_way)


def held_blocks(server: RunningServer) -> int:
    """Blocks of the request pool that somebody holds."""
    return server.call(server.services.engine.call, lambda engine: sum(engine.kv_cache.request_pool.references))


@pytest.mark.parametrize("path", ["/test/answer", "/test/answer?stream=true"])
def test_client_that_leaves_ends_its_request(server: RunningServer, path: str) -> None:
    client = send(server, path)
    wait_until(lambda: server.services.engine.num_running == 1)
    client.close()
    wait_until(lambda: is_idle(server))
    record = server.records[-1]
    assert (record.status, record.route) == ("cancelled", "/test/answer")
    assert record.num_answer_tokens < ENDLESS.max_tokens


@pytest.mark.parametrize("path", ["/test/answer", "/test/answer?stream=true"])
def test_client_that_leaves_the_queue_ends_its_request(server: RunningServer, path: str) -> None:
    running = send(server, "/test/answer")
    wait_until(lambda: server.services.engine.num_running == 1)
    waiting = send(server, path)
    wait_until(lambda: server.services.engine.num_waiting == 1)
    assert server.services.admission.num_waiting == 1
    waiting.close()
    wait_until(lambda: server.services.engine.num_waiting == 0)
    wait_until(lambda: server.services.admission.num_under_way == 1)
    assert server.services.engine.num_running == 1
    running.close()
    wait_until(lambda: is_idle(server))


def test_queue_that_is_full_refuses_and_probes_are_answered_meanwhile(server: RunningServer) -> None:
    refused = server.services.admission.num_refused
    inside = [send(server, "/test/answer") for _ in range(3)]
    wait_until(lambda: server.services.admission.num_under_way == 3)
    for _ in range(5):
        reply = httpx.get(server.url + "/test/answer")
        assert reply.status_code == 429 and server.services.admission.num_under_way == 3
        assert reply.json()["error"]["code"] == "queue_full"
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert httpx.get(server.url + "/livez").status_code == 200
    assert server.services.admission.num_refused == refused + 5
    for client in inside:
        client.close()
    wait_until(lambda: is_idle(server))


def test_nothing_is_left_after_requests_that_were_left(server: RunningServer) -> None:
    tasks = server.call(lambda: len(asyncio.all_tasks()))
    for _ in range(3):
        for client in [send(server, "/test/answer"), send(server, "/test/answer?stream=true")]:
            client.close()
    wait_until(lambda: is_idle(server))
    wait_until(lambda: server.call(lambda: len(asyncio.all_tasks())) <= tasks)
    server.call(server.services.engine.call, lambda engine: engine.check_invariants())


def test_body_up_to_the_limit_is_read_and_one_more_byte_is_refused(server: RunningServer) -> None:
    text = json.dumps("x" * (LIMIT - 2)).encode()
    headers = {"Content-Type": "application/json"}
    assert httpx.post(server.url + "/test/echo", content=text, headers=headers).status_code == 200
    reply = httpx.post(server.url + "/test/echo", content=text + b" ", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_long_body_is_validated_beside_the_event_loop(server: RunningServer) -> None:
    numbers = [7] * (SMALL_BODY_BYTES // 2)
    reply = httpx.post(server.url + "/test/count", json={"numbers": numbers}).json()
    assert reply["count"] == len(numbers)
    assert reply["validated in"].startswith("kvmosaic-request")
    short = httpx.post(server.url + "/test/count", json={"numbers": [1, "x"]})
    long = httpx.post(server.url + "/test/count", json={"numbers": [*numbers, "x"]})
    assert short.status_code == long.status_code == 400
    assert short.json()["error"]["message"] == long.json()["error"]["message"].replace(str(len(numbers)), "1")


def test_length_that_a_header_claims_is_not_trusted(server: RunningServer) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(LIMIT // 2**10 + 1):
            yield b" " * 2**10

    reply = httpx.post(server.url + "/test/echo", content=parts(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413


def post_packed(server: RunningServer, content: bytes, how: str = "gzip", path: str = "/test/echo") -> httpx.Response:
    headers = {"Content-Type": "application/json", "Content-Encoding": how}
    return httpx.post(server.url + path, content=content, headers=headers)


@pytest.mark.parametrize("how", ["gzip", "X-GZip"])
def test_gzip_bodies_are_unpacked(server: RunningServer, how: str) -> None:
    for body in ([1], ["x" * (LIMIT - 100)]):
        assert post_packed(server, gzip.compress(json.dumps(body).encode()), how).json() == {"got": body}
    parts = gzip.compress(b"[1,", mtime=0) + gzip.compress(b"2]", mtime=0)
    assert post_packed(server, parts, how).json() == {"got": [1, 2]}
    assert post_packed(server, b"[1]", "identity").json() == {"got": [1]}


@pytest.mark.slow
def test_a_body_that_unpacks_to_too_much_is_refused_before_it_is_all_unpacked(server: RunningServer) -> None:
    bomb = gzip.compress(b" " * 2**24, mtime=0)
    assert len(bomb) < LIMIT
    tracemalloc.start()
    error = post_packed(server, bomb)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (error.status_code, error.json()["error"]["code"]) == (413, "body_too_large")
    assert "when it is unpacked" in error.text and most < 2**23
    assert httpx.post(server.url + "/test/echo", json=[1]).json() == {"got": [1]}


@pytest.mark.parametrize(
    "content", [b"[1]", gzip.compress(b"[1]", mtime=0)[:-6], gzip.compress(b"[1]", mtime=0) + b"x"]
)
def test_what_is_no_gzip_is_a_bad_request(server: RunningServer, content: bytes) -> None:
    reply = post_packed(server, content)
    assert reply.status_code == 400 and "the body is not gzip" in reply.json()["error"]["message"]


def test_other_encodings_and_packed_uploads_are_refused(server: RunningServer) -> None:
    error = post_packed(server, b"x", "br").json()["error"]
    assert error["code"] == "invalid_content_encoding"
    assert error["message"] == "the header Content-Encoding says 'br'; send gzip, or no compression"
    reply = post_packed(server, gzip.compress(b"{}", mtime=0), path="/v1/documents:batch")
    assert reply.status_code == 415 and "send no compression" in reply.text


def test_harmful_json_is_400_on_every_route(server: RunningServer) -> None:
    long = b"[" + b"1," * 20_000 + b"NaN]"  # checked in a thread
    for body in (b"[" * 1_000, b'{"a": NaN}', b'"\\ud800"', b'"\\u0000"', b"\xff", b"1" * 100, b" " * 2**16 + long):
        for path in ("/test/echo", "/test/answer"):
            reply = httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 400, (path, body[:20])
            assert reply.json()["error"]["code"] == "invalid_json"


def test_client_that_leaves_within_its_body_leaves_nothing(server: RunningServer) -> None:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(b"POST /test/echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n[1,")
    client.close()
    assert httpx.post(server.url + "/test/echo", json=[1]).json() == {"got": [1]}


def test_failure_inside_tells_the_id_and_nothing_else(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    reply = httpx.get(server.url + "/test/fail", headers={"X-Request-Id": "case-7"})
    assert reply.status_code == 500 and reply.headers["x-request-id"] == "case-7"
    assert reply.json()["error"] == {
        "message": "internal error (request case-7)",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "RuntimeError: the inside of the server" in caplog.text and "case-7" in caplog.text


def test_failure_in_the_middle_of_a_reply_closes_the_connection(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(server.url + "/test/break-off")
    assert "the inside of the server" in caplog.text
    assert "the inside" not in str(as_api_error(RuntimeError("the inside of the server")).body)


@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", "x" * 999],
)
def test_body_that_is_not_declared_as_json_is_told_how_to_be(server: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    reply = httpx.post(server.url + "/v1/completions", content=b'{"model": "reader", "prompt": "a"}', headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "invalid_content_type")
    assert "JSON" in error["message"] and "Content-Type: application/json" in error["message"]
    assert len(error["message"]) < 300


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
def test_json_by_any_of_its_names_is_read(server: RunningServer, kind: str) -> None:
    body = b'{"model": "reader", "prompt": "a", "max_tokens": 1}'
    reply = httpx.post(server.url + "/v1/completions", content=body, headers={"Content-Type": kind})
    assert reply.status_code == 200, reply.text
