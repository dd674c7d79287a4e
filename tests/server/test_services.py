"""Lifetimes do not follow the system's clock."""

from __future__ import annotations

import time

import pytest
from support.server import RunningServer

from kvmosaic.api.documents import NewDocument
from kvmosaic.documents.database import DocumentDatabase


def test_setting_the_clock_moves_no_lifetime(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = DocumentDatabase().clock
    assert abs(clock() - time.time()) < 5
    now = time.time()
    for jump in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        assert abs(clock() - now) < 60
    first = clock()
    assert clock() >= first


def test_documents_survive_a_jump_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningServer() as server:
        store = server.services.documents
        tenant = "default"
        draft = NewDocument(id="d", text="The ferry goes to Oak Island.", ttl_seconds=60).draft(store)
        store.create(tenant, draft, "d")
        later = time.time() + 86_400
        monkeypatch.setattr(time, "time", lambda: later)
        store.expire()
        assert store.get(tenant, "d")
