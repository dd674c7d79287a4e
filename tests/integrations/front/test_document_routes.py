"""/v1/documents behind the middleware, as a client of our own server would use it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from support.asking import MESSAGES
from support.server import RunningServer
from support.vllm.front import REPORT, App

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


def error_of(reply: Any) -> tuple[int, str | None]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_document_is_stored_and_named_by_its_id(app: App, client: Any) -> None:
    reply = client.put("/v1/documents/ferry", json={"title": "The ferry", "text": "It goes to Oak Island."})
    assert reply.status_code == 201 and reply.headers["etag"] == '"1"'
    stored = reply.json()
    assert (stored["id"], stored["characters"], stored["ttl_seconds"], stored["hits"]) == ("ferry", 22, None, 0)
    assert "text" not in stored
    whole = {"id": "ferry", "title": "The ferry", "text": "It goes to Oak Island."}
    bodies = []
    for document in (whole, {"id": "ferry"}):
        assert client.post(CHAT, json={"messages": MESSAGES, "documents": [document]}).status_code == 200
        bodies.append(app.body)
    said = bodies[1]["kv_transfer_params"]["kvmosaic"]
    assert (said.pop("labels"), said.pop("changes")) == (["ferry [stored 1]"], [1])
    assert bodies[0] == bodies[1]
    read = client.get("/v1/documents/ferry").json()
    assert (read["text"], read["hits"], read["version"]) == ("It goes to Oak Island.", 1, 1)


def test_documents_are_those_of_our_own_server_in_the_same_folder(client: Any, tmp_path: Path) -> None:
    client.put("/v1/documents/ferry", json={"title": "The ferry", "text": "It goes to Oak Island."})
    with RunningServer(documents_dir=str(tmp_path)) as server:
        assert httpx.get(f"{server.url}/v1/documents/ferry").json()["text"] == "It goes to Oak Island."
        stored = httpx.put(f"{server.url}/v1/documents/mill", json={"text": "It is red."})
        assert stored.status_code == 201
    assert [each["id"] for each in client.get("/v1/documents").json()["data"]] == ["mill", "ferry"]


def test_documents_do_not_sleep_by_themselves(client: Any) -> None:
    for path in ("/v1/documents:sleep", "/v1/documents:wake", "/v1/documents/a:sleep"):
        reply = client.post(path)
        assert reply.status_code == 404 and "use vLLM's /sleep" in reply.json()["error"]["message"]


def test_warming_asks_for_the_document_as_later_requests_do(app: App, client: Any) -> None:
    client.put("/v1/documents/ferry", json={"text": "It goes to Oak Island."})
    system = MESSAGES[0]["content"]
    reply = client.post("/v1/documents/ferry:warm", json={"system": system, "cache_salt": "s"}).json()
    assert (reply["num_documents"], reply["num_cached"], reply["num_failed"]) == (1, 1, 0)
    [entry] = reply["data"]
    assert (entry["object"], entry["id"], entry["was_cached"]) == ("document.warmed", "ferry", True)
    warmed = app.body
    assert (warmed["max_tokens"], warmed["cache_salt"]) == (1, "s")
    client.post(CHAT, json={"messages": MESSAGES, "documents": [{"id": "ferry"}]})
    later = app.body["kv_transfer_params"]
    shape = warmed["kv_transfer_params"]["kvmosaic"]
    assert {name: shape[name] for name in ("system", "chunks")} == {
        name: later["kvmosaic"][name] for name in ("system", "chunks")
    }
    end = shape["system"] + sum(shape["chunks"])
    assert warmed["prompt"][:end] == later["prompt_token_ids"][:end]
    assert client.get("/v1/documents/ferry").json()["hits"] == 1


def test_many_are_warmed_and_one_that_fails_stops_no_other(app: App) -> None:
    client = app.client(long_chunks="error")
    for name in "ab":
        client.put(f"/v1/documents/{name}", json={"text": f"Text {name}."})
    app.report = {**REPORT, "documents": [{"action": "computed"}]}
    every = client.post("/v1/documents:warm", json={}).json()
    assert (every["num_documents"], every["num_computed"]) == (2, 2)
    some = client.post("/v1/documents:warm", json={"ids": ["a"], "documents": ["x " * 9_000, "A text."]}).json()
    assert [entry["object"].partition(".")[2] for entry in some["data"]] == ["warmed", "failed", "warmed"]
    assert some["data"][1]["error"]["code"] == "context_length_exceeded"
    assert client.post("/v1/documents:warm", json={"ids": ["a", "gone"]}).status_code == 404
    assert client.post("/v1/documents:warm", json={"ids": ["gone"]}).status_code == 404
    assert client.post("/v1/documents:warm", json={"ids": []}).json()["num_documents"] == 0


def test_a_document_that_vllm_did_not_keep_is_not_called_warm(app: App, client: Any) -> None:
    app.report = {**REPORT, "documents": [{"action": "computed"}], "bypass": "its longest document is 1,030 tokens"}
    reply = client.post("/v1/documents:warm", json={"documents": ["x"]})
    assert reply.status_code == 400 and "1,030 tokens" in reply.json()["error"]["message"]


def test_a_refusal_of_vllm_is_passed_on(app: App, client: Any) -> None:
    app.refusal = "too long"
    reply = client.post("/v1/documents:warm", json={"documents": ["x"]})
    assert reply.status_code == 400 and "too long" in reply.json()["error"]["message"]


def test_texts_are_sent_as_they_are(client: Any) -> None:
    text = 'ü☃ "quoted" \\ back \u2028'
    client.put("/v1/documents/a", json={"text": text})
    assert json.loads(client.get("/v1/documents/a").content)["text"] == text.strip()


def updates(app: App) -> list[Any]:
    """Updates of document pools that reached vLLM, and are forgotten by this."""
    bodies, app.bodies = [json.loads(body) for body in app.bodies], []
    return [body["kv_transfer_params"]["kvmosaic"]["update"] for body in bodies if body["prompt"] == [0]]


def test_pins_and_priorities_reach_the_engine_at_once_and_with_every_request(app: App, client: Any) -> None:
    client.put("/v1/documents/ferry", json={"text": "It goes to Oak Island."})
    assert updates(app) == []
    pinned = client.post("/v1/documents/ferry:pin")
    assert (pinned.status_code, pinned.json()["pinned"]) == (200, True)
    assert updates(app) == [{"ferry [stored 1]": {"priority": 0.5, "pinned": True, "change": 2}}]
    assert client.patch("/v1/documents/ferry", json={"priority": 0.9}).json()["priority"] == 0.9
    assert updates(app) == [{"ferry [stored 1]": {"priority": 0.9, "pinned": True, "change": 3}}]
    inline = {"id": "mill", "text": "It is red.", "priority": 0.2}
    client.post(CHAT, json={"messages": MESSAGES, "documents": [inline, {"id": "ferry"}]})
    said = app.body["kv_transfer_params"]["kvmosaic"]
    assert (said["ids"], said["labels"]) == (["mill", "ferry"], [None, "ferry [stored 1]"])
    assert (said["pins"], said["priorities"], said["changes"]) == ([0, 1], [0.2, 0.9], [0, 3])
    same_id = {"id": "ferry", "text": "Another text under the same id."}
    client.post(CHAT, json={"messages": MESSAGES, "documents": [same_id]})
    assert not {"labels", "pins", "changes"} & app.body["kv_transfer_params"]["kvmosaic"].keys()
    app.bodies.clear()
    client.put("/v1/documents/ferry", json={"text": "It stays."})
    (update,) = updates(app)
    assert update.pop("ferry [stored 1]") == {"pinned": False, "change": 4}, "it can still be read by its version"
    ((label, claim),) = update.items()
    assert claim == {"priority": 0.9, "pinned": True, "change": 4}
    client.delete("/v1/documents/ferry")
    assert updates(app)[0][label] is None
    client.put("/v1/documents/mill", json={"text": "It is red."})
    client.delete("/v1/documents/mill")
    assert updates(app) == [], "it was never pinned"


def test_every_engine_of_an_api_server_learns_a_pin(app: App, client: Any) -> None:
    app.app.state.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=3), kv_transfer_config=None
    )
    client.put("/v1/documents/ferry", json={"text": "It goes to Oak Island.", "pinned": True})
    assert sorted(app.ranks) == ["0", "1", "2"]
    app.app.state.vllm_config.parallel_config.data_parallel_external_lb = True
    client.post("/v1/documents/ferry:unpin")
    assert app.ranks[3:] == [None]


def test_a_pin_is_stored_where_no_engine_answers(app: App, client: Any) -> None:
    client.put("/v1/documents/ferry", json={"text": "It goes to Oak Island."})
    app.refusal = "asleep"
    assert client.post("/v1/documents/ferry:pin").json()["pinned"]
    assert client.get("/v1/documents/ferry").json()["pinned"]
