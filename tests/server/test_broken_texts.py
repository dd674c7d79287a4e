"""NUL characters and halves of surrogate pairs in texts of a body: replaced, with a warning that says where."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.messages import QUESTION, document, user
from support.server import RunningServer

BROKEN = "The ferry\0 goes to \ud83d Oak Island."
SAID = "2 NUL or lone surrogates were replaced by U+FFFD, the first at character 9"
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        "documents.0 ('m').text",
        {"documents": [{"id": "m", "text": BROKEN}], "messages": [user("Where?")], "max_tokens": 1},
    ),
    ("/v1/chat/completions", "messages.0.content", {"messages": [user(BROKEN)], "max_tokens": 1}),
    ("/v1/completions", "prompt", {"prompt": BROKEN, "max_tokens": 1}),
    ("/v1/responses", "input.0.content.0.text", {"input": [user({"type": "input_text", "text": BROKEN})]}),
    (
        "/v1/messages",
        "messages.0.content.0.source.data",
        {"messages": [user(document(BROKEN), QUESTION)], "max_tokens": 1},
    ),
    ("/tokenize", "prompt", {"prompt": BROKEN}),
]


@pytest.mark.parametrize("padding", ["", pytest.param(" " * 2**17, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("path", "place", "body"), BODIES)
def test_broken_text_is_read_with_replacement_characters(
    server: RunningServer, path: str, place: str, body: dict[str, Any], padding: str
) -> None:
    text = json.dumps(body) + padding
    replies = [
        httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=60)
        for content in (text, text.replace("\\u0000", "\ufffd").replace("\\ud83d", "\ufffd"))
    ]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    assert replies[0].headers["x-kvmosaic-warning"] == f"{place}: {SAID}"
    assert "x-kvmosaic-warning" not in replies[1].headers
    if path == "/tokenize":
        assert replies[0].json() == replies[1].json()
    else:
        assert replies[0].json()["kvmosaic"]["warnings"] == [f"{place}: {SAID}"]


def test_names_are_refused(server: RunningServer) -> None:
    content = json.dumps({"prompt": "a", "cache_salt": "\0"})
    reply = httpx.post(server.url + "/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("cache_salt holds half a character")


def test_lines_of_an_upload_say_what_was_changed(server: RunningServer) -> None:
    content = json.dumps({"id": "line", "text": BROKEN}) + "\n" + json.dumps({"id": "whole", "text": "x"})
    headers = {"Content-Type": "application/jsonl"}
    first, second = httpx.post(server.url + "/v1/documents:batch", content=content, headers=headers).json()["data"]
    assert first["warnings"] == [f"text: {SAID}"] and "warnings" not in second
    stored = httpx.get(server.url + "/v1/documents/line").json()["text"]
    assert stored == "The ferry\ufffd goes to \ufffd Oak Island."
