from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.server import RunningServer

from kvmosaic.api.errors import validation_message
from kvmosaic.prompt.document import ID_RULE

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        (CHAT, {"mesages": MESSAGES}, "mesages", "unknown field 'mesages'; did you mean 'messages'?"),
        (CHAT, {"chat": MESSAGES}, "chat", "unknown field 'chat', while 'messages' is missing"),
        (CHAT, {}, "messages", "messages is missing"),
        (CHAT, {"messages": []}, "messages", "messages: must have at least 1 item, not 0"),
        (CHAT, {"messages": MESSAGES, "documents": [{"content": "x"}]}, "documents.0.content", "did you mean 'text'?"),
        (CHAT, {"messages": MESSAGES, "stop": ["a", 1]}, "stop.1", "stop.1: must be a valid string"),
        (CHAT, {"messages": MESSAGES, "stop": ["a"] * 200}, "stop", "stop: must have at most 128 items, not 200"),
        (
            CHAT,
            {"messages": MESSAGES, "response_format": {"type": "json"}},
            "response_format",
            "response_format: 'type' is 'json'; it must be one of 'text', 'json_object', 'json_schema'",
        ),
        (CHAT, [1], None, "the body: must be a JSON object"),
        ("/v1/documents", {"text": "a", "metadata": {"Colour": 5}}, "metadata.Colour", "must be a valid string"),
        ("/v1/documents", {"id": " a", "text": "a"}, "id", f"id: must be {ID_RULE}"),
        ("/v1/documents:warm", None, None, "the body is missing; send a JSON object, at least {}"),
    ],
)
def test_what_is_wrong_is_said_by_the_name_that_was_sent(
    server: RunningServer, path: str, body: Any, param: str | None, told: str
) -> None:
    reply = httpx.post(server.url + path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert told in reply.json()["error"]["message"]


def test_unknown_addresses_and_methods_say_which_there_are(server: RunningServer) -> None:
    assert "begin with /v1" in httpx.post(server.url + "/chat/completions", json={}).json()["error"]["message"]
    assert httpx.get(server.url + CHAT).json()["error"]["message"] == "this address takes POST only"


def test_faults_that_say_nothing_are_still_told() -> None:
    assert validation_message([]) == ("", "the body: invalid")
    assert validation_message([{"loc": (), "msg": "x", "type": "y"}]) == ("", "the body: x")
