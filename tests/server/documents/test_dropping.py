"""Deleted, replaced and expired documents leave the cache, and only they do."""

from __future__ import annotations

import pytest
from server.documents.world import Client, DocumentServer, JumpingClock

from kvmosaic.server.documents.cached import sweep


@pytest.fixture
def clock(server: DocumentServer, monkeypatch: pytest.MonkeyPatch) -> JumpingClock:
    clock = JumpingClock()
    monkeypatch.setattr(server.services.documents, "_clock", clock)
    return clock


def test_deleting_drops_the_chunks_under_all_system_texts_and_salts(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x")
    alpha.ask({"id": "x"})
    alpha.ask({"id": "x"}, cache_salt="one")
    system = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    alpha.ask({"id": "x"}, messages=system)
    assert len(server.chunks()) == 3
    alpha.delete("/v1/documents/x")
    assert server.chunks() == []


def test_deleting_leaves_the_chunks_of_other_tenants(alpha: Client, beta: Client, server: DocumentServer) -> None:
    for client in (alpha, beta):
        client.store("x")
        client.ask({"id": "x"})
    alpha.delete("/v1/documents/x")
    assert not server.chunks("alpha") and len(server.chunks("beta")) == 1


def test_chunk_of_two_equal_documents_stays_until_both_are_deleted(alpha: Client, server: DocumentServer) -> None:
    for name in ("x", "y"):
        alpha.store(name, "The same text.")
        alpha.ask({"id": name})
    (chunk,) = server.chunks()
    assert len(chunk.names) == 2
    alpha.delete("/v1/documents/x")
    assert server.chunks() == [chunk]
    assert alpha.ask({"id": "y"})["kvmosaic"]["documents"][0]["action"] == "reused"
    assert len(alpha.get("/v1/documents/y").json()["chunks"]) == 1
    alpha.store("x", "Another text.")
    assert alpha.get("/v1/documents/x").json()["chunks"] == []
    alpha.delete("/v1/documents/y")
    assert server.chunks() == []


def test_text_that_a_prompt_brings_along_has_no_claim_on_a_chunk(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "The same text.")
    alpha.ask({"id": "x"})
    assert alpha.ask({"id": "other", "text": "The same text."})["kvmosaic"]["documents"][0]["action"] == "reused"
    alpha.delete("/v1/documents/x")
    assert server.chunks() == []


def test_document_of_a_prompt_with_the_same_id_is_not_touched(alpha: Client, server: DocumentServer) -> None:
    alpha.ask({"id": "x", "text": "A text of the prompt's own."})
    alpha.store("x", "A stored text.")
    assert alpha.get("/v1/documents/x").json()["chunks"] == []
    alpha.post("/v1/documents/x:pin")
    alpha.delete("/v1/documents/x")
    (chunk,) = server.chunks()
    assert not chunk.pinned and list(chunk.names) == ["x"]


def test_replacing_drops_the_old_chunks_but_not_for_the_same_text(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "one")
    alpha.ask({"id": "x"})
    (chunk,) = server.chunks()
    alpha.store("x", "one", metadata={"new": "pair"})
    assert server.chunks() == [chunk]
    assert alpha.ask({"id": "x"})["kvmosaic"]["documents"][0]["action"] == "reused"
    alpha.store("x", "two")
    assert server.chunks() == []
    assert alpha.ask({"id": "x"})["kvmosaic"]["documents"][0]["action"] == "computed"


def test_expired_document_is_not_found_and_the_sweep_drops_its_chunks(
    alpha: Client, server: DocumentServer, clock: JumpingClock
) -> None:
    alpha.store("x", "one", ttl_seconds=60)
    alpha.store("y", "two", ttl_seconds=60, refresh_ttl_on_hit=True)
    alpha.store("z", "three", ttl_seconds=None)
    for name in "xyz":
        alpha.ask({"id": name})
    clock.ahead += 50
    before = alpha.get("/v1/documents/y").json()["expires_at"]
    alpha.ask({"id": "y"})
    alpha.ask({"id": "x"})
    assert alpha.get("/v1/documents/y").json()["expires_at"] >= before + 50
    clock.ahead += 11
    assert alpha.get("/v1/documents/x").status_code == 404
    assert len(server.chunks()) == 3
    server.call(sweep, server.services)
    assert len(server.chunks()) == 2
    clock.ahead += 50
    server.call(sweep, server.services)
    assert [each["id"] for each in alpha.get("/v1/documents").json()["data"]] == ["z"]
    assert len(server.chunks()) == 1


def test_sweep_drops_what_a_request_from_before_computed_afterwards(
    alpha: Client, server: DocumentServer, clock: JumpingClock
) -> None:
    alpha.store("x", "one", pinned=True)
    old = server.services.documents.get("alpha", "x").content
    alpha.store("x", "two")
    prompt = server.llm.encoder.encode_documents([old])

    async def compute_old_text() -> None:
        from dataclasses import replace

        async for _, request in server.services.engine.warm([replace(prompt, tenant="alpha")]):
            assert request.error is None

    server.call(compute_old_text)
    (chunk,) = server.chunks()
    assert not chunk.pinned, "a replaced text is kept no longer"
    assert alpha.get("/v1/documents/x").json()["chunks"] == []
    server.call(sweep, server.services)
    assert server.chunks() == []
    clock.ahead += 601
    assert server.services.documents.in_grace_period() == []


def test_sweep_goes_on_with_what_could_not_be_dropped(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x")
    alpha.ask({"id": "x"})
    server.services.documents.delete("alpha", "x")
    engine = server.services.engine

    async def stopped(function: object) -> None:
        from kvmosaic.errors import EngineStopped

        raise EngineStopped("not now")

    engine.call, works = stopped, engine.call  # type: ignore[method-assign, assignment]
    try:
        server.call(sweep, server.services)
    finally:
        engine.call = works  # type: ignore[method-assign]
    assert len(server.chunks()) == 1
    server.call(sweep, server.services)
    assert server.chunks() == []


def test_sweeping_runs_by_itself_and_ends_with_the_server(server: DocumentServer, alpha: Client) -> None:
    import asyncio

    from kvmosaic.server.documents.cached import swept

    alpha.store("x")
    alpha.ask({"id": "x"})
    server.services.documents.delete("alpha", "x")

    async def live() -> None:
        async with swept(server.services, seconds=0.01):
            async with asyncio.timeout(10):
                while server.llm.engine.kv_cache.chunks():
                    await asyncio.sleep(0.01)
            assert any(task.get_name() == "document-sweep" for task in asyncio.all_tasks())
        assert not any(task.get_name() == "document-sweep" for task in asyncio.all_tasks())

    server.call(live)
