"""Stored documents: in memory and in a shared folder the same, and safe in both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmosaic.api.documents import NewDocument
from kvmosaic.api.errors import ApiError, read_body
from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.config import StoreConfig
from kvmosaic.documents import DocumentDraft, DocumentStore, Match, StoredDocument
from kvmosaic.errors import (
    DocumentChanged,
    DocumentExists,
    DocumentStoreFull,
    DocumentTooLarge,
    InvalidConfig,
    InvalidDocument,
    UnknownDocument,
)
from kvmosaic.prompt import Document
from kvmosaic.vllm.front.documents import open_documents
from kvmosaic.vllm.front.pool_updates import api_error


class Documents:
    """The stored documents of the plugin."""

    def __init__(self, settings: StoreConfig, clock: Callable[[], float] = time.time) -> None:
        self.store = open_documents(settings, clock)

    def create(self, draft: DocumentDraft, name: str | None = None) -> StoredDocument:
        return self.store.create(DEFAULT_TENANT, draft, name)

    def put(self, name: str, draft: DocumentDraft, if_match: str | None = None) -> tuple[StoredDocument, bool]:
        return self.store.put(DEFAULT_TENANT, name, draft, None if if_match is None else Match.from_header(if_match))

    def get(self, name: str) -> StoredDocument:
        return self.store.get(DEFAULT_TENANT, name)

    def resolve(self, name: str) -> Document:
        return self.store.resolve(DEFAULT_TENANT, [(name, None)])[0]

    def delete(self, name: str, if_match: str | None = None) -> None:
        self.store.delete(DEFAULT_TENANT, name, None if if_match is None else Match.from_header(if_match))

    def all(self) -> list[StoredDocument]:
        return self.store.documents(DEFAULT_TENANT)


Make = Callable[..., Documents]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "folder"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    clock = Clock()

    def made(**limits: Any) -> Documents:
        folder = "none" if request.param == "memory" else str(tmp_path / "docs")
        handles = Documents(StoreConfig(documents_dir=folder, **limits), clock)
        handles.test_clock = clock  # type: ignore[attr-defined]
        return handles

    return made


def draft(text: str = "A text.", **fields: Any) -> DocumentDraft:
    new = read_body(NewDocument, {"text": text, "ttl_seconds": 60, **fields})
    return new.draft(DocumentStore())


def test_a_document_is_stored_read_replaced_and_deleted(make: Make) -> None:
    handles = make()
    first, is_new = handles.put("a", draft(" One. ", title="T", metadata={"k": "v"}))
    assert is_new and first.version == 1
    assert (first.content.text, first.content.title, first.metadata) == ("One.", "T", {"k": "v"})
    assert handles.get("a") == first
    second, is_new = handles.put("a", draft("Two. ☃"))
    assert not is_new and (second.version, second.number, second.num_bytes) == (2, first.number, 8)
    document = handles.resolve("a")
    assert (document.text, document.title, document.id) == ("Two. ☃", None, "a")
    assert handles.get("a").hits == 1
    handles.delete("a")
    for call in (handles.get, handles.resolve, handles.delete):
        with pytest.raises(UnknownDocument, match="store it again"):
            call("a")


def test_an_id_is_made_and_never_taken_twice(make: Make) -> None:
    handles = make()
    made = handles.create(draft())
    assert made.id.startswith("doc-")
    with pytest.raises(DocumentExists, match="replace it with PUT"):
        handles.create(draft(), made.id)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/../b", " a", "x" * 257, "a:warm", "a\n"])
def test_an_id_is_no_path(make: Make, name: str) -> None:
    handles = make()
    with pytest.raises(InvalidDocument):
        handles.put(name, draft())
    with pytest.raises(UnknownDocument):
        handles.get(name)


def test_a_document_lives_as_long_as_it_was_told(make: Make) -> None:
    handles = make()
    clock: Clock = handles.test_clock  # type: ignore[attr-defined]
    handles.put("short", draft())
    handles.put("read", draft(refresh_ttl_on_hit=True))
    handles.put("ever", draft(ttl_seconds=None))
    clock.now += 59
    handles.resolve("read")
    handles.resolve("short")
    clock.now += 2
    assert {each.id for each in handles.all()} == {"read", "ever"}
    with pytest.raises(UnknownDocument):
        handles.resolve("short")
    assert handles.create(draft(), "short").version == 2


def test_two_writers_do_not_overwrite_each_other(make: Make) -> None:
    handles = make()
    handles.put("a", draft())
    with pytest.raises(DocumentChanged, match="version 1"):
        handles.put("a", draft("new"), '"2"')
    handles.put("a", draft("new"), '"7", "1"')
    with pytest.raises(DocumentChanged):
        handles.delete("a", '"1"')
    with pytest.raises(DocumentChanged, match="is not stored"):
        handles.put("b", draft(), "*")
    handles.delete("a", "*")


def test_no_more_is_stored_than_allowed(make: Make) -> None:
    handles = make(max_documents=2, max_documents_bytes=20)
    handles.put("a", draft("x" * 10))
    with pytest.raises(DocumentTooLarge, match="may store 20 in all"):
        handles.put("b", draft("x" * 21))
    with pytest.raises(DocumentStoreFull, match="limit is 20"):
        handles.put("b", draft("x" * 11))
    handles.put("a", draft("x" * 20))
    handles.put("a", draft("x"))
    handles.put("b", draft("x"))
    with pytest.raises(DocumentStoreFull, match="2 documents"):
        handles.put("c", draft("x"))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": ""},
        {"text": 3},
        {"title": 3},
        {"ttl_seconds": 0},
        {"ttl_seconds": True},
        {"ttl_seconds": 10**9},
        {"refresh_ttl_on_hit": 1},
        {"metadata": [1]},
        {"metadata": {"a": 1}},
        {"metadata": {"": "x"}},
        {"metadata": {str(number): "x" for number in range(17)}},
        {"metadata": {"a": "\ud800"}},
        {"pinned": "yes"},
        {"priority": 1.3},
        {"txt": "x"},
    ],
)
def test_a_document_that_cannot_be_stored_says_why(fields: dict[str, Any]) -> None:
    with pytest.raises((ApiError, InvalidDocument)) as found:
        draft(**fields)
    assert api_error(found.value).status == 400


def test_servers_that_share_a_folder_see_the_same(tmp_path: Path) -> None:
    one, other = (Documents(StoreConfig(documents_dir=str(tmp_path / "docs"))) for _ in range(2))
    one.put("a", draft())
    assert other.get("a").version == 1
    other.put("a", draft("new"))
    assert one.get("a").content.text == "new"
    with pytest.raises(DocumentExists):
        other.create(draft(), "a")


def test_writers_at_once_leave_whole_documents_and_all_versions(tmp_path: Path) -> None:
    servers = [Documents(StoreConfig(documents_dir=str(tmp_path / "docs"))) for _ in range(4)]

    def write(handles: Documents, letter: str) -> None:
        for _ in range(10):
            handles.put("a", draft(letter * 1_000))
            assert set(handles.get("a").content.text) <= {"w", "x", "y", "z"}
            assert len(set(handles.get("a").content.text)) == 1

    threads = [
        threading.Thread(target=write, args=(server, letter)) for server, letter in zip(servers, "wxyz", strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert servers[0].get("a").version == 40


def test_a_place_that_cannot_be_written_to_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidConfig, match="KVMOSAIC_DOCUMENTS_DIR"):
        Documents(StoreConfig(documents_dir=str(tmp_path / "file")))
