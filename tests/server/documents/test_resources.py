"""Documents over HTTP: created, read, listed, replaced and deleted, each tenant for itself."""

from __future__ import annotations

from typing import Any

import pytest
from server.documents.world import Client, DocumentServer


def code_of(reply: Any, status: int) -> str | None:
    """The error's code of a reply with this status, in OpenAI's shape."""
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    code: str | None = error["code"]
    return code


def test_deleted_document_is_gone(alpha: Client) -> None:
    alpha.store("x")
    deleted = alpha.delete("/v1/documents/x")
    assert deleted.status_code == 200
    assert deleted.json() == {"id": "x", "object": "document.deleted", "deleted": True}
    for reply in (alpha.get("/v1/documents/x"), alpha.delete("/v1/documents/x"), alpha.post("/v1/documents/x:pin")):
        assert code_of(reply, 404) == "document_not_found"
    chat = {"model": "reader", "messages": [{"role": "user", "content": "?"}], "documents": [{"id": "x"}]}
    reply = alpha.post("/v1/chat/completions", json=chat)
    assert code_of(reply, 404) == "document_not_found" and "'x'" in reply.text


def test_tenants_see_only_their_own_documents(alpha: Client, beta: Client) -> None:
    alpha.store("x", "The mayor is Renna Velley.")
    assert code_of(beta.get("/v1/documents/x"), 404)
    assert code_of(beta.delete("/v1/documents/x"), 404)
    assert code_of(beta.post("/v1/documents/x:warm"), 404)
    assert beta.get("/v1/documents").json()["data"] == []
    beta.store("x", "The mayor is Salla Gridin.")
    assert alpha.get("/v1/documents/x").json()["text"] == "The mayor is Renna Velley."
    unknown = beta.get("/v1/documents/x", headers={"Authorization": "Bearer unknown"})
    assert unknown.status_code == 401


def test_more_than_a_tenant_may_store_gives_413_or_429(alpha: Client, beta: Client) -> None:
    assert code_of(alpha.post("/v1/documents", json={"text": "x" * 100_001}), 413) == "document_too_large"
    for number in range(26):
        alpha.store(f"d{number}", "x" * 3_800)
    assert code_of(alpha.post("/v1/documents", json={"text": "y" * 3_800}), 429) == "document_store_full"
    beta.store("x", "x" * 3_800)
    for number in range(50):
        alpha.store(f"d{number}", "text")
    assert code_of(alpha.put("/v1/documents/one-more", json={"text": "text"}), 429) == "document_store_full"
    alpha.store("d0", "replacing needs no place")


@pytest.mark.parametrize("after", ["unknown", "~", "~x", ""])
def test_place_that_the_list_does_not_have_gives_404(alpha: Client, after: str) -> None:
    assert code_of(alpha.get("/v1/documents", params={"after": after}), 404) == "document_not_found"


def test_prompt_reads_stored_document_by_id_and_the_report_names_it(alpha: Client, server: DocumentServer) -> None:
    alpha.store("handbook", "The mayor of Fenbury is Renna Velley.", title="Fenbury")
    inline = alpha.ask({"id": "inline", "title": "Fenbury", "text": "The mayor of Fenbury is Renna Velley."})
    stored = alpha.ask({"id": "handbook"})
    (line,) = stored["kvmosaic"]["documents"]
    assert (line["id"], line["name"], line["action"]) == ("handbook", "handbook", "reused")
    assert line["tokens"] == inline["kvmosaic"]["documents"][0]["tokens"]
    assert stored["choices"][0]["message"] == inline["choices"][0]["message"]
    described = alpha.get("/v1/documents/handbook").json()
    assert described["hits"] == 1 and described["last_used_at"] is not None
    (chunk,) = described["chunks"]
    assert (chunk["tier"], chunk["state"], chunk["tokens"]) == ("device", "ready", line["tokens"])
    assert chunk["blocks"] == -(-line["tokens"] // 16)
    assert chunk["bytes"] == chunk["blocks"] * server.llm.engine.kv_cache.bytes_per_block
    assert not chunk["pinned"] and not chunk["salted"] and chunk["part"] is None


def test_list_says_where_documents_are_when_asked(alpha: Client) -> None:
    alpha.store("a", "one text")
    alpha.store("b", "another text")
    alpha.ask({"id": "a"})
    alpha.ask({"id": "a"}, cache_salt="s")
    data = alpha.get("/v1/documents", params={"include_chunks": True}).json()["data"]
    assert {each["id"]: len(each["chunks"]) for each in data} == {"a": 2, "b": 0}
    assert sorted(chunk["salted"] for chunk in data[1]["chunks"]) == [False, True]


def test_one_document_named_twice_is_in_the_prompt_once(alpha: Client) -> None:
    alpha.store("x")
    chat = {"model": "reader", "messages": [{"role": "user", "content": "?"}], "documents": [{"id": "x"}, {"id": "x"}]}
    report = alpha.post("/v1/chat/completions", json=chat | {"max_tokens": 1}).json()["kvmosaic"]
    assert [document["id"] for document in report["documents"]] == ["x"] and len(report["warnings"]) == 1
