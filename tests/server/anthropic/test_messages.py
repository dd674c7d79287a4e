"""Replies, streams and token counts of /v1/messages, through the `anthropic` package."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from support.asking import chat
from support.messages import MARK, QUESTION, body, document, plain, prompt_tokens, user
from support.server import RunningServer

FERRY = document("The ferry of Bellos goes to Oak Island.", title="The ferry")


def test_reply_has_the_shape_of_anthropic(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(**body(system="Answer briefly."))
    assert reply.id.startswith("msg_") and (reply.type, reply.role, reply.model) == ("message", "assistant", "reader")
    assert [block.type for block in reply.content] == ["text"]
    assert reply.stop_sequence is None and reply.stop_reason in ("end_turn", "max_tokens")
    assert reply.usage.output_tokens > 0
    assert reply.kvmosaic["composition"]  # type: ignore[attr-defined]


def test_answer_is_that_of_the_chat_route(client: anthropic.Anthropic, http: httpx.Client) -> None:
    system, question = "Answer from the documents.", "Where does the ferry go?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    expected = chat(http, messages=messages, ignore_eos=False)
    for said in (system, [{"type": "text", "text": system}]):
        reply = client.messages.create(**body(user(question), system=said))
        assert reply.content[0].text == expected["choices"][0]["message"]["content"]
        assert prompt_tokens(reply.usage) == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stream_reassembled_equals_the_reply(client: anthropic.Anthropic, ignore_eos: bool) -> None:
    fields = body(user(FERRY, QUESTION), extra_body={"ignore_eos": ignore_eos})
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [
        {**block.to_dict(), "parsed_output": None} for block in whole.content
    ] or [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)
    kinds = [event.type for event in events if event.type != "text"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_events_are_named_by_their_type(http: httpx.Client) -> None:
    with http.stream("POST", "/v1/messages", json=plain(stream=True)) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    data = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [each["type"] for each in data] == names
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[-2]["kvmosaic"]["segments"]


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    endless = {"ignore_eos": True}
    cut = client.messages.create(**body(max_tokens=4, extra_body=endless))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 4)
    stop = cut.content[0].text.strip()[:4]
    stopped = client.messages.create(**body(max_tokens=8, stop_sequences=["@@", stop], extra_body=endless))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stop not in "".join(block.text for block in stopped.content)
    assert client.messages.create(**body(max_tokens=64)).stop_reason == "end_turn"


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "Answer from the documents."},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": MARK}, {"type": "text", "text": "Today."}]},
        {"messages": [user(FERRY, document("The mill of Fenbury grinds oats and rye."), QUESTION)]},
        {"messages": [user("Hello."), {"role": "assistant", "content": "Hello!"}, user(QUESTION)]},
        {"messages": [user(QUESTION), {"role": "assistant", "content": "The ferry goes to"}]},
    ],
)
def test_count_is_the_sum_of_usage(client: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    given = {**body(), **fields}
    counted = client.messages.count_tokens(**{name: given[name] for name in given if name != "max_tokens"})
    assert counted.input_tokens == prompt_tokens(client.messages.create(**given).usage)


def test_answer_continues_the_last_message_of_the_assistant(client: anthropic.Anthropic) -> None:
    begun = {"role": "assistant", "content": "The ferry goes to Oak"}
    reply = client.messages.create(**body(user(QUESTION), begun, extra_body={"ignore_eos": True}))
    chat_like = client.messages.create(**body(user(QUESTION), extra_body={"ignore_eos": True}))
    assert prompt_tokens(reply.usage) > prompt_tokens(chat_like.usage)
    assert not reply.content[0].text.startswith("The ferry goes to Oak")


def test_neighbours_with_the_same_role_are_one_message(client: anthropic.Anthropic) -> None:
    one = client.messages.create(**body(user({"type": "text", "text": "Hello."}, QUESTION)))
    two = client.messages.create(**body(user("Hello."), user(QUESTION)))
    assert one.content == two.content and prompt_tokens(one.usage) == prompt_tokens(two.usage)


def test_a_body_of_claude_code_is_answered(client: anthropic.Anthropic) -> None:
    asked = user({"type": "text", "text": "<system-reminder>"}, {**QUESTION, "cache_control": MARK})
    late = {"role": "system", "content": "Answer in French."}
    system = [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Work.", "cache_control": MARK}]
    ignored = {"context_management": {"edits": []}, "output_config": {"effort": "high"}}
    fields = {"messages": [asked, late], "system": system, "thinking": {"type": "adaptive"}, "extra_body": ignored}
    told = "the model's chat template refuses the conversation as it was sent: system messages were joined, or begin"
    assert any(told in each for each in client.messages.create(**body(**fields)).kvmosaic["warnings"])


def test_form_of_the_answer(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"to": {"enum": ["Oak Island"]}}, "required": ["to"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    reply = client.messages.create(**body(output_config=form, max_tokens=64))
    assert json.loads(reply.content[0].text) == {"to": "Oak Island"}


def test_fields_that_change_nothing_are_accepted(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        **body(
            metadata={"user_id": "u1"},
            service_tier="auto",
            thinking={"type": "disabled"},
            cache_control=MARK,
            extra_body={"top_p": 0.9, "top_k": 5},
            extra_headers={"anthropic-beta": "prompt-caching-2024-07-31"},
        )
    )
    assert reply.content


def test_our_own_fields_are_those_of_the_chat_route(client: anthropic.Anthropic) -> None:
    own = {
        "documents": [{"id": "mill", "text": "The mill of Fenbury grinds oats."}],
        "cache_salt": "a",
        "position_strategy": "sequential",
        "chunk_context": "system",
        "repair": "first(2)",
        "preamble": "all",
        "find_documents": "none",
        "seed": 1,
    }
    reply = client.messages.create(**body(system="Be brief.", extra_body=own))
    report: Any = reply.kvmosaic  # type: ignore[attr-defined]
    assert [each["id"] for each in report["documents"]] == ["mill"]
    assert report["repair"]["policy"] == "first(2)"


def test_keys_come_in_either_header() -> None:
    with RunningServer(api_key="open-sesame") as server:
        for key in ({"api_key": "open-sesame"}, {"auth_token": "open-sesame", "api_key": None}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **key) as client:  # type: ignore[arg-type]
                assert client.messages.create(**body()).content
        with (
            anthropic.Anthropic(base_url=server.url, max_retries=0, api_key="wrong") as client,
            pytest.raises(anthropic.AuthenticationError) as caught,
        ):
            client.messages.create(**body())
        error: Any = caught.value.body
        assert error["error"]["type"] == "authentication_error" and error["request_id"]
        bare = httpx.post(f"{server.url}/v1/messages", json=plain(), trust_env=False)
        assert bare.status_code == 401 and "x-api-key" in bare.json()["error"]["message"]
        other = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "open-sesame"}, trust_env=False)
        assert other.status_code == 200
