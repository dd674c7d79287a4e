"""Documents in a folder: files of other versions, and what a file does not hold."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from kvmosaic.documents import DocumentDraft, DocumentStore, FolderDocuments

FIELDS = {
    "id": "ferry", "number": 5, "version": 3, "title": "The ferry", "created_at": 1.5, "updated_at": 2.5,
    "ttl_seconds": 60, "refresh_ttl_on_hit": True, "characters": 7, "num_bytes": 16, "metadata": {"k": "v"},
}  # fmt: skip
"""The first line of a file, as every version has written it."""


def file_of(folder: Path, document_id: str) -> Path:
    return folder / f"{hashlib.sha256(document_id.encode()).hexdigest()}.kvmosaic.json"


def open_store(folder: Path) -> DocumentStore:
    documents = FolderDocuments(folder)
    return DocumentStore(clock=lambda: 1_000.0, open_backend=lambda tenant: documents, has_labels=False)


def test_a_file_of_an_earlier_version_is_read_and_one_for_it_is_written(tmp_path: Path) -> None:
    store, file = open_store(tmp_path), file_of(tmp_path, "ferry")
    file.write_text(f"{json.dumps(FIELDS)}\n{json.dumps('It goes')}\n")
    os.utime(file, (990, 990))
    document = store.get("", "ferry")
    assert (document.content.text, document.content.title, document.num_characters) == ("It goes", "The ferry", 7)
    assert (document.version, document.expires_at, document.metadata) == (3, 1_050, {"k": "v"})
    store.put("", "ferry", DocumentDraft("It stays", ttl_seconds=60))
    head, text = file.read_text().splitlines()
    assert json.loads(head).keys() == FIELDS.keys() and json.loads(text) == "It stays"


@pytest.mark.parametrize("setting", [{"pinned": True}, {"priority": 0.9}])
def test_a_pin_and_a_priority_are_kept(tmp_path: Path, setting: dict[str, float]) -> None:
    open_store(tmp_path).create("", DocumentDraft("It goes", ttl_seconds=1, **setting), "ferry")  # type: ignore[arg-type]
    document = open_store(tmp_path).get("", "ferry")
    assert document.pinned == bool(setting.get("pinned")) and document.content.priority == setting.get("priority")
    assert (document.expires_at is None) == document.pinned


def test_files_of_two_folders_in_one_are_all_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for name in ("ferry", "mill"):
        file_of(tmp_path, name).write_text(f'{json.dumps({**FIELDS, "id": name, "ttl_seconds": None})}\n"text"\n')
    page = store.page("", limit=1, order="asc")
    assert [head.id for head in page.documents] == ["ferry"] and page.has_more
    assert [head.id for head in store.page("", after=page.next_after, order="asc").documents] == ["mill"]
    assert store.documents("")[0].content.text == ""
