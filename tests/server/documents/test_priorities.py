"""The priority of documents: said when they are stored, later, or by the prompt that brings them along."""

from __future__ import annotations

import pytest
from server.documents.world import Client, DocumentServer


def priorities(server: DocumentServer) -> list[float]:
    return [chunk.priority for chunk in server.chunks()]


def test_priority_holds_for_chunks_there_and_for_chunks_computed_later(alpha: Client, server: DocumentServer) -> None:
    assert alpha.store("x", priority=0.9)["priority"] == 0.9
    alpha.ask({"id": "x"})
    assert priorities(server) == [0.9]
    changed = alpha.patch("/v1/documents/x", json={"priority": 0.2})
    assert (changed.status_code, changed.json()["priority"]) == (200, 0.2)
    assert changed.headers["ETag"] == '"1"'
    assert priorities(server) == [0.2]
    alpha.ask({"id": "x"}, cache_salt="later")
    assert priorities(server) == [0.2, 0.2]
    assert alpha.get("/v1/documents/x").json()["priority"] == 0.2


def test_priority_is_a_half_until_somebody_says_otherwise(alpha: Client, server: DocumentServer) -> None:
    assert alpha.store("x")["priority"] == 0.5
    alpha.ask({"id": "x"})
    assert priorities(server) == [0.5]
    alpha.patch("/v1/documents/x", json={"priority": 1})
    assert alpha.patch("/v1/documents/x", json={"priority": None}).json()["priority"] == 0.5
    assert priorities(server) == [0.5]


def test_priority_stays_when_a_document_is_replaced_without_one(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "one", priority=0.8)
    assert alpha.store("x", "two")["priority"] == 0.8
    alpha.ask({"id": "x"})
    assert priorities(server) == [0.8]
    assert alpha.store("x", "two", priority=0.1)["priority"] == 0.1
    assert priorities(server) == [0.1], "the text is the same, so its chunk is"


def test_a_prompt_says_it_for_the_documents_it_brings_and_names(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "The mayor is Renna Velley.", priority=0.3)
    alpha.ask({"id": "x", "priority": 0.7}, {"text": "The ferry goes to Oak Island.", "priority": 0.0})
    assert sorted(priorities(server)) == [0.0, 0.7]
    assert alpha.get("/v1/documents/x").json()["priority"] == 0.3


def test_a_change_may_be_meant_for_one_version(alpha: Client) -> None:
    alpha.store("x", "one")
    change = {"priority": 0.4}
    assert alpha.patch("/v1/documents/x", json=change, headers={"If-Match": '"2"'}).status_code == 412
    assert alpha.patch("/v1/documents/x", json=change, headers={"If-Match": '"1"'}).status_code == 200
    assert alpha.patch("/v1/documents/y", json=change).status_code == 404


def test_metadata_is_changed_without_sending_the_text(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", priority=0.9, metadata={"filename": "x.md", "language": "en"})
    alpha.ask({"id": "x"})
    before = alpha.get("/v1/documents/x").json()
    changed = alpha.patch("/v1/documents/x", json={"metadata": {"language": "日本語", "": "no"}})
    assert changed.status_code == 400 and "metadata" in changed.json()["error"]["message"]
    assert alpha.get("/v1/documents/x").json() == before
    changed = alpha.patch("/v1/documents/x", json={"metadata": {"language": "日本語"}}, headers={"If-Match": '"1"'})
    assert (changed.status_code, changed.headers["ETag"]) == (200, '"1"')
    assert alpha.get("/v1/documents/x").json() == {**before, "metadata": {"language": "日本語"}}
    assert priorities(server) == [0.9]
    both = alpha.patch("/v1/documents/x", json={"metadata": None, "priority": 0.1}).json()
    assert (both["metadata"], both["priority"]) == ({}, 0.1)
    assert alpha.patch("/v1/documents/x", json={"metadata": {str(n): "" for n in range(17)}}).status_code == 400


def test_nobody_changes_the_documents_of_others(alpha: Client, beta: Client) -> None:
    alpha.store("x", priority=0.6)
    assert beta.patch("/v1/documents/x", json={"priority": 0.1}).status_code == 404
    assert alpha.get("/v1/documents/x").json()["priority"] == 0.6


@pytest.mark.parametrize("priority", [-0.1, 1.1, "high", [0.5], 1e300])
def test_a_priority_outside_its_range_is_refused(alpha: Client, priority: object) -> None:
    alpha.store("x")
    replies = [
        alpha.put("/v1/documents/x", json={"text": "one", "priority": priority}),
        alpha.patch("/v1/documents/x", json={"priority": priority}),
        alpha.post(
            "/v1/chat/completions",
            json={
                "model": "reader",
                "messages": [{"role": "user", "content": "Who?"}],
                "documents": [{"text": "one", "priority": priority}],
            },
        ),
    ]
    for reply in replies:
        assert reply.status_code == 400 and "priority" in reply.text
    nothing = alpha.patch("/v1/documents/x", json={})
    assert nothing.status_code == 400 and "send priority or metadata" in nothing.json()["error"]["message"]
