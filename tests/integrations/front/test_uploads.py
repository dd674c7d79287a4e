"""Uploads and files behind the middleware: the code of our own server, with vLLM's key, model and limits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from threading import Event
from typing import Any

import pytest
from support.asking import MESSAGES
from support.files import pdf_file
from support.vllm.front import KEY, App

from kvmosaic.extraction import extract_text
from kvmosaic.vllm.front import documents as routes
from kvmosaic.vllm.front.middleware import ComposedDocuments
from kvmosaic.vllm.front.settings import FrontSettings

CHAT = "/v1/chat/completions"
BATCH = "/v1/documents:batch"
JSONL = {"Content-Type": "application/jsonl"}
USER_DATA = {"purpose": "user_data"}
Message = dict[str, Any]


def lines_of(*documents: Any) -> bytes:
    return b"\n".join(json.dumps(document).encode() for document in documents)


def update_of(body: bytes) -> Any:
    return json.loads(body)["kv_transfer_params"]["kvmosaic"]["update"]


def test_lines_become_documents_that_chats_name(app: App, client: Any) -> None:
    body = lines_of({"id": "ferry", "text": "It goes to Oak Island."}, {"id": "pin", "text": "x", "pinned": True}, 3)
    summary = client.post(BATCH, content=body + b'\n{"text": "x", "id": "\\ud83d"}', headers=JSONL).json()
    assert [(each["line"], each["status"]) for each in summary["data"]] == [
        (1, "stored"),
        (2, "stored"),
        (3, "refused"),
        (4, "refused"),
    ]
    (update,) = (update_of(each) for each in app.bodies)
    assert update == {"pin [stored 2]": {"priority": 0.5, "pinned": True, "change": 2}}
    assert summary["object"] == "documents.uploaded" and summary["num_refused"] == 2
    again = client.post(BATCH, content=lines_of({"id": "ferry", "text": "It goes home."}), headers=JSONL).json()
    assert (again["num_replaced"], again["data"][0]["version"]) == (1, 2)
    asked = {"messages": MESSAGES, "documents": [{"id": "ferry"}]}
    assert client.post(CHAT, json=asked).status_code == 200
    assert len(app.bodies) == 2


def test_files_become_documents_and_the_store_has_its_limit(client: Any) -> None:
    files = [("file", (f"n{number}.md", b"# Mill\nIt is red.")) for number in range(5)]
    files += [("file", ("raw.bin", b"\xff\xfe")), ("file", ("report.pdf", pdf_file("The ferry goes at noon.")))]
    data = client.post(BATCH, files=files).json()["data"]
    assert [each["status"] for each in data] == ["stored"] * 5 + ["refused"] * 2
    assert "not UTF-8" in data[5]["error"]["message"] and data[6]["error"]["code"] == "document_store_full"
    assert client.get("/v1/documents/n0.md").json()["metadata"] == {"filename": "n0.md"}


def test_routes_that_vllm_has_are_its_own() -> None:
    app = App(paths=["/v1/files", "/v1/vector_stores/{name}"])
    client = app.client()
    assert client.post("/v1/files", json={"mine": 1}).json()["id"] == "cmpl-7"
    assert client.post("/v1/vector_stores/a", json={}).json()["id"] == "cmpl-7"
    assert client.post(BATCH, content=lines_of({"text": "x"}), headers=JSONL).json()["num_stored"] == 1


@pytest.mark.parametrize("how", ["put", "post", "line", "file"])
def test_a_text_that_no_prompt_holds_is_refused_when_it_is_stored(client: Any, how: str) -> None:
    text = "The ferry goes to Oak Island. " * 2_000
    if how == "put":
        reply = client.put("/v1/documents/long", json={"text": text})
    elif how == "post":
        reply = client.post("/v1/documents", json={"text": text})
    elif how == "file":
        reply = client.post("/v1/files", files={"file": ("a.md", text.encode())}, data=USER_DATA)
    else:
        [result] = client.post(BATCH, content=lines_of({"text": text}), headers=JSONL).json()["data"]
        assert result["status"] == "refused" and "4096" in result["error"]["message"]
        return
    assert reply.status_code == 400 and "4096" in reply.json()["error"]["message"], reply.text
    assert client.get("/v1/documents").json()["data"] == []


def test_a_split_document_must_fit_into_one_prompt_as_a_whole(app: App) -> None:
    client = app.client(long_chunks="split")
    words = "The ferry goes to Oak Island. "
    assert client.put("/v1/documents/half", json={"text": words * 90}).status_code == 201
    reply = client.put("/v1/documents/long", json={"text": words * 400})
    assert reply.status_code == 400 and "store it in parts" in reply.json()["error"]["message"], reply.text


def test_a_long_document_is_divided_into_sections(app: App) -> None:
    client = app.client(long_chunks="sections", max_section_tokens=100)
    sections = [f"# Part {number}\n" + f"The ferry number {number} goes home. " * 3 for number in range(4)]
    client.put("/v1/documents/book", json={"text": "\n\n".join(sections)})
    client.post(CHAT, json={"messages": MESSAGES, "documents": [{"id": "book"}, "Another."]})
    before = app.body["kv_transfer_params"]["kvmosaic"]
    num_parts = len(before["chunks"]) - 1
    assert num_parts > 3 and before["continues"] == [0] + [1] * (num_parts - 1) + [0]
    sections[1] = "# Part 1\nChanged."
    client.put("/v1/documents/book", json={"text": "\n\n".join(sections)})
    client.post(CHAT, json={"messages": MESSAGES, "documents": [{"id": "book"}, "Another."]})
    after = app.body["kv_transfer_params"]["kvmosaic"]
    assert after["chunks"][-2:] == before["chunks"][-2:] and after["chunks"] != before["chunks"]


def test_limits_of_bodies_have_their_message(app: App) -> None:
    client = app.client(max_body_bytes=1_024, max_documents_bytes=3_000)
    lines = lines_of({"id": "a", "text": "x" * 1_100}, {"id": "b", "text": "x"})
    data = client.post(BATCH, content=lines, headers=JSONL).json()["data"]
    assert [each["status"] for each in data] == ["refused", "stored"]
    assert "KVMOSAIC_MAX_BODY_BYTES" in data[0]["error"]["message"]
    refused = client.post("/v1/files", files={"file": ("a.md", b"x" * 1_100)}, data=USER_DATA)
    assert refused.status_code == 413 and "KVMOSAIC_MAX_BODY_BYTES" in refused.json()["error"]["message"]
    for path, headers in ((BATCH, JSONL), ("/v1/files", {"Content-Type": "multipart/form-data; boundary=x"})):
        reply = client.post(path, content=b"--x\r\n" + b"x" * 4_000, headers=headers)
        assert reply.status_code == 413 and "KVMOSAIC_MAX_DOCUMENTS_BYTES" in reply.json()["error"]["message"], path


class Exchange:
    """One request in the event loop of its test, whose client sends and hears as the test says."""

    def __init__(self, front: Any, method: str, path: str, kind: str = "application/json") -> None:
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self.heard: list[Message] = []
        scope = {
            **{"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""},
            "headers": [(b"authorization", KEY["Authorization"].encode()), (b"content-type", kind.encode())],
        }
        self.task = asyncio.create_task(front(scope, self._sent.get, self._hear))

    async def _hear(self, message: Message) -> None:
        self.heard.append(message)

    def send(self, body: bytes, *, more: bool = False) -> None:
        self._sent.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        self._sent.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        status: int = self.heard[0]["status"]
        return status


@pytest.fixture
def front(app: App) -> Any:
    app.app.add_middleware(ComposedDocuments, settings=FrontSettings.of())
    return app.app


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


def test_what_was_stored_stays_when_the_client_leaves_an_upload(front: Any) -> None:
    async def leaving() -> None:
        upload = Exchange(front, "POST", BATCH, JSONL["Content-Type"])
        upload.send(lines_of(*({"id": "a", "text": "x" * 2_000} for _ in range(600))) + b"\n", more=True)
        upload.leave()
        await upload.task
        assert upload.heard == []
        read = Exchange(front, "GET", "/v1/documents/a")
        await read.task
        assert read.status == 200

    in_loop(leaving)


def test_uploads_in_progress_are_bounded_and_end_when_nothing_comes(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmosaic.web.request_body.BODY_SECONDS", 0.5)

    async def crowding() -> None:
        slow = [Exchange(front, "POST", BATCH, JSONL["Content-Type"]) for _ in range(9)]
        await asyncio.wait([each.task for each in slow])
        assert sorted(each.status for each in slow) == [408] * 8 + [429]
        later = Exchange(front, "POST", BATCH, JSONL["Content-Type"])
        later.send(b'{"text": "x"}')
        await later.task
        assert later.status == 200

    in_loop(crowding)


def test_warming_ends_when_its_client_leaves(app: App, front: Any) -> None:
    begun, ended = [], []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["path"])
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(scope["path"])

    next(route for route in app.app.routes if route.path == "/v1/completions").app = endless  # type: ignore[attr-defined]

    async def leaving() -> None:
        warm = Exchange(front, "POST", "/v1/documents:warm")
        warm.send(json.dumps({"documents": ["One.", "Two.", "Three.", "Four.", "Five.", "Six."]}).encode())
        while len(begun) < 4:
            await asyncio.sleep(0.01)
        warm.leave()
        await warm.task
        assert warm.heard == [] and len(ended) == len(begun) == 4

    in_loop(leaving)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the limit may end any callback
def test_what_takes_too_much_processor_time_to_read_is_given_up(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmosaic.vllm.front.middleware.CPU_SECONDS", 0.05)
    documents = [{"text": f"The ferry number {number} goes. " * 40} for number in range(4_000)]
    reply = client.post(CHAT, json={"messages": MESSAGES, "documents": documents})
    assert (reply.status_code, reply.json()["error"]["code"]) == (422, "too_much_work"), reply.text
    assert client.post(CHAT, json={"messages": MESSAGES, "documents": ["x"]}).status_code == 200


@pytest.fixture
def slow_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Files are read only after this event."""
    may_go_on = Event()

    def waiting(content: bytes, name: str) -> str:
        assert may_go_on.wait(60)
        return extract_text(content, name)

    monkeypatch.setattr(routes, "extract_text", waiting)
    yield may_go_on
    may_go_on.set()


def test_prompts_do_not_wait_for_files_that_are_read(front: Any, slow_file: Event) -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.md"\r\n\r\ntext\r\n--x--\r\n'

    async def asking() -> None:
        uploads = [Exchange(front, "POST", BATCH, "multipart/form-data; boundary=x") for _ in range(4)]
        for each in uploads:
            each.send(form)
        chat = Exchange(front, "POST", CHAT)
        chat.send(json.dumps({"messages": MESSAGES, "documents": ["It goes to Oak Island."]}).encode())
        await chat.task
        assert chat.status == 200 and not any(each.heard for each in uploads)
        slow_file.set()
        await asyncio.wait([each.task for each in uploads])
        assert [each.status for each in uploads] == [200] * 4

    in_loop(asking)


def test_long_bodies_are_not_parsed_on_the_event_loop(front: Any) -> None:
    metadata = json.dumps({"text": "x", "metadata": {f"k{number}": "\\" * 40 for number in range(60_000)}}).encode()

    async def storing() -> None:
        before = time.thread_time(), time.process_time()
        put = Exchange(front, "PUT", "/v1/documents/a")
        put.send(metadata)
        await put.task
        on_loop, everywhere = time.thread_time() - before[0], time.process_time() - before[1]
        assert put.status == 400
        assert on_loop < everywhere / 2, (on_loop, everywhere)

    in_loop(storing)
