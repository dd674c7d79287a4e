"""Later turns of conversations over HTTP: the documents and the history come from the cache."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.asking import DOCUMENTS, MESSAGES, chat, post
from support.server import RunningServer

AGAIN = {"role": "user", "content": "And what does the mill grind?"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}


def segments(reply: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Kind, tokens and reused tokens of a reply's segments."""
    return [(one["kind"], one["tokens"], one["reused_tokens"]) for one in reply["kvmosaic"]["segments"]]


def check_second_turn(first: dict[str, Any], second: dict[str, Any], num_documents: int) -> None:
    """Everything but the end of the question is reused."""
    *before, (_, total, reused) = segments(second)
    assert all(tokens == known for _, tokens, known in before)
    assert sum(kind == "chunk" for kind, _, _ in before) == num_documents
    assert segments(first)[-1][1] <= reused < total, second["kvmosaic"]
    assert "tokens from earlier turns" in second["kvmosaic"]["segments"][-1]["note"]


def gone_on(messages: list[Any], reply: dict[str, Any]) -> list[Any]:
    said = reply["choices"][0]["message"]["content"]
    return [*messages, {"role": "assistant", "content": said}, AGAIN]


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_a_second_turn_over_the_same_documents(http, strategy):
    fields = {"documents": DOCUMENTS, "cache_salt": f"turns {strategy}", "ignore_eos": False}
    first = chat(http, **fields)
    second = chat(http, **{**fields, "messages": gone_on(MESSAGES, first)})
    assert "earlier turns" not in first["kvmosaic"]["segments"][-1]["note"]
    check_second_turn(first, second, 3)


def test_a_second_turn_over_documents_that_are_stored(http):
    for document in DOCUMENTS[:2]:
        reply = http.put(f"/v1/documents/turns-{document['id']}", json={"text": document["text"]})
        assert reply.status_code == 201
    fields = {"documents": [{"id": "turns-ferry"}, {"id": "turns-mill"}], "ignore_eos": False}
    first = chat(http, **fields)
    check_second_turn(first, chat(http, **{**fields, "messages": gone_on(MESSAGES, first)}), 2)
    for document in DOCUMENTS[:2]:
        assert http.delete(f"/v1/documents/turns-{document['id']}").status_code == 200


def test_a_second_turn_of_the_responses_route(http):
    fields = {"documents": DOCUMENTS, "cache_salt": "turns of responses", "temperature": 0, "max_output_tokens": 8}
    first = post(http, "/v1/responses", input=MESSAGES, **fields)
    said = first["output"][0]
    turns = [*MESSAGES, {key: said[key] for key in ("type", "role", "content", "id", "status")}, AGAIN]
    check_second_turn(first, post(http, "/v1/responses", input=turns, **fields), 3)


def test_marked_documents_of_the_first_turn_stay_documents(http):
    parts = [{"type": "text", "text": one["text"], **EPHEMERAL} for one in DOCUMENTS]
    asked = {"role": "user", "content": [*parts, {"type": "text", "text": "Where does the ferry go, and when?"}]}
    fields = {"cache_salt": "marked turns", "ignore_eos": False}
    first = chat(http, messages=[MESSAGES[0], asked], **fields)
    check_second_turn(first, chat(http, messages=gone_on([MESSAGES[0], asked], first), **fields), 3)


def test_separated_documents_of_the_first_turn_stay_documents():
    with RunningServer(chunk_separator="##") as server, httpx.Client(base_url=server.url, trust_env=False) as http:
        asked = [
            {"role": "user", "content": "Be brief. ## The ferry goes. ## The mill grinds oats. ## Where does it go?"}
        ]
        first = chat(http, messages=asked, ignore_eos=False)
        second = chat(http, messages=gone_on(asked, first))
        check_second_turn(first, second, 2)
        more = {"role": "user", "content": "A note. ## The zoo has owls. ## What is in the zoo?"}
        third = chat(http, messages=[*gone_on(asked, first), {"role": "assistant", "content": "Oats."}, more])
        known = [reused == tokens for kind, tokens, reused in segments(third) if kind == "chunk"]
        assert known == [True, True, False, False], "the documents of a later turn come behind the earlier ones"


def test_forks_of_one_conversation_share_its_history(http):
    fields = {"documents": DOCUMENTS, "cache_salt": "forks", "ignore_eos": False, "n": 2, "temperature": 0}
    first = chat(http, **fields)
    for question in ("And what does the mill grind?", "How many owls are there?"):
        messages = [*gone_on(MESSAGES, first)[:-1], {"role": "user", "content": question}]
        check_second_turn(first, chat(http, **{**fields, "n": 1, "messages": messages}), 3)
