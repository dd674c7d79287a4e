"""A database of documents that is locked: what needs none of it is answered, and the event loop goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from server.documents.world import Client
from support.server import RunningServer, wait_until

from kvmosaic.documents.database import FILE_NAME
from kvmosaic.errors import DocumentStoreUnavailable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("kvmosaic.documents.database.SHORT_SECONDS", 0.2)
    return tmp_path


@pytest.fixture
def client(folder: Path) -> Iterator[Client]:
    with (
        RunningServer(documents_dir=str(folder)) as server,
        Client(base_url=server.url, timeout=60, trust_env=False) as asking,
    ):
        yield asking


def test_locked_database_delays_neither_metrics_nor_chats(client: Client, folder: Path) -> None:
    client.store("town", refresh_ttl_on_hit=True, ttl_seconds=1_000)
    client.store("brief", "It expires soon.", ttl_seconds=1)
    assert "kvmosaic:documents{" in client.get("/metrics").text
    wait_until(lambda: client.get("/v1/documents/brief").status_code == 404)
    with closing(sqlite3.connect(folder / FILE_NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert client.get("/metrics").status_code == 200  # what has expired cannot be deleted now
        client.ask({"id": "town"})
        client.ask("town")
        other.rollback()
    assert client.get("/v1/documents/town").json()["hits"] == 1


def test_database_that_does_not_answer_fails_what_needs_it_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.store("town")

    def fail(*given: object) -> None:
        raise DocumentStoreUnavailable("the stored documents cannot be read or written now")

    monkeypatch.setattr("kvmosaic.documents.database.DocumentDatabase.read", fail)
    assert client.get("/metrics").status_code == 200
    client.ask("The mayor is Renna Velley.")
    reply = client.get("/v1/documents/town")
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "document_store_unavailable"
    with httpx.stream("GET", client.base_url.join("/dashboard/events"), trust_env=False) as events:
        assert next(events.iter_lines()) == "event: state"
