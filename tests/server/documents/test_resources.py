"""Documents over HTTP: created, read, listed, replaced and deleted, each tenant for itself."""

from __future__ import annotations

import re
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


def test_created_document_is_described_and_read_back(alpha: Client) -> None:
    body = {"id": "urn:ferry.v1", "title": "Ferry", "text": " It runs at 8. ", "metadata": {"lang": "en"}}
    made = alpha.post("/v1/documents", json=body)
    assert made.status_code == 201 and made.headers["ETag"] == '"1"'
    described = made.json()
    assert described["object"] == "document" and described["id"] == "urn:ferry.v1"
    assert described["expires_at"] is described["ttl_seconds"] is None
    assert (described["version"], described["characters"], described["bytes"]) == (1, 13, 18)
    assert "text" not in described and "chunks" not in described
    read = alpha.get("/v1/documents/urn:ferry.v1")
    assert read.headers["ETag"] == '"1"'
    assert read.json() == {**described, "text": "It runs at 8.", "chunks": []}


def test_document_without_id_gets_one(alpha: Client) -> None:
    made = alpha.post("/v1/documents", json={"text": "one"}).json()
    assert re.fullmatch(r"doc-[0-9a-f]{24}", made["id"])
    assert alpha.get(f"/v1/documents/{made['id']}").json()["text"] == "one"


def test_id_that_is_taken_gives_409(alpha: Client) -> None:
    alpha.store("x", "one")
    assert code_of(alpha.post("/v1/documents", json={"id": "x", "text": "two"}), 409) == "document_exists"
    assert alpha.get("/v1/documents/x").json()["text"] == "one"


def test_put_creates_then_replaces(alpha: Client) -> None:
    first = alpha.put("/v1/documents/x", json={"text": "one", "metadata": {"k": "v"}})
    second = alpha.put("/v1/documents/x", json={"text": "two", "ttl_seconds": None})
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.headers["ETag"] == '"2"'
    assert second.json()["metadata"] == {} and second.json()["expires_at"] is None
    assert alpha.get("/v1/documents/x").json()["text"] == "two"


def test_change_meant_for_another_version_gives_412(alpha: Client) -> None:
    alpha.store("x", "one")
    alpha.store("x", "two")
    for change in (alpha.put, lambda url, headers, json: alpha.delete(url, headers=headers)):
        reply = change("/v1/documents/x", headers={"If-Match": '"1"'}, json={"text": "three"})  # type: ignore[operator]
        assert code_of(reply, 412) == "document_changed"
    assert alpha.put("/v1/documents/x", headers={"If-Match": '"2"'}, json={"text": "three"}).status_code == 200
    assert code_of(alpha.put("/v1/documents/y", headers={"If-Match": "*"}, json={"text": "new"}), 412)
    assert alpha.delete("/v1/documents/x", headers={"If-Match": '"3"'}).status_code == 200


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


@pytest.mark.parametrize("verb", ["warm", "pin", "unpin"])
def test_ids_do_not_collide_with_verbs(alpha: Client, verb: str) -> None:
    for bad in (f"a:{verb}", f"a:b:{verb}", "..", "."):
        assert alpha.post("/v1/documents", json={"id": bad, "text": "x"}).status_code == 400
    for method in ("GET", "PUT", "DELETE"):
        for name in (f"a:{verb}", "x" * 300 + f":{verb}"):
            refused = alpha.request(method, f"/v1/documents/{name}", json={"text": 1})
            assert code_of(refused, 405) == "method_not_allowed" and refused.headers["Allow"] == "POST"
    for good in (f"{verb}", f"{verb}:a", f"a:{verb}:b"):
        alpha.store(good, "text")
        assert alpha.get(f"/v1/documents/{good}").json()["id"] == good
        done = alpha.post(f"/v1/documents/{good}:{verb}")
        assert done.status_code == 200, done.text
    assert alpha.post("/v1/documents/a:other").status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": ""},
        {"text": "  \n"},
        {"text": 5},
        {"text": None},
        {"text": "x", "id": "a/../b"},
        {"text": "x", "id": "x" * 257},
        {"text": "x", "ttl_seconds": 0},
        {"text": "x", "ttl_seconds": 31_536_001},
        {"text": "x", "ttl_seconds": "5"},
        {"text": "x", "ttl_seconds": 1.5},
        {"text": "x", "metadata": {"k": 1}},
        {"text": "x", "metadata": {str(number): "" for number in range(17)}},
        {"text": "x", "metadata": {"k" * 65: ""}},
        {"text": "x", "title": "t" * 4_097},
        {"text": "x", "unknown": 1},
    ],
)
def test_body_that_cannot_be_stored_gives_400_and_stores_nothing(alpha: Client, body: dict[str, Any]) -> None:
    code_of(alpha.post("/v1/documents", json=body), 400)
    assert alpha.get("/v1/documents").json()["data"] == []


def test_half_of_a_surrogate_pair_gives_400(alpha: Client) -> None:
    for text in (
        '{"text": "\\ud800"}',
        '{"text": "x", "metadata": {"k": "\\ud800"}}',
        '{"text": "x", "title": "\\udfff"}',
    ):
        reply = alpha.post("/v1/documents", content=text, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, reply.text


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


def test_list_is_read_in_parts(alpha: Client) -> None:
    for number in range(5):
        alpha.store(f"d{number}", "text")
    first = alpha.get("/v1/documents", params={"limit": 2}).json()
    assert [each["id"] for each in first["data"]] == ["d4", "d3"]
    assert (first["object"], first["first_id"], first["last_id"], first["has_more"]) == ("list", "d4", "d3", True)
    alpha.delete("/v1/documents/d3")
    for after in (first["next_after"], first["last_id"]):
        rest = alpha.get("/v1/documents", params={"after": after}).json()
        assert [each["id"] for each in rest["data"]] == ["d2", "d1", "d0"]
        assert rest["has_more"] is False and rest["next_after"] is None
    ascending = alpha.get("/v1/documents", params={"order": "asc", "limit": 1}).json()
    assert ascending["last_id"] == "d0"
    assert all("text" not in each and "chunks" not in each for each in ascending["data"])


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 1_001}, {"limit": "x"}, {"order": "up"}, {"after": "x" * 257}]
)
def test_list_that_cannot_be_read_gives_400(alpha: Client, query: dict[str, Any]) -> None:
    assert code_of(alpha.get("/v1/documents", params=query), 400) is None


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


def test_one_document_named_twice_in_a_prompt_gives_400(alpha: Client) -> None:
    alpha.store("x")
    chat = {"model": "reader", "messages": [{"role": "user", "content": "?"}], "documents": [{"id": "x"}, {"id": "x"}]}
    assert alpha.post("/v1/chat/completions", json=chat).status_code == 400
