"""Documents in messages: in the format of the chat template or at their place, computed once, reused in any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from support.asking import chat
from support.messages import MARK, QUESTION, body, document, prompt_tokens, user
from support.server import RunningServer
from support.tool_families import tool_model

ASK = "Where does the boat go?"


@pytest.fixture(scope="module")
def placing() -> Iterator[anthropic.Anthropic]:
    """A model whose chat template has no format for documents."""
    with (
        RunningServer(loaded=tool_model("hermes")) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def texts(name: str) -> list[dict[str, Any]]:
    """Documents that no other test uses, not even their beginnings."""
    return [
        document(f"The boat of {name} goes to Oak Island.", title=f"{name} boat"),
        document(f"The mill of {name} grinds oats and rye for the town.", context=f"{name}, from a letter."),
        document(f"{name} zoo has three owls and a bear."),
    ]


def segments(reply: Any) -> list[tuple[str, str]]:
    return [(each["kind"], each["action"]) for each in reply.kvmosaic["segments"]]


def actions(reply: Any) -> list[str]:
    return [each["action"] for each in reply.kvmosaic["documents"]]


def test_documents_are_reused_in_any_order(client: anthropic.Anthropic) -> None:
    blocks = texts("Fenbury")
    first = client.messages.create(**body(user(*blocks, {"type": "text", "text": ASK})))
    assert actions(first) == ["computed"] * 3
    assert first.usage.cache_creation_input_tokens
    assert (first.usage.cache_read_input_tokens or 0) <= 1, "the BOS token, which another test may have cached"
    again = client.messages.create(**body(user(*blocks[::-1], {"type": "text", "text": ASK})))
    assert not set(actions(again)) & {"computed", "partly reused"}
    documents = sum(each["tokens"] for each in again.kvmosaic["documents"])  # type: ignore[attr-defined]
    assert again.usage.cache_read_input_tokens is not None and again.usage.cache_read_input_tokens >= documents
    assert again.usage.cache_creation_input_tokens == 0
    assert prompt_tokens(again.usage) == prompt_tokens(first.usage)


def test_template_with_a_format_for_documents_writes_them_first(client: anthropic.Anthropic) -> None:
    boat, mill, _ = texts("Thames")
    said: list[Any] = [{"type": "text", "text": text} for text in ("First read this:", ASK)]
    reply = client.messages.create(**body(user(said[0], boat, said[1], mill), system="Be brief."))
    assert [kind for kind, _ in segments(reply)] == ["system", "chunk", "chunk", "question"]


def test_documents_stay_where_they_were_written(placing: anthropic.Anthropic) -> None:
    client = placing
    boat, mill, _ = texts("Bellos")
    said: list[Any] = [{"type": "text", "text": text} for text in ("First read this:", "Then this:", ASK)]
    reply = client.messages.create(**body(user(said[0], boat, said[1], mill, said[2]), system="Be brief."))
    kinds = [kind for kind, _ in segments(reply)]
    assert kinds == ["system", "text", "chunk", "text", "chunk", "question"]
    moved = client.messages.create(**body(user(said[1], mill, boat, said[2]), system="Be brief."))
    assert "computed" not in actions(moved)


def test_documents_in_place_are_reused_in_any_order(placing: anthropic.Anthropic) -> None:
    blocks = texts("Medway")
    first = placing.messages.create(**body(user(*blocks, {"type": "text", "text": ASK}), system="Be brief."))
    again = placing.messages.create(**body(user(*blocks[::-1], {"type": "text", "text": ASK}), system="Be brief."))
    assert actions(first) == ["computed"] * 3 and not set(actions(again)) & {"computed", "partly reused"}
    assert prompt_tokens(again.usage) == prompt_tokens(first.usage)


def test_document_in_a_later_turn_leaves_the_history_cached(placing: anthropic.Anthropic) -> None:
    client = placing
    boat, mill, zoo = texts("Harbour")
    turns = [user(boat, {"type": "text", "text": ASK})]
    first = client.messages.create(**body(*turns, system="Be brief."))
    turns += [{"role": "assistant", "content": first.content[0].text}, user(mill, zoo, QUESTION)]
    second = client.messages.create(**body(*turns, system="Be brief."))
    assert actions(second)[1:] == ["computed", "computed"] and actions(second)[0] != "computed"
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage) - 16  # but for a block that is not full


def test_document_is_the_same_as_in_the_field_documents(client: anthropic.Anthropic, http: httpx.Client) -> None:
    boat, *_ = texts("Lower Town")
    said = {"title": boat["title"], "text": boat["source"]["data"]}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    assert chat(http, messages=messages, documents=[said])["kvmosaic"]["documents"][0]["action"] == "computed"
    reply = client.messages.create(**body(user(boat, {"type": "text", "text": ASK}), system="Be brief."))
    assert "computed" not in actions(reply)


@pytest.mark.parametrize("place", ["client", "placing"])
def test_field_documents_come_before_documents_of_messages(place: str, request: pytest.FixtureRequest) -> None:
    client: anthropic.Anthropic = request.getfixturevalue(place)
    boat, *_ = texts("Upper Town")
    listed = [{"id": "mill", "text": "The mill of Upper Town grinds oats and rye."}]
    reply = client.messages.create(
        **body(user(boat, {"type": "text", "text": ASK}), system="Be brief.", extra_body={"documents": listed})
    )
    assert [each["name"] for each in reply.kvmosaic["documents"]] == ["mill", boat["title"]]  # type: ignore[attr-defined]


def test_blocks_of_a_source_and_search_results_are_documents(client: anthropic.Anthropic) -> None:
    parts = [{"type": "text", "text": "The boat of Wells goes"}, {"type": "text", "text": "to Oak Island."}]
    blocks = [
        {"type": "document", "source": {"type": "content", "content": parts}},
        {"type": "search_result", "source": "wells.example", "title": "Wells", "content": parts[:1]},
        {"type": "document", "source": {"type": "content", "content": "The boat of Wells is blue."}},
    ]
    reply = client.messages.create(**body(user(*blocks, {"type": "text", "text": ASK})))
    assert [each["name"] for each in reply.kvmosaic["documents"]] == [None, "Wells", None]  # type: ignore[attr-defined]


def test_model_reads_title_and_context_before_the_text(client: anthropic.Anthropic) -> None:
    text = "The boat of Marsh goes to Oak Island."
    bare, titled, explained = (
        client.messages.count_tokens(
            model="reader", messages=[user(document(text, **fields), {"type": "text", "text": ASK})]
        ).input_tokens
        for fields in ({}, {"title": "Marsh"}, {"title": "Marsh", "context": "A note."})
    )
    assert bare < titled < explained


def test_mark_of_a_system_block_ends_the_preamble(client: anthropic.Anthropic) -> None:
    boat, *_ = texts("Dover")

    def ask(changing: str) -> Any:
        system = [{"type": "text", "text": "Answer from documents.", "cache_control": MARK}]
        system.append({"type": "text", "text": changing})
        return client.messages.create(**body(user(boat, {"type": "text", "text": ASK}), system=system))

    assert actions(ask("The user is Ada.")) == ["computed"]
    assert "computed" not in actions(ask("The user is somebody else, whose name is Grace."))


@pytest.mark.parametrize("place", ["client", "placing"])
def test_marked_text_is_a_document_unless_it_is_the_last(place: str, request: pytest.FixtureRequest) -> None:
    client: anthropic.Anthropic = request.getfixturevalue(place)
    long = {"type": "text", "text": "The boat of Cove goes to Oak Island every day.", "cache_control": MARK}
    last = {"type": "text", "text": ASK, "cache_control": MARK}
    reply = client.messages.create(**body(user(long, last)))
    assert [kind for kind, _ in segments(reply)][-2:] == ["chunk", "question"]
    alone = client.messages.create(**body(user({"type": "text", "text": ASK}, {**long})))
    assert all(kind != "chunk" for kind, _ in segments(alone))


@pytest.mark.parametrize("place", ["client", "placing"])
def test_documents_alone_are_a_message(place: str, request: pytest.FixtureRequest) -> None:
    client: anthropic.Anthropic = request.getfixturevalue(place)
    reply = client.messages.create(**body(user(*texts("Alone"))))
    assert len(actions(reply)) == 3


def test_salted_documents_are_not_shared(client: anthropic.Anthropic) -> None:
    blocks = [*texts("Salt"), {"type": "text", "text": ASK}]
    for salt in ("one", "two"):
        reply = client.messages.create(**body(user(*blocks), extra_body={"cache_salt": salt}))
        assert set(actions(reply)) == {"computed"}


@pytest.mark.parametrize("where", ["first", "last"])
def test_separators_in_documents_are_text(client: anthropic.Anthropic, where: str) -> None:
    blocks = [document("The boat ## goes ## to Oak Island."), {"type": "text", "text": ASK}]
    reply = client.messages.create(**body(user(*(blocks if where == "first" else blocks[::-1]))))
    assert len(actions(reply)) == 1
