"""Documents on servers with other settings: long documents are split, nothing is cached, the engine has stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from server.documents.world import Client, DocumentServer

from kvmosaic.server.documents.cached import sweep


@pytest.fixture(scope="module")
def splitting() -> Iterator[DocumentServer]:
    with DocumentServer(long_chunks="split", max_model_len=256) as running:
        yield running


def client_of(server: DocumentServer) -> Client:
    return Client(base_url=server.url, timeout=60, trust_env=False)


def test_parts_of_a_split_document_are_described_pinned_and_dropped_together(splitting: DocumentServer) -> None:
    with client_of(splitting) as client:
        client.store("x", "one two three. " * 90)
        client.store("xy", "another text")
        client.ask({"id": "xy"})
        (done,) = client.post("/v1/documents/x:warm").json()["data"]
        parts = client.get("/v1/documents/x").json()["chunks"]
        assert [chunk["part"] for chunk in parts] == [f"{n}/{len(parts)}" for n in range(1, len(parts) + 1)]
        assert len(parts) == done["chunks"] > 1
        assert sum(chunk["tokens"] for chunk in parts) == done["tokens"]
        lines = client.ask({"id": "x"}, question="?")["kvmosaic"]["documents"]
        assert {line["action"] for line in lines} <= {"reused", "moved"}
        assert [line["name"] for line in lines] == [f"x ({n}/{len(parts)})" for n in range(1, len(parts) + 1)]
        assert {line["id"] for line in lines} == {"x"}
        client.post("/v1/documents/x:pin")
        client.post("/v1/documents/x:warm", json={"cache_salt": "later"})
        chunks = splitting.chunks("default")
        assert sum(chunk.pinned for chunk in chunks) == 2 * len(parts) == len(chunks) - 1
        client.post("/v1/documents/x:unpin")
        assert not any(chunk.pinned for chunk in splitting.chunks("default"))
        client.delete("/v1/documents/x")
        assert len(splitting.chunks("default")) == 1


def test_without_chunk_cache_documents_are_stored_and_read_but_not_warmed() -> None:
    with DocumentServer(enable_chunk_cache=False) as server, client_of(server) as client:
        client.store("x", "The mayor of Fenbury is Renna Velley.", pinned=True)
        answer = client.ask({"id": "x"}, question="Who is the mayor of Fenbury?", max_tokens=8)
        assert "Renna" in answer["choices"][0]["message"]["content"]
        for url, body in (("/v1/documents:warm", {}), ("/v1/documents/x:warm", {"stream": True})):
            reply = client.post(url, json=body)
            assert reply.status_code == 409 and reply.json()["error"]["code"] == "chunk_cache_off"
        assert client.get("/v1/documents/x").json()["chunks"] == []
        assert client.delete("/v1/documents/x").status_code == 200


def test_stopped_engine_gives_503_but_texts_can_still_be_replaced_and_deleted() -> None:
    with DocumentServer() as server, client_of(server) as client:
        client.store("x", "one")
        client.ask({"id": "x"})
        server.call(server.services.engine.close)
        assert client.get("/v1/documents/x").status_code == 503
        assert client.post("/v1/documents/x:warm").status_code == 503
        assert client.store("x", "two")["version"] == 2
        assert client.delete("/v1/documents/x").status_code == 200
        assert client.get("/v1/documents").json()["data"] == []


def test_client_that_goes_away_in_the_middle_of_a_change_leaves_it_to_the_sweep(splitting: DocumentServer) -> None:
    """The engine is held up while the client deletes, so that the deletion is cancelled between store and cache."""

    async def delete_and_go() -> None:
        import threading

        held = threading.Event()
        holding = asyncio.create_task(splitting.services.engine.call(lambda _: held.wait(300)))
        await asyncio.sleep(0.01)
        _, writer = await asyncio.open_connection("127.0.0.1", splitting.port)
        writer.write(b"DELETE /v1/documents/z HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        while splitting.services.documents.page("default", after=None).documents:
            await asyncio.sleep(0.001)
        writer.close()
        await asyncio.sleep(0.05)
        held.set()
        await holding

    with client_of(splitting) as client:
        for document_id in [each["id"] for each in client.get("/v1/documents").json()["data"]]:
            client.delete(f"/v1/documents/{document_id}")
        splitting.call(splitting.services.engine.call, lambda engine: engine.kv_cache.reset())
        client.store("z", "a text", pinned=True)
        client.ask({"id": "z"})
        splitting.call(delete_and_go)
        assert client.get("/v1/documents/z").status_code == 404
        splitting.call(sweep, splitting.services)
        assert splitting.chunks("default") == []
