"""Documents on routes of vLLM that cannot compose them are refused, and everything else passes."""

from __future__ import annotations

from typing import Any

import pytest
from support.asking import DOCUMENTS, MESSAGES
from support.messages import document, user
from support.vllm.front import App

from kvmosaic.integrations.vllm.front.refused_routes import REFUSING, check_no_documents

DOCUMENT = document("The ferry goes to Oak Island.")
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}
FOUND = {"type": "search_result", "source": "a", "title": "b", "content": []}


@pytest.mark.parametrize("path", sorted(REFUSING))
def test_field_documents_is_refused(path: str) -> None:
    app = App(paths=[path])
    reply = app.client().post(path, json={"messages": MESSAGES, "documents": DOCUMENTS})
    assert reply.status_code == 400 and not app.bodies
    told = reply.json()
    assert "documents" in told["error"]["message"] and path in told["error"]["message"]
    assert (told.get("type") == "error") is path.startswith("/v1/messages")


@pytest.mark.parametrize("block", [DOCUMENT, RESULT, FOUND])
def test_blocks_of_documents_are_refused(block: Any) -> None:
    app = App(paths=["/v1/messages"])
    reply = app.client().post("/v1/messages", json={"messages": [user("Hello."), user({"type": "text"}, block)]})
    assert reply.status_code == 400 and not app.bodies
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert "messages.1.content.1" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages": [{"role": "user", "content": "documents"}], "max_tokens": 4}',
        b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a \\u00e9 document"}]}]}',
        b'{"messages": "document", "documents": []}',
        b'{"query": "x", "documents": ["y"]}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/invocations"])
def test_bodies_without_documents_pass_byte_for_byte(path: str, content: bytes) -> None:
    app = App(paths=[path])
    app.client().post(path, content=content)
    assert app.bodies == [content]


@pytest.mark.parametrize("content", [b'["documents"]', b"documents {", b"[" * 100_000 + b"documents"])
def test_what_is_no_body_of_a_prompt_is_left_to_vllm(content: bytes) -> None:
    check_no_documents(content, "/v1/messages")


def test_routes_that_take_documents_themselves_are_left_alone() -> None:
    app = App(paths=["/rerank"])
    assert app.client().post("/rerank", json={"query": "x", "documents": ["y"], "prompt": ""}).status_code == 200
    assert len(app.bodies) == 1


def test_key_is_checked_first() -> None:
    app = App(paths=["/v1/messages"])
    client = app.client()
    client.headers.clear()
    assert client.post("/v1/messages", json={"messages": [user(DOCUMENT)]}).status_code == 401
