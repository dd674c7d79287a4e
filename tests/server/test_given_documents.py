"""Documents as clients send them: twice, in several pieces with one id, or without text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.messages import QUESTION, document, user
from support.server import RunningServer

MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]
CHAT = "/v1/chat/completions"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": ["Where?", "Who?"], "max_tokens": 1},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1, "model": "reader"},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "model": "reader"},
    "/tokenize": {"prompt": "Where?"},
}
FERRY, MILL = {"id": "m", "text": "The ferry goes to Oak Island."}, {"id": "m", "text": "The mill grinds oats."}
ZOO = {"text": "The zoo has three owls."}


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with RunningServer(strict=True) as server:
        yield server


def ask(server: RunningServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={**ROUTES[path], **fields}, timeout=60)


def read(server: RunningServer, *documents: Any) -> tuple[list[Any], list[str]]:
    """The names of the documents in the prompt, and the warnings."""
    reply = ask(server, documents=documents)
    assert reply.status_code == 200, reply.text
    report = reply.json()["kvmosaic"]
    return [each["name"] for each in report["documents"]], report["warnings"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_list_with_a_repeat_and_a_blank_document_is_answered_as_without_them(
    server: RunningServer, path: str
) -> None:
    reply = ask(server, path, documents=[FERRY, "  ", FERRY, ZOO])
    assert reply.status_code == 200, reply.text
    warnings = [
        "documents left out, since their texts are blank: documents.1",
        "documents read once, though sent again: documents.2 ('m')",
    ]
    assert reply.headers["x-kvmosaic-warning"] == "; ".join(warnings)
    if (report := reply.json().get("kvmosaic")) is not None:
        assert report["warnings"] == warnings


def test_pieces_of_one_file_get_names_that_are_free(server: RunningServer) -> None:
    names, warnings = read(server, FERRY, MILL, {"id": "m#2", "text": "Owls."}, {**FERRY, "title": "x"}, MILL)
    assert names == ["m", "m#3", "m#2", "m#4"]
    assert warnings == [
        "documents read once, though sent again: documents.4 ('m')",
        "documents renamed, since another text has the id: documents.1 ('m') to #3, documents.3 ('m') to #4",
    ]
    assert read(server, FERRY, {**FERRY, "id": "n"}) == (["m", "n"], [])


def test_only_blank_documents_are_none(server: RunningServer) -> None:
    names, warnings = read(server, {"id": "a", "text": ""}, "\n\t ")
    assert names == [] and warnings == [
        "documents left out, since their texts are blank: documents.0 ('a'), documents.1"
    ]


def test_a_stored_document_named_twice_is_read_once(server: RunningServer) -> None:
    assert httpx.put(server.url + "/v1/documents/guide", json={"text": "Owls sleep by day."}).status_code == 201
    names, warnings = read(server, {"id": "guide"}, {"id": "guide"}, {"id": "guide", "text": "Other."})
    assert len(names) == 2 and "'guide') to #2" in warnings[1]


def test_numbers_in_sees_and_in_errors_are_those_of_the_body(server: RunningServer) -> None:
    question = {"role": "user", "content": "word " * 1_950}  # leaves no room for parts
    error = ask(server, documents=["", {"text": "word " * 5_000}], messages=[question]).json()["error"]
    assert error["param"] == "documents.1" and "do not count in numbers" in error["message"], error
    reply = ask(server, documents=[FERRY, MILL, {**ZOO, "sees": ["m"]}])
    assert reply.status_code == 400 and "several texts have this id" in reply.json()["error"]["message"]
    seeing = [FERRY, "", ZOO, {"text": "Owls.", "sees": [1, 2]}]
    assert ask(server, documents=seeing).status_code == 200
    reply = ask(server, documents=["", *seeing[:2], {**ZOO, "sees": [5]}])
    assert reply.status_code == 400 and "lists chunk 5" in reply.json()["error"]["message"]


def test_blank_blocks_are_left_out(server: RunningServer, strict: RunningServer) -> None:
    result = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": " "}]}
    blocks = [document("\n", context="c"), document("The ferry goes to Oak Island."), result, QUESTION]
    reply = ask(server, "/v1/messages", messages=[user(*blocks)])
    assert reply.status_code == 200, reply.text
    assert reply.json()["kvmosaic"]["warnings"] == [
        "documents left out, since their texts are blank: messages.0.content.0, messages.0.content.2"
    ]
    refused = ask(strict, "/v1/messages", messages=[user(*blocks)])
    assert refused.status_code == 400 and "messages.0.content.0: a document's text is blank" in refused.text


def test_warnings_about_many_documents_are_short(server: RunningServer) -> None:
    reply = ask(server, "/tokenize", documents=[FERRY] * 100)
    assert reply.headers["x-kvmosaic-warning"].endswith("documents.16 ('m') and 83 more")


def test_a_strict_server_refuses_repeats_and_blank_documents(strict: RunningServer) -> None:
    for documents, message in (([FERRY, FERRY], "same id"), (["", FERRY], "document number 1: a document's text is")):
        reply = ask(strict, documents=documents)
        assert reply.status_code == 400 and message in reply.json()["error"]["message"]
