"""Tools on /v1/responses through the `openai` package, against a real server with random weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response
from support.asking import post
from support.server import RunningServer
from support.tool_families import tool, tool_model

from kvmosaic.engine import AnswerDelta
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.generation.answers import GenerationRequest
from kvmosaic.server.generation.prompts import EncodedPrompt
from kvmosaic.server.openai.response_schemas import ResponseRequest
from kvmosaic.server.openai.responses import ResponseWriter
from kvmosaic.tools import TOOL_FORMATS, CallCollector, CallParser, read_tool_request

QUESTION = "Is it cold in Oslo?"
DAYS = {"type": "integer", "minimum": 0, "maximum": 99}
COMMAND = {"type": "array", "items": {"enum": ["ls", "-l"]}, "minItems": 1, "maxItems": 3}
NESTED = [tool("shell", "Runs a command.", command=COMMAND), tool("add", "Adds two numbers.", a=DAYS, b=DAYS)]
TOOLS: list[dict[str, Any]] = [{"type": "function", **each["function"]} for each in NESTED]  # type: ignore[dict-item]
SCHEMAS = {each["name"]: each["parameters"] for each in TOOLS}
SHELL, ADD = ({"type": "function", "name": each["name"]} for each in TOOLS)
RESULT = "It is cold."


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def tool_server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with RunningServer(loaded=tool_model(request.param)) as running:
        yield running


def ask(client: openai.OpenAI, *items: Any, **fields: Any) -> Any:
    asked = [{"role": "user", "content": QUESTION}, *items]
    given = {"input": asked, "tools": TOOLS, "max_output_tokens": 200, "parallel_tool_calls": False, **fields}
    return client.responses.create(**{"model": "reader", "extra_body": {"seed": 5}, **given})


def chat(client: openai.OpenAI, *messages: Any, **fields: Any) -> Any:
    given = {"messages": [{"role": "user", "content": QUESTION}, *messages], "tools": NESTED, "seed": 5, **fields}
    return client.chat.completions.create(**{"model": "reader", "parallel_tool_calls": False, **given})


def assembled(events: list[Any]) -> list[dict[str, Any]]:
    """The items of a stream, put together from its deltas."""
    items: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if "output_index" not in event:
            continue
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
            items.append(event["item"])
            text = ""
            continue
        assert event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            assert {**event["item"], "status": "in_progress", "content": [], "arguments": ""} == {
                "content": [], "arguments": "", **items[-1]
            }  # fmt: skip
            items[-1] = event["item"]
            assert text == (event["item"].get("arguments") or event["item"].get("content", [{"text": ""}])[0]["text"])
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif not kind.startswith("content_part"):
            assert text == (event["text"] if "text" in event else event["arguments"])
    return items


def test_a_forced_call_keeps_to_its_schema(calling: openai.OpenAI) -> None:
    reply = ask(calling, tool_choice="required")
    (call,) = reply.output
    assert (call.type, call.status, reply.status) == ("function_call", "completed", "completed")
    assert call.id.startswith("fc_") and call.call_id != call.id
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert [each.name for each in reply.tools] == ["shell", "add"]


def test_a_named_call_keeps_to_its_schema_in_a_stream(calling: openai.OpenAI) -> None:
    events = [event.model_dump(exclude_unset=True) for event in ask(calling, tool_choice=SHELL, stream=True)]
    (streamed,) = assembled(events)
    assert (streamed["type"], streamed["name"], streamed["status"]) == ("function_call", "shell", "completed")
    jsonschema.validate(json.loads(streamed["arguments"]), SCHEMAS["shell"])
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["output"] == [streamed]


def test_a_result_goes_back_in_the_next_turn_as_on_the_chat_route(calling: openai.OpenAI) -> None:
    (call,) = ask(calling, tool_choice=ADD).output
    function = {"name": call.name, "arguments": call.arguments}
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": call.call_id, "function": function}]}
    twin = chat(calling, turn, {"role": "tool", "tool_call_id": call.call_id, "content": RESULT}, max_tokens=1)
    for output in (RESULT, [{"type": "input_text", "text": RESULT}]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for sent in (call, call.model_dump()):
            assert ask(calling, sent, result, max_output_tokens=1).usage.input_tokens == twin.usage.prompt_tokens


def test_what_a_real_answer_said_can_be_sent_back_however_it_was_cut(calling: openai.OpenAI) -> None:
    for choice, length, stop in (("auto", 5, []), (ADD, 2, []), (ADD, 12, []), (ADD, 100, ['"b"'])):
        reply = ask(calling, tool_choice=choice, max_output_tokens=length, extra_body={"seed": 5, "stop": stop})
        items = reply.output
        assert items[-1].status == ("incomplete" if stop else reply.status)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
            for item in items
            if item.type == "function_call"
        ]
        again = ask(calling, *items, *results, {"role": "user", "content": "So?"}, max_output_tokens=1)
        assert again.usage.output_tokens == 1


def test_a_body_of_codex_is_answered(calling: openai.OpenAI) -> None:
    turns = [
        ("developer", "You are a coding agent."),
        ("developer", "Files are read."),
        ("user", "cwd: /"),
        ("user", QUESTION),
    ]
    said = [
        {"type": "message", "id": f"msg_{number}", "role": role, "content": [{"type": "input_text", "text": text}]}
        for number, (role, text) in enumerate(turns)
    ]
    others = [
        {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "agents"},
        {"type": "web_search"},
    ]
    body = {
        "model": "reader",
        "input": said,
        "tools": [TOOLS[0] | {"strict": False}, *others],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "extra_body": {"client_metadata": {"thread_id": "0199"}},
        "text": {"verbosity": "medium"},
        "temperature": 0,
    }
    events = list(calling.responses.create(**body, max_output_tokens=8))  # type: ignore[call-overload]
    final = events[-1].response
    assert [each.name for each in final.tools] == ["shell"] and final.parallel_tool_calls is False
    told = [warning.split(" was")[0] for warning in final.kvmosaic["warnings"]]
    assert told[:5] == ["unknown field 'client_metadata'", *["'tools.*'"] * 3, "'reasoning'"]
    assert all("refuses the conversation as it" in each for each in told[5:])
    again = {"input": [*said, *assembled([event.model_dump(exclude_unset=True) for event in events]), *said]}
    reply = calling.responses.create(**{**body, **again, "stream": False, "reasoning": None}, max_output_tokens=1)
    assert reply.usage.input_tokens > final.usage.input_tokens


def test_tools_in_the_form_of_the_chat_route_are_read(tool_server: RunningServer) -> None:
    nested = [each | {"kept": 1} for each in NESTED]
    fields = {"tools": nested, "tool_choice": {"type": "function", "function": {"name": "add"}}, "top_logprobs": 1}
    with httpx.Client(base_url=tool_server.url, timeout=60, trust_env=False) as http:
        read = post(http, "/v1/responses", input=QUESTION, max_output_tokens=1, **fields)
    assert [each["name"] for each in read["tools"]] == ["shell", "add"] and read["tool_choice"] == ADD
    assert read["kvmosaic"]["warnings"] == [
        "unknown field 'tools.*.kept' was ignored",
        "log probabilities were ignored: answers that may call tools have none",
    ]


class Scripted:
    """Runs every prompt by saying a text in pieces."""

    admission = None

    def __init__(self, pieces: list[str], *ending: str | None) -> None:
        self._pieces, self._ending = pieces, ending

    async def run(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        for piece in self._pieces[:-1]:
            yield SimpleNamespace(answers=[AnswerDelta(0, piece, (), None, None, None)], reuse=None)
        last: Any = (self._pieces[-1], (), None, *self._ending)
        yield SimpleNamespace(answers=[AnswerDelta(0, *last)], reuse=None)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é\\n"}}\n</tool_call>'
SAID = st.lists(st.sampled_from([CALL, "Let me see.", "\n", "<tool_call>", "Done: {"]), max_size=4).map("".join)
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
THOUGHTS = st.sampled_from([THOUGHT, THOUGHT + CALLED, f"{THOUGHT}<|channel|>final<|message|>A"])
WRITTEN = st.one_of(st.tuples(st.just("hermes"), SAID), st.tuples(st.just("harmony"), THOUGHTS))


@given(
    WRITTEN, st.integers(1, 40), st.integers(0, 200), st.sampled_from([("stop", None), ("stop", "x"), ("length", None)])
)
def test_every_item_that_is_sent_can_come_back(
    written: tuple[str, str], size: int, length: int, ending: tuple[str, str | None]
) -> None:
    name, text = written[0], written[1][:length]
    request = read_tool_request(NESTED)
    assert request is not None
    tools: Any = SimpleNamespace(parser=lambda: CallParser(TOOL_FORMATS[name], request.callable_tools))
    runner: Any = Scripted([text[at : at + size] for at in range(0, len(text), size)] or [""], *ending)
    prompt = EncodedPrompt(Prompt.plain([1]))
    nothing: Any = None
    asked = GenerationRequest(runner, nothing, "/v1/responses", "a", 1, [prompt], SamplingParams())
    body = ResponseRequest.model_validate({"input": "a", "tools": TOOLS})
    writer = ResponseWriter(asked, body, "reader", nothing, tools)

    async def streamed() -> list[str]:
        return [told async for told in writer.events()]

    events = [json.loads(told.partition("data: ")[2]) for told in asyncio.run(streamed())]
    items, final = assembled(events), events[-1]["response"]
    assert items == final["output"] and Response.model_validate(final).output
    assert final["status"] == ("incomplete" if ending[0] == "length" else "completed")
    collector, parser = CallCollector(), tools.parser()
    collector.add([*parser.feed(text), *parser.finish()])
    said = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
    assert ("".join(said), len({item["id"] for item in items})) == (collector.content, len(items))
    *turns, _ = ResponseRequest.model_validate({"input": [*items, {"role": "user", "content": "So?"}]}).plain_messages()
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    assert [tuple(call["function"].values()) for call in calls] == [(c.name, c.arguments) for c in collector.calls]
    assert "".join(turn.get("reasoning_content", "") for turn in turns) == collector.reasoning
    assert len(turns) == 1 or not calls
    is_called = bool(calls) and parser.is_called(ending[1])
    is_whole = is_called if items[-1]["type"] == "function_call" else True
    assert (items[-1]["status"] == "completed") == (is_whole and ending[0] == "stop")
