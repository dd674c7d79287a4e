from __future__ import annotations

import json

import openai
import pytest
from openai.types.responses import Response
from support.asking import DOCUMENTS, MESSAGES, QUESTION, chat, post, refused

ROUTE = "/v1/responses"
GREEDY = {"temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True, "documents": DOCUMENTS}}
ASKED = {"model": "reader", "instructions": MESSAGES[0]["content"], "input": QUESTION}


def respond(http, **fields):
    return post(
        http, ROUTE, **{"input": QUESTION, "temperature": 0, "max_output_tokens": 8, "ignore_eos": True, **fields}
    )


def test_answer_is_that_of_the_chat_route(http, client):
    response = client.responses.create(**ASKED, **GREEDY)
    twin = chat(http, documents=DOCUMENTS)
    assert response.output_text == twin["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == twin["usage"]["prompt_tokens"]
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.model_extra["kvmosaic"]["documents"][0]["id"] == "ferry"


def test_reply_is_a_valid_response_of_the_openai_package(http):
    reply = respond(http, metadata={"a": "b"}, store=True, top_logprobs=2, instructions="Be brief.")
    read = Response.model_validate(reply, strict=False)
    assert (read.metadata, read.model_extra["store"], read.instructions) == ({"a": "b"}, False, "Be brief.")
    assert len(read.output[0].content[0].logprobs) == 8
    details = reply["usage"]["input_tokens_details"]
    counted = details["cached_tokens"] + details["recomputed_tokens"]
    assert counted == reply["usage"]["input_tokens"] and details["cache_write_tokens"] == 0
    assert reply["usage"]["total_tokens"] == reply["usage"]["input_tokens"] + 8


def test_events_come_in_openais_order(http):
    body = {"input": QUESTION, "stream": True, "temperature": 0, "max_output_tokens": 8, "ignore_eos": True}
    with http.stream("POST", ROUTE, json={**body, "documents": DOCUMENTS}) as reply:
        lines = [line for line in reply.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == names
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas), "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    whole = respond(http, documents=DOCUMENTS)
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(deltas) == text == events[-4]["text"]
    assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    assert events[-1]["response"]["kvmosaic"]["documents"]


def test_stream_parses_with_the_openai_package(client):
    extra = {"documents": DOCUMENTS}
    with client.responses.stream(**ASKED, temperature=0, max_output_tokens=64, extra_body=extra) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed" and final.output_text == "".join(deltas) and "Oak" in final.output_text
    events = list(client.responses.create(**ASKED, **GREEDY, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.usage.output_tokens == 8


def test_conversations_are_lists_of_messages(http, client):
    first = client.responses.create(**ASKED, temperature=0, max_output_tokens=8)
    conversation = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": QUESTION},
        *first.output,
        {"role": "user", "content": [{"type": "input_text", "text": "And the mill?"}], "type": "message"},
    ]
    again = client.responses.create(model="reader", input=conversation, instructions="Answer.", max_output_tokens=4)
    messages = [
        {"role": "system", "content": "Answer.\nBe brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And the mill?"},
    ]
    told = post(http, "/tokenize", messages=messages)
    assert again.usage.input_tokens == told["count"]


def test_marked_parts_are_documents(http):
    part = {"type": "input_text", "text": DOCUMENTS[0]["text"], "prompt_cache_breakpoint": {"mode": "explicit"}}
    content = [part, {"type": "input_text", "text": QUESTION}]
    marked = respond(http, input=[{"role": "user", "content": content}])
    plain = respond(http, documents=[DOCUMENTS[0]["text"]])
    assert marked["output"][0]["content"] == plain["output"][0]["content"]
    assert len(marked["kvmosaic"]["documents"]) == 1


def test_json_keeps_to_its_schema(http):
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "name": "sure", "schema": schema}}
    reply = respond(http, text=form, ignore_eos=False, max_output_tokens=60)
    assert set(json.loads(reply["output"][0]["content"][0]["text"])) == {"sure"}
    assert reply["text"] == form


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "custom", "name": "b"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tool_choice": {"type": "function", "name": "b"}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
        ({"input": [{"type": "local_shell_call", "call_id": "1"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "a"}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "reasoning", "content": [{"type": "other", "text": "a"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_field_is_refused_by_its_name(http, fields, param):
    error = refused(http, ROUTE, **{"input": QUESTION, **fields})
    assert error["status"] == 400 and error["param"].startswith(param), error


def test_nothing_is_kept(http, client):
    for fields in (
        {"input": "a", "previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "1"}]},
    ):
        assert "nothing is kept" in refused(http, ROUTE, **fields)["message"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_what_fails_before_the_first_event_has_its_status(http):
    error = refused(http, ROUTE, input="word " * 20_000, stream=True)
    assert (error["status"], error["code"]) == (400, "context_length_exceeded")
