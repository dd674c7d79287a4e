"""Stored documents of real vLLM servers: uploads, files and commands as with our own server, for every process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from support.vllm.serving import ForkedServer
from typer.testing import CliRunner, Result

from kvmosaic.cli import app

KEY = "sesame"
MIDDLEWARE = "kvmosaic.vllm.ComposedDocuments"
JSONL = {"Content-Type": "application/jsonl"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(model: Path, folder: Path, **variables: str) -> ForkedServer:
    arguments = (f"--middleware={MIDDLEWARE}", f"--api-key={KEY}")
    environment = {"KVMOSAIC_DOCUMENTS_DIR": str(folder), **variables}
    server = ForkedServer(model, *arguments, port=free_port(), environment=environment)
    server.http.headers["Authorization"] = f"Bearer {KEY}"
    return server


def store(server: ForkedServer, *documents: Any) -> dict[str, Any]:
    lines = b"\n".join(json.dumps(each).encode() for each in documents)
    reply = server.http.post("/v1/documents:batch", content=lines, headers=JSONL)
    assert reply.status_code == 200, reply.text
    summary: dict[str, Any] = reply.json()
    return summary


def ask(server: ForkedServer, *documents: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where does the ferry go?"}]
    body = {"messages": messages, "documents": documents, "max_tokens": 4, "repair": "none"}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    assert not answer["kvmosaic"]["bypass"], answer
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents")


@pytest.fixture(scope="module")
def server(vllm_model: Callable[[str], Path], folder: Path) -> Iterator[ForkedServer]:
    """A server that was restarted: one before it has stored a document, and replaced it."""
    before = start(vllm_model("llama"), folder)
    store(before, {"id": "kept", "title": "The ferry", "text": "It goes to the mill."})
    store(before, {"id": "kept", "title": "The ferry", "text": "It goes to Oak Island."})
    before.stop()
    server = start(vllm_model("llama"), folder)
    yield server
    server.stop()


@pytest.fixture
def kvmosaic(server: ForkedServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("KVMOSAIC_API_KEY", KEY)
    return lambda *arguments: CliRunner().invoke(app, ["documents", *arguments, "--server", server.url])


def test_a_restart_keeps_documents_and_their_versions(server: ForkedServer) -> None:
    assert server.http.get("/v1/documents/kept").json()["text"] == "It goes to Oak Island."
    assert server.http.get("/v1/documents/kept?version=1").json()["text"] == "It goes to the mill."
    ask(server, {"id": "kept"})


def test_an_uploaded_document_is_computed_once(server: ForkedServer) -> None:
    summary = store(server, {"id": "mill", "text": "The mill was built in 1907. " * 8}, {"id": "broken"})
    assert (summary["num_stored"], summary["num_refused"]) == (1, 1)
    mill = {"id": "mill"}
    prompts = [mill, "Another."], [mill, "A third."], ["A third.", mill], ["Another.", mill]
    said = [ask(server, *documents)["kvmosaic"]["documents"] for documents in prompts]
    actions = [each["action"] for documents in said for each in documents if each["id"] == "mill"]
    assert actions == ["computed", "reused", "computed", "moved"], "as the first document, and as a later one"
    warmed = server.http.post("/v1/documents/mill:warm", json={"system": "Answer."}).json()
    assert warmed["num_cached"] == 1, warmed


def gauge(server: ForkedServer, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"kvmosaic:{name}{{"))


def test_pins_of_stored_documents_reach_the_pool_of_the_engine(server: ForkedServer) -> None:
    store(server, {"id": "first", "text": "The first is pinned when it is stored. " * 4, "pinned": True})
    store(server, {"id": "second", "text": "The second is pinned when it is cached. " * 4, "priority": 0.9})
    ask(server, {"id": "first"}, {"id": "second"})
    ask(server, "Any other.")
    assert gauge(server, "pinned_documents") == 1
    assert server.http.post("/v1/documents/second:pin").json()["pinned"]
    ask(server, "Any other.")
    assert gauge(server, "pinned_documents") == 2 <= gauge(server, "pooled_documents")
    server.http.post("/v1/documents/first:unpin").raise_for_status()
    server.http.delete("/v1/documents/second").raise_for_status()
    ask(server, "Any other.")
    assert gauge(server, "pinned_documents") == 0
    assert server.http.get("/v1/documents/first").json()["priority"] == 0.5


def test_openais_client_stores_files(server: ForkedServer) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    made = client.files.create(file=("ferry.md", b"It goes to Oak Island."), purpose="user_data")
    ask(server, {"id": made.id})
    assert client.files.content(made.id).text == "It goes to Oak Island."
    assert [each.id for each in client.files.list()] == [made.id]
    assert client.files.delete(made.id).deleted


def test_what_the_model_cannot_read_is_refused_at_its_upload(server: ForkedServer) -> None:
    [result] = store(server, {"id": "long", "text": "The ferry goes to Oak Island. " * 1_000})["data"]
    assert result["status"] == "refused" and "1024" in result["error"]["message"], result


def test_a_document_that_fits_but_is_never_reused_is_not_called_warm(server: ForkedServer) -> None:
    """With padding to a whole block it is longer than the model."""
    text = "x " * 2_000
    while store(server, {"id": "tight", "text": text})["num_refused"]:
        text = text[:-10]
    reply = server.http.post("/v1/documents/tight:warm")
    assert reply.status_code == 400 and "padding" in reply.json()["error"]["message"], reply.text


def test_every_route_needs_the_key(server: ForkedServer) -> None:
    places = [("GET", "/v1/documents"), ("POST", "/v1/documents:batch"), ("POST", "/v1/files"), ("GET", "/v1/files")]
    places += [("PUT", "/v1/documents/x"), ("POST", "/v1/vector_stores"), ("POST", "/v1/documents:warm")]
    for method, path in places:
        assert httpx.request(method, server.url + path, content=b"{").status_code == 401, path
    assert server.http.post("/v1/vector_stores", json={}).status_code == 501


def test_commands_of_documents_work_as_with_our_own_server(
    kvmosaic: Callable[..., Result], server: ForkedServer, tmp_path: Path
) -> None:
    (tmp_path / "ferry.md").write_text("It goes to Oak Island.")
    added = kvmosaic("add", str(tmp_path / "ferry.md"))
    assert (added.exit_code, added.stdout) == (0, "1 stored\n"), added.output
    assert kvmosaic("show", "ferry.md").stdout == "It goes to Oak Island.\n"
    handbook = tmp_path / "handbook"
    handbook.mkdir()
    for name in ("a.md", "b.md"):
        (handbook / name).write_text(f"Page {name}.")
    sync = ("sync", str(handbook), "--prefix", "book/", "--delete", "--json")
    assert json.loads(kvmosaic(*sync).stdout)["stored"] == 2
    (handbook / "a.md").write_text("Changed.")
    (handbook / "b.md").unlink()
    counts = json.loads(kvmosaic(*sync).stdout)
    assert (counts["replaced"], counts["deleted"], counts["unchanged"]) == (1, 1, 0)
    listed = [json.loads(line)["id"] for line in kvmosaic("ls", "--json", "--search", "book").stdout.splitlines()]
    assert listed == ["book/a.md"]
    assert kvmosaic("show", "book/a.md", "--version", "1").stdout == "Page a.md.\n"
    assert kvmosaic("rm", "book/a.md", "ferry.md").exit_code == 0
    pinned = kvmosaic("add", str(handbook / "a.md"), "--pin")
    assert pinned.exit_code == 0, pinned.output
    assert server.http.get("/v1/documents/a.md").json()["pinned"]
    assert kvmosaic("rm", "a.md").exit_code == 0


def test_watched_folder_is_followed(server: ForkedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMOSAIC_API_KEY", KEY)
    (tmp_path / "a.md").write_text("First.")
    command = [sys.executable, "-m", "kvmosaic", "documents", "sync", str(tmp_path), "--watch"]
    watching = subprocess.Popen([*command, "--server", server.url])
    try:
        for text in ("First.", "Second."):
            (tmp_path / "a.md").write_text(text)
            for _ in range(600):
                read = server.http.get("/v1/documents/a.md").json()
                if read.get("text") == text:
                    break
                time.sleep(0.1)
            assert read["text"] == text
    finally:
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0


def test_an_edit_of_a_document_in_sections_computes_one_of_them(
    vllm_model: Callable[[str], Path], tmp_path: Path
) -> None:
    sections = [f"# Part {number}\n" + f"The ferry number {number} goes home. " * 3 for number in range(4)]
    variables = {"KVMOSAIC_LONG_CHUNKS": "sections", "KVMOSAIC_MAX_SECTION_TOKENS": "64"}
    server = start(vllm_model("llama"), tmp_path, **variables)
    try:
        store(server, {"id": "book", "text": "\n\n".join(sections)})
        first = ask(server, {"id": "book"})["kvmosaic"]["documents"]
        assert len(first) > 3 and {each["action"] for each in first} == {"computed"}
        sections[1] = sections[1].replace("goes", "went")
        store(server, {"id": "book", "text": "\n\n".join(sections)})
        second = ask(server, {"id": "book"})["kvmosaic"]["documents"]
        computed = [number for number, each in enumerate(second) if each["action"] == "computed"]
        assert len(second) == len(first) and len(computed) < len(second) / 2, second
        assert second[0]["action"] == "reused" and second[-1]["action"] == "moved", second
    finally:
        server.stop()


def test_two_servers_of_one_folder_share_their_documents(
    server: ForkedServer, vllm_model: Callable[[str], Path], folder: Path
) -> None:
    other = start(vllm_model("llama"), folder)
    try:
        store(server, {"id": "shared", "text": "First."})
        assert other.http.get("/v1/documents/shared").json()["text"] == "First."
        ask(other, {"id": "shared"})
        store(other, {"id": "shared", "text": "Second."})
        assert server.http.get("/v1/documents/shared").json()["version"] == 2
        other.http.delete("/v1/documents/shared").raise_for_status()
        asked = {"messages": [{"role": "user", "content": "?"}], "documents": [{"id": "shared"}]}
        assert server.http.post("/v1/chat/completions", json=asked).status_code == 404
    finally:
        other.stop()
