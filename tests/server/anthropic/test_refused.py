"""What /v1/messages refuses, by the exception of the client, and that hostile bodies are bounded."""

from __future__ import annotations

import re
import time
from typing import Any

import anthropic
import httpx
import pytest
from support.messages import MARK, QUESTION, body, document, plain, user
from support.server import RunningServer

PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
DOCUMENT = document("The ferry goes to Oak Island.")
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://fenbury.example/a.png"}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "bard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [user({**DOCUMENT, "source": PDF}, QUESTION)]}, "messages.0.content.0.source: type 'base64'"),
        ({"messages": [user({**DOCUMENT, "source": {"type": "url", "url": "x"}})]}, "nothing is fetched"),
        ({"messages": [user(IMAGE, QUESTION)]}, "type 'image' is not supported: only text can be read"),
        ({"messages": [user({"type": "poem", "text": "x"})]}, "'poem'"),
        ({"messages": [user({"text": "x"})]}, "must be a JSON object with a 'type'"),
        ({"messages": [user(CALL)]}, "goes in a message of the assistant only"),
        ({"messages": [{"role": "assistant", "content": [DOCUMENT]}]}, "goes in a message of the user only"),
        ({"messages": [user(" ")]}, "nothing to answer"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"stop_sequences": ["x"] * 129}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool"),
        ({"container": "c"}, "container"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_request_that_cannot_be_used_says_why(client: anthropic.Anthropic, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**{**body(), **fields})
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert said in error["error"]["message"]
    assert error["request_id"] == caught.value.request_id


@pytest.mark.parametrize("name", ["cache_sallt", "max_completion_tokens", "stop", "n"])
def test_unknown_fields_that_matter_are_refused(http: httpx.Client, name: str) -> None:
    reply = http.post("/v1/messages", json={**plain(), name: "x"})
    assert reply.status_code == 400 and name in reply.json()["error"]["message"]


def test_required_fields_are_required(http: httpx.Client) -> None:
    for name in ("messages", "max_tokens"):
        left = {key: value for key, value in plain().items() if key != name}
        assert name in http.post("/v1/messages", json=left).json()["error"]["message"]


def test_unknown_document_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**{**body(), "extra_body": {"documents": [{"id": "nowhere"}]}})
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


@pytest.mark.parametrize("text", ["word " * 200_000, "word " * 4_000, "word " * 1_980])
def test_prompt_without_room_is_told_in_anthropics_words(http: httpx.Client, text: str) -> None:
    found = []
    for stream in (False, True):
        reply = http.post(
            "/v1/messages", json=plain(user(document("Oats. " * 600), {"type": "text", "text": text}), stream=stream)
        )
        error = reply.json()["error"]
        said = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum; the ", error["message"])
        assert reply.status_code == 400 and error["type"] == "invalid_request_error" and said, error
        assert int(said[1]) > int(said[2])
        found.append(int(said[1]))
    assert found[0] == found[1] >= len(text) // 20


def test_errors_of_other_routes_keep_their_shape(http: httpx.Client) -> None:
    assert set(http.post("/v1/chat/completions", json={}).json()) == {"error"}
    assert set(http.post("/v1/messagesx", json={}).json()) == {"error"}
    unknown = http.post("/v1/messages/batches", json={})
    assert unknown.status_code == 404 and unknown.json()["error"]["type"] == "not_found_error"
    wrong = http.get("/v1/messages")
    assert wrong.status_code == 405 and wrong.json()["type"] == "error"


def test_errors_of_middleware_have_the_shape_too(http: httpx.Client) -> None:
    for content in (b"{", b'{"a": NaN}', b"[" * 100 + b"]" * 100):
        reply = http.post("/v1/messages", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    typed = http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    assert typed.json()["type"] == "error"


def test_long_body_and_full_queue() -> None:
    with RunningServer(max_body_bytes=20_000, max_queue=0, max_num_seqs=1) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(**body(user("x" * 30_000)))
        assert caught.value.status_code == 413
        assert caught.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
        endless = body(max_tokens=4_000, extra_body={"ignore_eos": True, "window_tokens": 64})
        with client.messages.stream(**endless) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError) as full:
                client.messages.create(**body())
            assert full.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
            assert full.value.response.headers["retry-after"]


NESTED: Any = {"type": "text", "text": "x", "cache_control": MARK}
for _ in range(40):
    NESTED = {"type": "tool_result", "tool_use_id": "t", "content": [NESTED]}


@pytest.mark.parametrize(
    "messages",
    [
        [user("x")] * 10_001,
        [user(*[{"type": "text", "text": "x"}] * 10_001)],
        [user(*[DOCUMENT] * 10_000, QUESTION)],
        [user(NESTED)],
        [user(*[{"type": "image", "source": {}}] * 10_000)],
        [{"role": "assistant", "content": [{**CALL, "input": {str(n): [] for n in range(11_000)}}]}],
    ],
)
def test_hostile_bodies_are_bounded(http: httpx.Client, messages: Any) -> None:
    begun = time.thread_time()
    reply = http.post("/v1/messages", json=plain(messages=messages))
    assert reply.status_code == 400, reply.text[:500]
    assert len(reply.content) < 5_000
    assert time.thread_time() - begun < 20


def test_many_messages_with_documents_take_linear_time() -> None:
    from kvmosaic.server.anthropic.request import CountRequest, read_conversation

    def seconds(number: int) -> float:
        text = "The ferry goes to Oak Island. " * 20
        turns = [
            turn
            for index in range(number)
            for turn in (user(document(f"{index} {text}"), QUESTION), {"role": "assistant", "content": "Yes."})
        ]
        asked = CountRequest.model_validate({"messages": turns})
        begun = time.thread_time()
        conversation = read_conversation(asked, "")
        assert len(conversation.places) == number
        placed = conversation.placed
        assert placed is not None
        assert all(len(placed.find(message["content"])) == 1 for message in conversation.messages[::2])
        return time.thread_time() - begun

    few = min(seconds(250) for _ in range(3))
    assert min(seconds(2_500) for _ in range(3)) < max(40 * few, 0.2)
