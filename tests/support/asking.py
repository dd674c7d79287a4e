"""Requests that tests of the server send, and how their replies are read."""

from __future__ import annotations

import json
from typing import Any

import httpx

DOCUMENTS = [
    {"id": "ferry", "text": "The ferry goes to Oak Island."},
    {"id": "mill", "title": "The mill", "text": "The mill grinds oats."},
    {"id": "zoo", "text": "The zoo has three owls."},
]
QUESTION = "Where does the ferry go?"
MESSAGES = [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    """A whole reply of /v1/chat/completions, greedy unless told otherwise."""
    return post(http, "/v1/chat/completions", **{"messages": MESSAGES, **GREEDY, **fields})


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """A reply that must be a 200."""
    reply = http.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    read: dict[str, Any] = reply.json()
    return read


def refused(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    """The error of a reply that must be one, with its status."""
    reply = http.post(path, json=fields)
    assert reply.status_code >= 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return {**error, "status": reply.status_code}


def chunks(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed reply that ends with [DONE]."""
    with http.stream("POST", path, json={**fields, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert all(line.startswith(("data: ", ": ", "event: ")) for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def streamed_chat(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed conversation, greedy unless told otherwise."""
    return chunks(http, "/v1/chat/completions", **{"messages": MESSAGES, **GREEDY, **fields})


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one answer of a streamed conversation."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
