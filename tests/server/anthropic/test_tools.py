"""Tools through the `anthropic` package, against a real server with random weights: forced calls, streams, turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from support.messages import body, document, user
from support.server import RunningServer
from support.tool_families import tool_model

DAYS = {"type": "integer", "minimum": 0, "maximum": 99}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False}
    return {"name": name, "description": f"Does {name}.", "input_schema": schema}


TOOLS = [tool("weather", city={"enum": ["Oslo", "Rome"]}, days=DAYS), tool("add", a=DAYS, b=DAYS)]
SCHEMAS = {each["name"]: each["input_schema"] for each in TOOLS}


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def calling(request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    with (
        RunningServer(loaded=tool_model(request.param)) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def ask(client: anthropic.Anthropic, *messages: Any, **fields: Any) -> dict[str, Any]:
    given = {"tools": TOOLS, "max_tokens": 200, "extra_body": {"seed": 5, "temperature": 1}, **fields}
    return body(*(messages or [user("Is it cold in Oslo?")]), **given)


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_forced_calls_keep_to_their_schema_whole_and_streamed(calling: anthropic.Anthropic, choice: Any) -> None:
    fields = ask(calling, tool_choice={**choice, "disable_parallel_tool_use": True})
    whole = calling.messages.create(**fields)
    assert whole.stop_reason == "tool_use"
    ((name, given),) = calls_of(whole)
    jsonschema.validate(given, SCHEMAS[name])
    assert choice.get("name", name) == name
    with calling.messages.stream(**fields) as stream:
        deltas = [event.delta.partial_json for event in stream if _is_input(event)]
        final = stream.get_final_message()
    assert calls_of(final) == calls_of(whole) and final.stop_reason == "tool_use"
    assert json.loads("".join(deltas)) == given


def _is_input(event: Any) -> bool:
    return event.type == "content_block_delta" and event.delta.type == "input_json_delta"


def test_a_call_that_a_stop_text_cuts_is_not_to_be_run(calling: anthropic.Anthropic) -> None:
    fields = ask(calling, tool_choice={"type": "tool", "name": "add"}, stop_sequences=['"b"'])
    whole = calling.messages.create(**fields)
    assert (whole.stop_reason, whole.stop_sequence, len(calls_of(whole))) == ("stop_sequence", '"b"', 1)
    with calling.messages.stream(**fields) as stream:
        assert stream.get_final_message().stop_reason == "stop_sequence"


def test_turns_with_calls_and_results_are_read(calling: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_123", "name": "weather", "input": {"city": "Oslo", "days": 1}}
    letter = document("It is very cold in the town of Oslo today.", title="Weather")
    results = ["Cold.", [{"type": "text", "text": "Cold."}], [letter], []]
    counts = []
    for content in results:
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_123",
            **({} if content is None else {"content": content}),
        }
        turns = [
            user("Is it cold in Oslo?"),
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]},
            user(result),
        ]
        reply = calling.messages.create(**ask(calling, *turns, tool_choice={"type": "none"}, max_tokens=4))
        counts.append(reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0))
        assert reply.stop_reason in ("max_tokens", "end_turn")
    assert counts[0] == counts[1]


def test_order_of_tools_does_not_matter(calling: anthropic.Anthropic) -> None:
    blocks = [document("The ferry of Oslo goes to Oak Island."), {"type": "text", "text": "Where does it go?"}]
    none = {"type": "none"}
    first = calling.messages.create(**ask(calling, user(*blocks), tool_choice=none, max_tokens=2))
    other = calling.messages.create(**ask(calling, user(*blocks), tools=TOOLS[::-1], tool_choice=none, max_tokens=2))
    assert first.usage.cache_read_input_tokens == 0 or first.usage.cache_creation_input_tokens
    assert other.usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tool_choice": {"type": "tool", "name": "sing"}}, "sing"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name"),
        ({"tools": TOOLS * 100}, "tools"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(calling: anthropic.Anthropic, fields: Any, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said):
        calling.messages.create(**ask(calling, **fields))
