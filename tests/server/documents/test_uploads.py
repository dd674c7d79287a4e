"""Many documents at once, and documents that no request could read."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import socket
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
from server.documents.world import Client, DocumentServer
from support.server import RunningServer, ServeCommand, wait_until

from kvmosaic.web.uploads import LineBuffer

JSONL = {"Content-Type": "application/jsonl"}


def lines_of(*documents: Any) -> bytes:
    return b"\n".join(json.dumps(document).encode() for document in documents)


def upload(client: httpx.Client, content: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
    reply = client.post("/v1/documents:batch", content=content, headers=headers or JSONL)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_lines_become_documents_that_chats_read(alpha: Client) -> None:
    summary = upload(alpha, lines_of({"id": "one", "text": "The mayor is Renna Velley."}, {"text": "no id"}) + b"\n")
    assert (summary["num_stored"], summary["num_replaced"], summary["num_refused"]) == (2, 0, 0)
    assert [(each["line"], each["status"], each["version"]) for each in summary["data"]] == [
        (1, "stored", 1),
        (2, "stored", 1),
    ]
    assert summary["data"][1]["id"].startswith("doc-")
    assert alpha.ask({"id": "one"})["kvmosaic"]["documents"][0]["action"] == "computed"


def test_bad_line_is_refused_and_stops_no_other(alpha: Client) -> None:
    body = b'{"id": "a", "text": "one"}\n\n{"id": "b"}\nnot json\n{"id": "..", "text": "x"}\n{"id": "c", "text": "two"}'
    summary = upload(alpha, body)
    assert [(each["line"], each["id"], each["status"]) for each in summary["data"]] == [
        (1, "a", "stored"),
        (3, None, "refused"),
        (4, None, "refused"),
        (5, "..", "refused"),
        (6, "c", "stored"),
    ]
    told = [each["error"]["message"] for each in summary["data"] if each["error"]]
    assert "text" in told[0] and "JSON" in told[1] and "address" in told[2]
    assert [each["id"] for each in alpha.get("/v1/documents").json()["data"]] == ["c", "a"]


def test_id_that_is_taken_is_replaced_and_its_old_chunks_leave(alpha: Client, server: DocumentServer) -> None:
    alpha.store("town", "The mayor is Renna Velley.")
    alpha.ask({"id": "town"})
    assert len(server.chunks()) == 1
    summary = upload(alpha, lines_of({"id": "town", "text": "The mayor is Jonas Kelberg."}))
    assert summary["num_replaced"] == 1 and summary["data"][0]["version"] == 2
    assert not server.chunks()


def test_pinned_line_is_pinned(alpha: Client, server: DocumentServer) -> None:
    upload(alpha, lines_of({"id": "town", "text": "The mayor is Renna Velley.", "pinned": True, "priority": 0.9}))
    alpha.ask({"id": "town"})
    assert [chunk.pinned for chunk in server.chunks()] == [True]


def test_tenants_do_not_see_the_uploads_of_others(alpha: Client, beta: Client) -> None:
    upload(alpha, lines_of({"id": "mine", "text": "secret"}))
    assert beta.get("/v1/documents/mine").status_code == 404


def test_limit_of_documents_refuses_the_rest(alpha: Client) -> None:
    summary = upload(alpha, lines_of(*({"id": f"d{number}", "text": "word"} for number in range(53))))
    assert (summary["num_stored"], summary["num_refused"]) == (50, 3)
    assert summary["data"][-1]["error"]["code"] == "document_store_full"


def test_files_become_documents_under_their_names(alpha: Client) -> None:
    files = [
        ("file", ("notes/ferry.md", b"# Ferry\nIt leaves at noon.")),
        ("file", ("page.html", b"<h2>Mill</h2><p>It stands <b>still</b>.</p><script>bad()</script>")),
        ("file", ("raw.bin", b"\xff\xfe\x00")),
    ]
    reply = alpha.post("/v1/documents:batch", files=files)
    assert reply.status_code == 200, reply.text
    data = reply.json()["data"]
    assert [(each["file"], each["status"]) for each in data] == [
        ("notes/ferry.md", "stored"),
        ("page.html", "stored"),
        ("raw.bin", "refused"),
    ]
    stored = alpha.get("/v1/documents/page.html").json()
    assert stored["text"] == "## Mill\n\nIt stands **still**."
    assert stored["title"] == "page.html" and stored["metadata"] == {"filename": "page.html"}
    assert alpha.get("/v1/documents/notes%2Fferry.md").json()["title"] == "ferry.md"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"{}", "application/json"), (b"x", ""), (b"", "multipart/form-data; boundary=x"), (b"x", "multipart/form-data")],
)
def test_body_of_another_kind_gives_400(alpha: Client, content: bytes, kind: str) -> None:
    reply = alpha.post("/v1/documents:batch", content=content, headers={"Content-Type": kind})
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_damaged_form_is_refused_and_not_logged() -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\xc2bad\r\n\r\nx\r\n--x--'
    with ServeCommand() as command:
        kind = {"Content-Type": "multipart/form-data; boundary=x"}
        reply = httpx.post(command.until_ready().url + "/v1/documents:batch", content=body, headers=kind)
        assert reply.status_code == 400, reply.text
        command.stop()
        command.wait()
        assert "invalid character" not in command.log and "Traceback" not in command.log


# Starlette leaves the file of a form that has no end to the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_mutated_bodies_are_answered_without_a_fault(alpha: Client) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\none\r\n--x--\r\n'
    bodies = {
        "application/jsonl": b'{"id": "a", "text": "one", "ttl_seconds": 60}\n{"id": "b", "text": "\\u00e9"}\n',
        "multipart/form-data; boundary=x": form,
    }
    choose = Random(7)
    for number in range(300):
        kind, body = choose.choice(list(bodies.items()))
        mutated = bytearray(body)
        for _ in range(choose.randrange(1, 4)):
            place = choose.randrange(len(mutated))
            mutated[place : place + choose.randrange(3)] = choose.randbytes(choose.randrange(3))
        path = choose.choice(["/v1/documents:batch", "/v1/files"])
        reply = alpha.post(path, content=bytes(mutated), headers={"Content-Type": kind})
        assert reply.status_code < 500, (number, bytes(mutated), reply.text)


def test_upload_needs_the_key(server: RunningServer) -> None:
    assert httpx.post(server.url + "/v1/documents:batch", content=b"{}", headers=JSONL).status_code == 401


@pytest.fixture(scope="module")
def narrow() -> Iterator[RunningServer]:
    """A server whose bodies are short and whose store is small."""
    with RunningServer(max_body_bytes=4_096, max_documents_bytes=20_000, chunk_cache_size="2MiB") as running:
        yield running


@pytest.fixture
def client(narrow: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=narrow.url, timeout=60, trust_env=False) as asking:
        yield asking


def test_body_may_be_longer_than_that_of_other_routes_but_no_line(client: httpx.Client) -> None:
    lines = [{"id": f"d{number}", "text": "word " * 100} for number in range(20)]
    summary = upload(client, lines_of(*lines[:10], {"id": "long", "text": "x" * 5_000}, *lines[10:]))
    assert summary["num_stored"] == 20
    refused = summary["data"][10]
    assert refused["line"] == 11 and "--max-body-bytes" in refused["error"]["message"]


def test_body_longer_than_the_store_is_cut_off(client: httpx.Client) -> None:
    reply = client.post("/v1/documents:batch", content=b"\n" * 30_000, headers=JSONL)
    assert reply.status_code == 413 and "--max-documents-bytes" in reply.json()["error"]["message"]
    assert client.get("/readyz").status_code == 200


def test_document_whose_id_ends_like_an_upload_is_no_upload(client: httpx.Client) -> None:
    reply = client.put("/v1/documents/my/v1/files", json={"text": "x" * 5_000})
    assert reply.status_code == 413 and "--max-body-bytes" in reply.json()["error"]["message"]


def test_tenant_has_as_many_uploads_as_leave_room_for_others(narrow: RunningServer) -> None:
    head = b"POST /v1/documents:batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/jsonl\r\n"
    open_ones = []
    try:
        for _ in range(4):
            connection = socket.create_connection(("127.0.0.1", narrow.port))
            connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
            open_ones.append(connection)

        def is_full() -> bool:
            reply = httpx.post(narrow.url + "/v1/documents:batch", content=b"", headers=JSONL, trust_env=False)
            return reply.status_code == 429 and reply.json()["error"]["code"] == "uploads_full"

        wait_until(is_full)
    finally:
        for connection in open_ones:
            connection.close()
    wait_until(lambda: not is_full())


def test_disconnected_client_leaves_what_was_stored(narrow: RunningServer, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", narrow.port)) as connection:
        connection.sendall(b"POST /v1/documents:batch HTTP/1.1\r\nHost: localhost\r\n")
        connection.sendall(b"Content-Type: application/jsonl\r\nContent-Length: 1000\r\n\r\n{")
    wait_until(lambda: upload(client, b"")["num_stored"] == 0)


def test_many_short_lines_do_not_hold_up_the_event_loop(alpha: Client, server: DocumentServer) -> None:
    longest, is_done = 0.0, False

    async def watch() -> None:
        nonlocal longest
        while not is_done:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)

    watching = asyncio.run_coroutine_threadsafe(watch(), server.loop)
    gc.disable()  # it looks at the whole heap of the tests, on any thread
    try:
        assert upload(alpha, b"x\n" * 49_000)["num_refused"] == 49_000
    finally:
        is_done = True
        watching.result(60)
        gc.enable()
    assert longest < 0.15  # seconds of processor time


def test_byte_order_mark_before_the_first_line_is_skipped(alpha: Client) -> None:
    body = b"\xef\xbb\xbf" + lines_of({"id": "a", "text": "one"}, {"id": "b", "text": "two"})
    assert upload(alpha, body.replace(b"\n", b"\r\n"))["num_stored"] == 2


def test_later_line_of_an_id_counts(alpha: Client) -> None:
    lines = [{"id": f"d{number % 3}", "text": f"text {number}"} for number in range(30)]
    assert upload(alpha, lines_of(*lines, {"id": "..", "text": "x"}, {"id": "d0", "text": ""}))["num_refused"] == 2
    assert [alpha.get(f"/v1/documents/d{index}").json()["text"] for index in range(3)] == [
        "text 27",
        "text 28",
        "text 29",
    ]


def test_file_whose_name_holds_a_nul_is_refused_alone(alpha: Client) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="%s.txt"\r\n\r\none\r\n'
    body = part % b"a\0b" + part % b"good" + b"--x--\r\n"
    summary = upload(alpha, body, {"Content-Type": "multipart/form-data; boundary=x"})
    assert [each["status"] for each in summary["data"]] == ["refused", "stored"]
    assert "NUL" in summary["data"][0]["error"]["message"]


@pytest.mark.parametrize("method", ["put", "post", "batch"])
def test_document_that_no_prompt_can_hold_is_refused_at_upload(alpha: Client, method: str) -> None:
    body = {"text": "word " * 5_000}
    if method == "batch":
        error = upload(alpha, lines_of({"id": "long", **body}))["data"][0]["error"]
    else:
        reply = (
            alpha.put("/v1/documents/long", json=body) if method == "put" else alpha.post("/v1/documents", json=body)
        )
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "tokens" in error["message"] and "--long-chunks split" in error["message"]
    assert alpha.get("/v1/documents/long").status_code == 404


def test_document_larger_than_the_cache_is_refused_at_upload(client: httpx.Client) -> None:
    error = upload(client, lines_of({"text": "word " * 700}))["data"][0]["error"]
    assert error["code"] == "chunk_cache_full" and "--chunk-cache-size" in error["message"]


def test_server_that_splits_documents_takes_long_ones() -> None:
    with RunningServer(long_chunks="split", chunk_cache_size="128MiB") as running:
        reply = httpx.put(running.url + "/v1/documents/long", json={"text": "word " * 5_000}, timeout=60)
        assert reply.status_code == 201, reply.text


def test_lines_are_cut_at_any_piece() -> None:
    body = b'{"a": 1}\r\n\n' + b"x" * 20 + b"\nlast"
    for size in (1, 3, 7, 100):
        buffer = LineBuffer(10)
        for start in range(0, len(body), size):
            buffer.feed(body[start : start + size])
        buffer.finish()
        assert buffer.take() == [(1, b'{"a": 1}'), (3, None), (4, b"last")]


def test_ten_thousand_documents_take_little_time_and_compute_nothing() -> None:
    text = "The ferry leaves at noon and comes back before the evening. " * 34
    lines = lines_of(*({"id": f"ferry/{number}", "text": f"{number} {text}"[:2_000]} for number in range(10_000)))
    with RunningServer() as running, httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
        before = time.process_time()
        summary = upload(client, io.BytesIO(lines))
        spent = time.process_time() - before
        assert summary["num_stored"] == 10_000 and spent < 60
        assert client.get("/v1/documents?limit=1").json()["data"][0]["id"] == "ferry/9999"
        assert running.call(running.services.engine.call, lambda engine: engine.kv_cache.chunk_pool.num_used) == 0
