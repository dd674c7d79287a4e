"""Pinned documents stay in the cache wherever they are computed, and do not expire."""

from __future__ import annotations

from server.documents.world import Client, DocumentServer


def test_pin_holds_for_chunks_there_and_for_chunks_computed_later(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", ttl_seconds=60)
    alpha.ask({"id": "x"})
    pinned = alpha.post("/v1/documents/x:pin").json()
    assert pinned["pinned"] and pinned["expires_at"] is None
    assert [chunk["pinned"] for chunk in pinned["chunks"]] == [True]
    alpha.ask({"id": "x"}, cache_salt="later")
    assert [chunk.pinned for chunk in server.chunks()] == [True, True]
    unpinned = alpha.post("/v1/documents/x:unpin").json()
    assert not unpinned["pinned"] and unpinned["expires_at"] is not None
    assert [chunk.pinned for chunk in server.chunks()] == [False, False]
    alpha.ask({"id": "x"}, cache_salt="later still")
    assert not any(chunk.pinned for chunk in server.chunks())


def test_document_can_be_pinned_from_the_start(alpha: Client, server: DocumentServer) -> None:
    assert alpha.post("/v1/documents", json={"id": "x", "text": "one", "pinned": True}).json()["pinned"]
    alpha.ask({"id": "x"})
    assert [chunk.pinned for chunk in server.chunks()] == [True]


def test_pin_passes_from_a_replaced_text_to_the_new_one(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "one", pinned=True)
    alpha.ask({"id": "x"})
    assert alpha.store("x", "two")["pinned"]
    assert server.chunks() == []
    alpha.ask({"id": "x"})
    (chunk,) = server.chunks()
    assert chunk.pinned
    assert not alpha.store("x", "two", pinned=False)["pinned"]
    assert [chunk.pinned for chunk in server.chunks()] == [False]


def test_chunk_of_two_equal_documents_is_pinned_as_long_as_one_is(alpha: Client, server: DocumentServer) -> None:
    for name in ("x", "y"):
        alpha.store(name, "The same text.", pinned=True)
        alpha.ask({"id": name})
    (chunk,) = server.chunks()
    alpha.post("/v1/documents/x:unpin")
    assert chunk.pinned
    alpha.delete("/v1/documents/y")
    assert server.chunks() == [chunk] and not chunk.pinned


def test_deleting_a_pinned_document_leaves_no_pin(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", pinned=True)
    alpha.ask({"id": "x"})
    alpha.delete("/v1/documents/x")
    assert server.chunks() == []
    assert server.llm.engine.kv_cache.statistics().pinned_chunks == 0
    alpha.store("x")
    alpha.ask({"id": "x"})
    assert [chunk.pinned for chunk in server.chunks()] == [False]


def test_pinned_document_survives_what_evicts_others(small: Client, server: DocumentServer) -> None:
    text = "The quick brown fox jumps over the lazy dog near the river. "
    small.store("kept", "Kept. " + text, pinned=True)
    small.ask({"id": "kept"})
    for number in range(8):
        small.ask({"text": f"{number} " + text * 3})
    assert small.ask({"id": "kept"})["kvmosaic"]["documents"][0]["action"] == "reused"
    assert server.llm.engine.kv_cache.tenant_usage("small").num_bytes <= 640 * 1024
