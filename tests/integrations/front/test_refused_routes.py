"""Documents on routes of vLLM that cannot compose them are refused, and everything else passes."""

from __future__ import annotations

from typing import Any

import pytest
from support.asking import DOCUMENTS, MESSAGES
from support.messages import document, user
from support.vllm.front import App

from kvmosaic.api.errors import ApiError
from kvmosaic.vllm.front.middleware import FormCheck, check_no_documents

DOCUMENT = document("The ferry goes to Oak Island.")
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}
FOUND = {"type": "search_result", "source": "a", "title": "b", "content": []}


@pytest.mark.parametrize("path", ["/v1/messages", "/tokenize", "/pooling", "/score", "/a/route/of/a/later/version"])
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
    app = App(paths=["/rerank", "/invocations", "/cohere/v2/chat"])
    client = app.client()
    assert client.post("/rerank", json={"query": "x", "documents": ["y"], "prompt": ""}).status_code == 200
    assert client.post("/invocations", json={"query": "x", "documents": ["y"]}).status_code == 200
    assert client.post("/cohere/v2/chat", json={"messages": [user(DOCUMENT)], "documents": ["y"]}).status_code == 200
    assert len(app.bodies) == 3


def test_scores_of_two_texts_have_no_documents() -> None:
    client = App(paths=["/score"]).client()
    assert client.post("/score", json={"text_1": "x", "text_2": "y", "documents": ["z"]}).status_code == 400
    assert client.post("/score", json={"queries": "x", "documents": ["z"]}).status_code == 200


def test_blocks_in_a_batch_of_conversations_are_refused() -> None:
    app = App(paths=["/v1/chat/completions/batch"])
    reply = app.client().post("/v1/chat/completions/batch", json={"messages": [[user("Hello.")], [user(DOCUMENT)]]})
    assert reply.status_code == 400 and "messages.1.0.content.0" in reply.json()["error"]["message"]


@pytest.mark.parametrize("name", ["documents", "Find_documents"])
def test_forms_with_documents_are_refused_and_others_pass_whatever_their_size(name: str) -> None:
    path = "/v1/audio/transcriptions"
    app = App(paths=[path])
    client = app.client(max_body_bytes=1_024)
    sound = {"file": ("documents", b"documents" * 1000)}
    reply = client.post(path, data={"model": "m", name: "x"}, files=sound)
    assert reply.status_code == 400 and path in reply.json()["error"]["message"] and not app.bodies
    with pytest.raises(ValueError):  # the app reads JSON, so it has the whole form
        client.post(path, data={"model": "m", "prompt": name}, files=sound)
    assert len(app.bodies[0]) > 9000


def test_a_field_of_a_form_is_found_across_its_parts() -> None:
    form = b'--x\r\nContent-Disposition: form-data; name="documents"\r\n\r\na\r\n--x--'
    for cut in range(5, 50):
        check = FormCheck("/v1/audio/translations")
        with pytest.raises(ApiError, match="documents are not composed"):
            for part in (form[:cut], form[cut:]):
                check.check(part)


def test_key_is_checked_first() -> None:
    app = App(paths=["/v1/messages"])
    client = app.client()
    client.headers.clear()
    assert client.post("/v1/messages", json={"messages": [user(DOCUMENT)]}).status_code == 401
