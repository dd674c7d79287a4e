"""Versions of stored documents: a request names one, and old ones leave when nothing reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from server.documents.world import Client, DocumentServer, JumpingClock
from support.server import ServeCommand, wait_until

from kvmosaic.server.documents.cached import sweep

OLD, NEW = "The mayor of Fenbury is Renna Velley.", "The mayor of Fenbury is Otto Bramble."
QUESTION = "Who is the mayor of Fenbury?"


@pytest.fixture
def server() -> Iterator[DocumentServer]:
    with DocumentServer() as running:
        yield running


@pytest.fixture
def client(server: DocumentServer) -> Iterator[Client]:
    with Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


def test_a_request_reads_the_version_it_names(client: Client, server: DocumentServer) -> None:
    client.store("x", OLD)
    client.ask({"id": "x"}, question=QUESTION)
    assert client.store("x", NEW)["version"] == 2
    answers = {
        version: client.ask(
            {"id": "x", "version": version} if version else {"id": "x"}, question=QUESTION, max_tokens=8
        )
        for version in (None, 1, 2)
    }
    content = {version: answer["choices"][0]["message"]["content"] for version, answer in answers.items()}
    assert "Renna" in content[1] and content[2] == content[None] != content[1]
    (line,) = answers[1]["kvmosaic"]["documents"]
    assert line["action"] == "reused" and line["id"] == "x", "the chunk of the replaced text is still cached"
    assert client.get("/v1/documents/x").json()["text"] == NEW
    old = client.get("/v1/documents/x", params={"version": 1}).json()
    assert (old["text"], old["version"]) == (OLD, 1)
    missing = client.post(
        "/v1/chat/completions",
        json={
            "model": "reader",
            "messages": [{"role": "user", "content": "?"}],
            "documents": [{"id": "x", "version": 3}],
        },
    )
    assert missing.status_code == 404 and "version 3" in missing.json()["error"]["message"]


def test_an_old_version_leaves_with_its_chunks_an_hour_after_its_last_use(
    client: Client, server: DocumentServer
) -> None:
    clock = JumpingClock()
    store = server.services.documents
    store._clock = store._wall = clock
    client.store("x", OLD)
    client.ask({"id": "x"})
    client.store("x", NEW)
    for _ in range(2):
        clock.ahead += 3_000
        server.call(sweep, server.services)
        client.ask({"id": "x", "version": 1})
    assert len(server.chunks("default")) == 1
    clock.ahead += 3_700
    server.call(sweep, server.services)
    assert server.chunks("default") == []
    assert client.get("/v1/documents/x", params={"version": 1}).status_code == 404
    assert client.get("/v1/documents/x").json()["text"] == NEW


def test_versions_that_can_be_read_are_listed(client: Client) -> None:
    client.store("docs%2Fa", OLD, title="Mayor")
    client.store("docs%2Fa", NEW)
    client.store("docs%2Fa", NEW, metadata={"checked": "yes"})  # no text of its own
    found = client.get("/v1/documents/docs%2Fa", params={"include_versions": True}).json()
    assert found["versions"] == [
        {"version": 3, "title": None, "bytes": len(NEW)},
        {"version": 1, "title": "Mayor", "bytes": len(OLD + "Mayor")},
    ]
    assert "versions" not in client.get("/v1/documents/docs%2Fa").json()


def test_documents_are_listed_by_their_ids(client: Client) -> None:
    for name in ("a", "b%2Fc", "d"):
        client.store(name, OLD)
    found = client.get("/v1/documents", params={"id": ["d", "b/c", "none"], "order": "asc"}).json()
    assert [one["id"] for one in found["data"]] == ["b/c", "d"]
    assert client.get("/v1/documents", params={"id": ["a"] * 1_001}).status_code == 400


def test_a_deleted_document_leaves_with_all_its_versions(client: Client, server: DocumentServer) -> None:
    for text in (OLD, NEW):
        client.store("x", text)
        client.ask({"id": "x"})
    assert len(server.chunks("default")) == 2
    client.delete("/v1/documents/x")
    assert server.chunks("default") == []


@pytest.mark.parametrize("name", ["docs/a.md", "my file.pdf", "日本語", "a?b#c&d=e%2F+", "-", "a:b", "x" * 256])
def test_any_text_is_an_id(client: Client, name: str) -> None:
    from urllib.parse import quote

    address = f"/v1/documents/{quote(name, safe='')}"
    assert client.put(address, json={"text": OLD, "pinned": True}).json()["id"] == name
    assert client.get(address).json()["text"] == OLD
    assert client.post(f"{address}:warm").json()["num_computed"] == 1
    assert client.post(f"{address}:unpin").json()["pinned"] is False
    (line,) = client.ask({"id": name})["kvmosaic"]["documents"]
    assert (line["id"], line["action"]) == (name, "reused")
    assert client.get("/v1/documents", params={"search": name[:3].upper()}).json()["data"][0]["id"] == name
    assert client.patch(address, json={"priority": 0.1}).json()["priority"] == 0.1
    assert client.delete(address).json()["id"] == name
    assert client.get(address).status_code == 404


def test_after_a_restart_with_a_disk_tier_known_documents_are_not_computed(tmp_path: Path) -> None:
    """The launched server, twice."""
    options = (
        "--documents-dir",
        str(tmp_path / "documents"),
        "--chunk-tier",
        f"file://{tmp_path / 'kv'}",
        "--chunk-loading=always",
        "--repair=none",
    )
    names = [f"d{number}" for number in range(8)]
    with served(*options) as client:
        for name in names:
            client.store(name, f"{name}: {OLD} {NEW} " * 3)
        client.post("/v1/documents/d0:pin")
        reply = client.ask(*({"id": name} for name in names))
        assert {line["action"] for line in reply["kvmosaic"]["documents"]} == {"computed"}
    with served(*options) as client:
        listed = client.get("/v1/documents").json()["data"]
        assert [each["id"] for each in listed] == names[::-1] and listed[-1]["pinned"] and listed[-1]["hits"] == 1
        report = client.ask(*({"id": name} for name in reversed(names)))["kvmosaic"]
        assert all(line["reused_tokens"] == line["tokens"] for line in report["documents"]), report
        missed = [line["kind"] for line in report["segments"] if line["reused_tokens"] < line["tokens"]]
        assert missed == ["system", "question"] or missed == ["question"], report


def test_stored_documents_are_computed_at_the_start_if_asked_for(tmp_path: Path) -> None:
    folder, system = ("--documents-dir", str(tmp_path)), "Answer from the documents."
    with served(*folder) as client:
        for number in range(3):
            client.store(f"d{number}", f"{number}: {OLD}")
    with served(*folder, "--warm-on-start", "--warm-system", system, "--repair=none") as client:
        listed = {"include_chunks": True}
        wait_until(lambda: all(each["chunks"] for each in client.get("/v1/documents", params=listed).json()["data"]))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
        reply = client.ask(*({"id": f"d{number}"} for number in range(3)), messages=messages)
        assert all(line["reused_tokens"] == line["tokens"] for line in reply["kvmosaic"]["documents"]), reply[
            "kvmosaic"
        ]


@contextmanager
def served(*options: str) -> Iterator[Client]:
    """A client of the launched server, which is asked to end afterwards."""
    with ServeCommand(*options) as command:
        with Client(base_url=command.until_ready().url, timeout=60, trust_env=False) as client:
            yield client
        command.stop()
        assert command.wait() == 0, command.log
