"""Warming: documents computed ahead, one event each, with errors that stop nobody else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from server.documents.world import Client, DocumentServer
from support.server import wait_until

from kvmosaic.documents import DocumentDraft

SENTENCE = "The quick brown fox jumps over the lazy dog near the river. "


def events_of(client: Client, url: str, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and contents of the events of a stream."""
    found: list[tuple[str, dict[str, Any]]] = []
    with client.stream("POST", url, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = ""
        for line in reply.iter_lines():
            field, _, value = line.partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                found.append((name, json.loads(value)))
    return found


def num_warming() -> int:
    """Tasks of the server that warm a document."""
    return sum(task.get_name().startswith("warm-") for task in asyncio.all_tasks())


def test_warmed_document_is_reused_by_the_first_request(alpha: Client) -> None:
    alpha.store("x")
    summary = alpha.post("/v1/documents/x:warm").json()
    (done,) = summary["data"]
    assert (done["object"], done["index"], done["id"], done["was_cached"]) == ("document.warmed", 0, "x", False)
    assert done["tokens"] > 0 and done["chunks"] == 1 and done["ms"] > 0
    assert {name: summary[name] for name in summary if name.startswith("num")} == {
        "num_documents": 1,
        "num_computed": 1,
        "num_cached": 0,
        "num_failed": 0,
        "num_evicted": 0,
    }
    (line,) = alpha.ask({"id": "x"})["kvmosaic"]["documents"]
    assert (line["action"], line["tokens"]) == ("reused", done["tokens"])
    again = alpha.post("/v1/documents/x:warm", json={}).json()
    assert again["data"][0]["was_cached"] and again["num_cached"] == 1 and again["num_computed"] == 0


def test_bad_documents_spoil_no_list_of_them(alpha: Client) -> None:
    parts = [
        " ",
        {"id": "m", "text": "One."},
        {"id": "m", "text": "Two.\0", "sees": ["n"]},
        {"id": "m", "text": "One."},
    ]
    alpha.store("x")
    reply = alpha.post("/v1/documents:warm", json={"ids": ["x"], "documents": parts})
    assert [(each["index"], each["id"]) for each in reply.json()["data"]] == [(0, "x"), (2, "m"), (3, "m#2")]
    told = reply.json()["warnings"]
    assert [each for word in ("U+FFFD", "blank", "read once", "#2") for each in told if word in each] == told
    assert reply.headers["X-Kvmosaic-Warning"] == "; ".join(told)
    used = alpha.ask(parts[1], parts[2] | {"sees": None}, parts[3])["kvmosaic"]["documents"]  # type: ignore[operator]
    assert {line["action"] for line in used} <= {"reused", "moved"}


def test_documents_are_warmed_for_requests_that_let_them_see_nothing(alpha: Client) -> None:
    alpha.store("x")
    for url in ("/v1/documents/x:warm", "/v1/documents:warm"):
        (done,) = alpha.post(url, json={"chunk_context": "none"}).json()["data"]
        assert done["was_cached"] == (url == "/v1/documents:warm")
    (line,) = alpha.ask({"id": "x"}, chunk_context="none")["kvmosaic"]["documents"]
    assert line["reused_tokens"] == line["tokens"] == done["tokens"]
    (line,) = alpha.ask({"id": "x"})["kvmosaic"]["documents"]
    assert line["action"] == "computed"


@pytest.mark.parametrize("find", ["stored", ["patterns"]])
def test_documents_are_warmed_for_requests_that_paste_them(alpha: Client, find: str | list[str]) -> None:
    text = "Fenbury was founded in 1642, and it lies on the river Quinan."
    assert alpha.put("/v1/documents/x", json={"title": "Fenbury", "text": text}).status_code == 201
    how = {"system": "Answer from the context.", "find_documents": find}
    for url in ("/v1/documents/x:warm", "/v1/documents:warm"):
        (done,) = alpha.post(url, json=how).json()["data"]
        assert done["was_cached"] == (url == "/v1/documents:warm")
    pasted = f'<context>\n<source id="1">{text}</source>\n</context>\nWhen was Fenbury founded?'
    messages = [{"role": "system", "content": how["system"]}, {"role": "user", "content": pasted}]
    (line,) = alpha.ask(messages=messages, find_documents=find)["kvmosaic"]["documents"]
    assert line["reused_tokens"] == line["tokens"] == done["tokens"]
    (line,) = alpha.ask({"id": "x"}, messages=messages)["kvmosaic"]["documents"]
    assert line["action"] == "computed"


def test_documents_are_warmed_for_completions_that_paste_them(alpha: Client) -> None:
    text = "Fenbury was founded in 1642, and it lies on the river Quinan."
    how = {"endpoint": "/v1/completions", "system": "Answer.\n<document>", "find_documents": "document-tags"}
    assert alpha.post("/v1/documents:warm", json={**how, "documents": [text]}).json()["num_computed"] == 1
    body = {"prompt": f"Answer.\n<document>{text}</document>\nWhen?", "max_tokens": 1}
    reply = alpha.post("/v1/completions", json={**body, "find_documents": "document-tags"}).json()
    (line,) = reply["kvmosaic"]["documents"]
    assert line["reused_tokens"] == line["tokens"]


def test_warming_counts_no_hit(alpha: Client) -> None:
    alpha.store("x")
    alpha.post("/v1/documents/x:warm")
    assert alpha.get("/v1/documents/x").json()["hits"] == 0


def test_document_is_warm_only_behind_the_system_text_and_salt_it_was_warmed_with(alpha: Client) -> None:
    alpha.store("x")
    alpha.post("/v1/documents/x:warm", json={"system": "Be short.", "cache_salt": "s"})
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who is the mayor?"}]
    assert alpha.ask({"id": "x"}, cache_salt="s")["kvmosaic"]["documents"][0]["action"] == "computed"
    assert alpha.ask({"id": "x"}, messages=messages)["kvmosaic"]["documents"][0]["action"] == "computed"
    warm = alpha.ask({"id": "x"}, messages=messages, cache_salt="s")
    assert warm["kvmosaic"]["documents"][0]["action"] == "reused"


def test_document_is_warmed_for_completions_without_the_chat_template(alpha: Client) -> None:
    alpha.store("x")
    alpha.post("/v1/documents/x:warm", json={"endpoint": "/v1/completions"})
    body = {"model": "reader", "prompt": "Who is the mayor?", "documents": [{"id": "x"}], "max_tokens": 1}
    reply = alpha.post("/v1/completions", json=body).json()
    assert reply["kvmosaic"]["documents"][0]["action"] == "reused"


def test_many_documents_are_warmed_with_an_event_each(alpha: Client) -> None:
    for number in range(20):
        alpha.store(f"d{number}", f"Document {number}. " + SENTENCE)
    alpha.post("/v1/documents/d3:warm")
    *events, (last, summary) = events_of(alpha, "/v1/documents:warm", {})
    assert [name for name, _ in events] == ["document.warmed"] * 20
    assert sorted(data["index"] for _, data in events) == list(range(20))
    assert {data["id"]: data["index"] for _, data in events} == {f"d{number}": number for number in range(20)}
    assert [data["id"] for _, data in events if data["was_cached"]] == ["d3"]
    assert last == summary["object"] == "documents.warmed"
    assert (summary["num_documents"], summary["num_computed"], summary["num_cached"]) == (20, 19, 1)
    assert summary["tokens"] == sum(data["tokens"] for _, data in events)


def test_documents_are_chosen_by_id_or_given_inline(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x", "one")
    alpha.store("y", "two")
    body = {"ids": ["y"], "documents": [{"id": "inline", "text": "three"}, "four", {"id": "x"}, {"text": "five"}]}
    summary = alpha.post("/v1/documents:warm", json=body).json()
    assert [each["id"] for each in summary["data"]] == ["y", "inline", None, "x", None]
    assert summary["num_computed"] == 5
    assert [each["id"] for each in alpha.get("/v1/documents").json()["data"]] == ["y", "x"], (
        "inline ones are not stored"
    )
    assert alpha.ask({"text": "four"})["kvmosaic"]["documents"][0]["action"] == "reused"


def test_nothing_to_warm(alpha: Client) -> None:
    assert alpha.post("/v1/documents:warm", json={}).json()["num_documents"] == 0
    assert [name for name, _ in events_of(alpha, "/v1/documents:warm", {})] == ["documents.warmed"]
    alpha.store("x")
    for body in ({"ids": []}, {"ids": [], "documents": []}, {"documents": []}):
        assert alpha.post("/v1/documents:warm", json=body).json()["num_documents"] == 0, "an empty list names none"
    assert alpha.post("/v1/documents:warm", json={"documents": [{"title": "no text"}]}).status_code == 400


def test_unknown_id_is_said_before_anything_is_computed(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x")
    for body in (
        {"ids": ["x", "unknown"]},
        {"ids": ["x", "unknown"], "stream": True},
        {"documents": [{"id": "unknown"}]},
    ):
        reply = alpha.post("/v1/documents:warm", json=body)
        assert reply.status_code == 404 and "'unknown'" in reply.text
    assert server.chunks() == []


@pytest.mark.parametrize(
    "body",
    [
        {"unknown": 1},
        {"ids": "x"},
        {"ids": ["a\nb"]},
        {"endpoint": "/v1/other"},
        {"stream": 1},
        {"find_documents": "x"},
    ],
)
def test_body_that_cannot_be_warmed_gives_400(alpha: Client, body: dict[str, Any]) -> None:
    assert alpha.post("/v1/documents:warm", json=body).status_code == 400


def test_document_that_cannot_be_computed_stops_no_other(alpha: Client, server: DocumentServer) -> None:
    alpha.store("good", "one")
    # such as one that was stored before the server got another model
    server.services.documents.create("alpha", DocumentDraft("word " * 5_000), "long")
    alpha.store("also-good", "two")
    *events, (_, summary) = events_of(alpha, "/v1/documents:warm", {})
    ended = {data["id"]: (name, data) for name, data in events}
    assert {document_id: name for document_id, (name, _) in ended.items()} == {
        "good": "document.warmed",
        "long": "document.failed",
        "also-good": "document.warmed",
    }
    assert ended["long"][1]["error"]["code"] == "context_length_exceeded"
    assert (summary["num_failed"], summary["num_computed"]) == (1, 2)
    whole = alpha.post("/v1/documents:warm", json={}).json()
    assert [each["object"] for each in whole["data"]] == ["document.warmed", "document.failed", "document.warmed"]
    alone = alpha.post("/v1/documents/long:warm")
    assert alone.status_code == 400 and alone.json()["error"]["code"] == "context_length_exceeded"


def test_quota_gives_429_and_an_event_in_a_stream(small: Client, server: DocumentServer) -> None:
    small.store("large", SENTENCE * 20)
    small.store("fits", SENTENCE)
    reply = small.post("/v1/documents/large:warm")
    assert reply.status_code == 429 and reply.json()["error"]["code"] == "quota_exceeded"
    *events, (_, summary) = events_of(small, "/v1/documents:warm", {})
    failed = [data for name, data in events if name == "document.failed"]
    assert [(data["id"], data["error"]["code"]) for data in failed] == [("large", "quota_exceeded")]
    assert summary["num_computed"] == 1 and len(server.chunks("small")) == 1


def test_document_deleted_while_it_waits_its_turn_is_an_event(alpha: Client, server: DocumentServer) -> None:
    for number in range(30):
        alpha.store(f"d{number}", f"Document {number}. " + SENTENCE * 5)
    with alpha.stream("POST", "/v1/documents:warm", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert alpha.delete("/v1/documents/d29").status_code == 200
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    ended = {data.get("id"): data for data in rest}
    assert ended["d29"].get("error", {}).get("code", "document_not_found") == "document_not_found"
    assert rest[-1]["num_documents"] == 30
    server.call(server.services.documents.expire)


def test_reader_that_goes_away_aborts_the_rest(alpha: Client, server: DocumentServer) -> None:
    for number in range(40):
        alpha.store(f"d{number}", f"Document {number}. " + SENTENCE * 30)
    with alpha.stream("POST", "/v1/documents:warm", json={"stream": True}) as reply:
        next(reply.iter_lines())
    wait_until(lambda: not server.services.admission.num_under_way)
    assert server.call(num_warming) == 0
    wait_until(lambda: not server.llm.engine.has_unfinished_requests)
    assert 0 < len(server.chunks()) < 40
    assert not [chunk for chunk in server.chunks() if chunk.ref_count]


def test_client_that_gives_up_on_a_whole_reply_aborts_the_rest(alpha: Client, server: DocumentServer) -> None:
    for number in range(40):
        alpha.store(f"d{number}", f"Document {number}. " + SENTENCE * 30)
    with pytest.raises(httpx.ReadTimeout):
        alpha.post("/v1/documents:warm", json={}, timeout=0.2)
    wait_until(lambda: not server.services.admission.num_under_way)
    wait_until(lambda: not server.llm.engine.has_unfinished_requests)
    assert len(server.chunks()) < 40


def test_warming_leaves_room_for_those_who_ask(alpha: Client, beta: Client, server: DocumentServer) -> None:
    for number in range(40):
        alpha.store(f"d{number}", f"Document {number}. " + SENTENCE * 30)
    with alpha.stream("POST", "/v1/documents:warm", json={"stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        beta.ask({"text": "The mayor is Renna Velley."})
        assert server.services.admission.num_under_way >= 1, "the warm-up goes on"


def test_draining_server_warms_nothing(alpha: Client, server: DocumentServer) -> None:
    alpha.store("x")
    server.services.admission.is_draining = True
    try:
        for body in ({}, {"stream": True}):
            reply = alpha.post("/v1/documents/x:warm", json=body)
            assert reply.status_code == 503 and "Retry-After" in reply.headers
    finally:
        server.services.admission.is_draining = False


def test_warming_says_what_left_the_cache_meanwhile(alpha: Client, small: Client) -> None:
    texts = [
        {"id": f"d{number}", "text": f"{number}: " + "The mayor of Fenbury is Renna Velley. " * 2}
        for number in range(30)
    ]
    assert small.post("/v1/documents:warm", json={"documents": texts[:1]}).json()["num_evicted"] == 0
    summary = small.post("/v1/documents:warm", json={"documents": texts}).json()
    assert summary["num_computed"] == 29 and 0 < summary["num_evicted"] < 30
    streamed = small.post("/v1/documents:warm", json={"documents": texts, "stream": True}).text
    assert '"num_evicted":0' not in streamed.rpartition("event: ")[2]
    assert alpha.post("/v1/documents:warm", json={"documents": texts}).json()["num_evicted"] == 0
