"""Companions over HTTP: a request names texts that its documents see and its prompt does not contain."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.asking import DOCUMENTS, MESSAGES, chat, post
from support.server import RunningServer

COMPANIONS = ["The coach to Elm Bay leaves at ten.", "The old forge makes nails.", "The inn is kept by Jon Sand."]


def reused(reply: dict[str, Any]) -> list[bool]:
    return [one["reused_tokens"] == one["tokens"] for one in reply["kvmosaic"]["segments"] if one["kind"] == "chunk"]


@pytest.mark.parametrize("route", ["chat", "/v1/completions", "/v1/responses"])
def test_companions_of_a_request_are_seen_and_are_no_part_of_the_prompt(http, route):
    fields: dict[str, Any] = {"documents": DOCUMENTS, "cache_salt": f"companions {route}", "temperature": 0}

    def ask(**more: Any) -> dict[str, Any]:
        if route == "chat":
            return chat(http, **fields, **more)
        text = {"prompt": "Who?"} if route == "/v1/completions" else {"input": MESSAGES}
        return post(http, route, **text, **fields, **more)

    alone, first, again = ask(), ask(companions=COMPANIONS), ask(companions=COMPANIONS)
    assert reused(alone) == [False] * 3 and reused(first) == [True, False, False] and reused(again) == [True] * 3
    assert "computed after companions" in first["kvmosaic"]["composition"]
    assert sum(each["tokens"] for each in first["kvmosaic"]["segments"]) == sum(
        each["tokens"] for each in alone["kvmosaic"]["segments"]
    )


def test_documents_are_warmed_for_every_place(http):
    texts = [document["text"] for document in DOCUMENTS]
    body = {
        "documents": texts,
        "companions": COMPANIONS[:2],
        "cache_salt": "warm companions",
        "endpoint": "/v1/completions",
    }
    warmed = http.post("/v1/documents:warm", json=body)
    assert warmed.status_code == 200 and "error" not in warmed.json(), warmed.text
    fields = {key: body[key] for key in ("companions", "cache_salt")}
    reply = post(http, "/v1/completions", prompt="Who?", documents=texts[::-1], temperature=0, **fields)
    assert reused(reply) == [True] * 3


@pytest.mark.parametrize(
    "route", ["chat", *(pytest.param(f"/v1/{name}", marks=pytest.mark.slow) for name in ("messages", "responses"))]
)
def test_the_cache_chooses_an_order_that_it_knows(http, route):
    fields: dict[str, Any] = {
        "cache_salt": f"order {route}",
        "companions": COMPANIONS[:1],
    }
    fields["max_output_tokens" if route == "/v1/responses" else "max_tokens"] = 1

    def ask(*ids: str, **more: Any) -> dict[str, Any]:
        documents = [next(each for each in DOCUMENTS if each["id"] == name) for name in ids]
        if route == "chat":
            return chat(http, documents=documents, **fields, **more)["kvmosaic"]
        text = {"input": "Who?"} if route == "/v1/responses" else {"messages": MESSAGES[1:], "system": "Answer."}
        return post(http, route, **text, documents=documents, **fields, **more)["kvmosaic"]

    ask("ferry", "mill", "zoo")
    sent = ask("mill", "zoo", "ferry", documents_order="sent")
    assert [each["id"] for each in sent["documents"]] == ["mill", "zoo", "ferry"] and sent["documents"][0]["miss"]
    chosen = ask("zoo", "ferry", "mill", documents_order="any")
    assert [each["id"] for each in chosen["documents"]] == ["ferry", "zoo", "mill"]
    assert all(each["reused_tokens"] == each["tokens"] for each in chosen["documents"])
    assert "the cache chose the order of documents" in chosen["composition"]
    assert "the cache chose" not in ask("ferry", "zoo", "mill", documents_order="any")["composition"]
    refusal = http.post("/v1/chat/completions", json={"messages": MESSAGES, "documents_order": "best"})
    assert refusal.status_code == 400 and "documents_order" in refusal.text


@pytest.mark.parametrize(
    ("wrong", "message"), [([], "1 to 24 texts, got 0"), (["a"] * 25, "24"), ([" "], "got ' '"), ("a", "list")]
)
def test_what_is_no_companion_is_refused(http, wrong, message):
    reply = http.post("/v1/chat/completions", json={"messages": MESSAGES, "documents": DOCUMENTS, "companions": wrong})
    assert reply.status_code in (400, 422) and message in reply.text


@pytest.mark.slow
def test_stored_documents_are_companions_and_stay_the_same_whatever_is_stored_later() -> None:
    with (
        RunningServer(companions="stored", chunk_cache_size="4MiB", repair="none") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def ask(*texts: str) -> dict[str, Any]:
            return post(client, "/v1/completions", prompt="Who?", documents=list(texts), temperature=0, max_tokens=2)

        ask("One is red.", "Two is blue.")
        for number, text in enumerate(COMPANIONS):
            client.put(f"/v1/documents/{number}", json={"text": text}).raise_for_status()
        first = ask("One is red.", "Two is blue.")
        assert reused(first) == [True, False] and "computed after companions" in first["kvmosaic"]["composition"]
        client.put("/v1/documents/later", json={"text": "Three is green."}).raise_for_status()
        assert reused(ask("One is red.", "Two is blue.")) == [True, True], "the first three are what they were"
        client.delete("/v1/documents/0").raise_for_status()
        assert reused(ask("One is red.", "Two is blue.")) == [True, False], "nothing that was deleted is seen"
        client.post("/v1/documents/1:warm", json={"endpoint": "/v1/completions"}).raise_for_status()
        reply = post(client, "/v1/completions", prompt="Who?", documents=["One is red.", {"id": "1"}], temperature=0)
        assert reused(reply)[1]
