"""Tools in `LLM.chat`: calls in the outputs, computed tokens of permuted tools, documents, functions as tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from support.tool_families import TOOL_FAMILIES, tool, tool_model

from kvmosaic import LLM, ChunkCacheConfig, RequestOutput, SamplingParams
from kvmosaic.errors import InvalidConfig, InvalidMessages, InvalidTools

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it cold in Oslo?"}]
DAYS = {"type": "integer", "minimum": 0, "maximum": 99}
TOOLS = [tool("weather", city={"enum": ["Oslo", "Rome"]}, days=DAYS), tool("add", a=DAYS, b=DAYS)]
ONE = SamplingParams(temperature=0, max_tokens=1)
DOCUMENTS = [{"id": "a", "text": "Owls see at night. " * 4}, {"id": "b", "text": "Bellos is a donkey. " * 4}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = ChunkCacheConfig(chunk_context="companions")  # else what is short is read in full
    with LLM(tool_model("hermes"), chunk_cache_config=config, self_check=False) as llm:
        yield llm


def computed(output: RequestOutput) -> int:
    """Tokens of the prompt that were computed for this request."""
    return len(output.prompt_token_ids) - output.reuse.reused_tokens


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_calls_are_in_the_outputs_streamed_or_not(family: str) -> None:
    with LLM(tool_model(family), self_check=False) as llm:
        params = SamplingParams(seed=3, max_tokens=300)
        how: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (answer,) = llm.chat(MESSAGES, params, **how)[0].outputs
        last = list(llm.stream(MESSAGES, params, **how))[-1].outputs[0]
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}  # type: ignore[index,call-overload]
    assert [(call.name, call.arguments) for call in last.tool_calls] == [
        (call.name, call.arguments) for call in answer.tool_calls
    ]
    if family == "harmony" and answer.finish_reason == "length":
        return  # reasoning of random weights, which may go on
    assert answer.text == "" and answer.finish_reason == last.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(answer.tool_calls[0].arguments), schemas[answer.tool_calls[0].name])


def test_two_of_twenty_tools_swapped_compute_next_to_nothing(llm: LLM) -> None:
    tools = [tool(f"tool_{number:02}", f"Does thing {number}. " * 8) for number in range(20)]
    swapped = [tools[11], *tools[1:11], tools[0], *tools[12:]]
    cold = llm.chat(MESSAGES, ONE, tools=tools, salt="twenty")[0]
    same = llm.chat(MESSAGES, ONE, tools=tools, salt="twenty")[0]
    other = llm.chat(MESSAGES, ONE, tools=swapped, salt="twenty")[0]
    assert computed(cold) > 1_000 and computed(other) == computed(same) < 32
    assert other.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_day_and_the_order_of_tools_compute_no_document_and_no_tool_again(llm: LLM) -> None:
    def ask(day: str, tools: list[Any]) -> RequestOutput:
        system = {"role": "system", "content": f"Answer from the documents. Today is {day} November 2026."}
        messages = [system, MESSAGES[1]]
        return llm.chat(messages, ONE, documents=DOCUMENTS, tools=tools, salt="day")[0]

    outputs = [ask("Monday, 23", TOOLS), ask("Tuesday, 24", TOOLS[::-1])]
    kept = [
        [segment.reused_tokens == segment.num_tokens for segment in output.reuse.segments if segment.kind != "question"]
        for output in outputs
    ]
    assert kept == [[False] * 4, [True, False, True, True]]  # tools and system text, the day, two documents
    assert computed(outputs[1]) < 100


def test_warmed_documents_are_found_beside_the_same_tools(llm: LLM) -> None:
    llm.warm(DOCUMENTS, system="Be brief.", tools=TOOLS, salt="warmed")
    output = llm.chat(MESSAGES, ONE, documents=DOCUMENTS, tools=TOOLS[::-1], salt="warmed")[0]
    assert all(segment.reused_tokens for segment in output.reuse.segments if segment.kind == "chunk")


def weather(city: str, days: int = 1) -> str:
    """Tells the weather.

    Args:
        city: The city.
        days: For so many days.

    Returns:
        A sentence.
    """
    return f"{city}: cold for {days} days."


def test_a_function_is_a_tool(llm: LLM) -> None:
    (answer,) = llm.chat(MESSAGES, SamplingParams(seed=1), tools=[weather], tool_choice="required")[0].outputs
    assert answer.tool_calls[0].name == "weather"
    with pytest.raises(InvalidMessages, match="cannot be described"):
        llm.chat(MESSAGES, tools=[lambda x: x])


def test_tools_go_with_conversations_and_templates_that_show_them(llm: LLM) -> None:
    with pytest.raises(InvalidTools, match="tools go with a conversation"):
        llm.stream("Hello", tools=TOOLS)
    with pytest.raises(InvalidConfig, match="tool_format is 'xml'; choose one of 'auto', 'harmony'"):
        LLM(llm.model, self_check=False, tool_format="xml")


def test_a_template_without_tools_is_told_of_them_in_the_system_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "3"}]
    with LLM(tool_model("json"), self_check=False) as llm:
        prompt = llm.compose([*MESSAGES, *turns], tools=TOOLS[::-1])
        assert prompt == llm.compose([*MESSAGES, *turns], tools=TOOLS)
        system, _, answer, result, _ = (prompt.text or "").split("<|im_end|>\n")
        assert system.index('{"name": "add"') < system.index('{"name": "weather"') < system.index("Be brief.")
        assert answer.endswith('assistant\n{"name": "add", "arguments": {"a": 1, "b": 2}}') and result.endswith(
            "user\n3"
        )
        assert llm.compose(turns[1:], tools=TOOLS).num_tokens
        llm.warm(DOCUMENTS, system="Be brief.", tools=TOOLS)
        output = llm.chat(MESSAGES, ONE, documents=DOCUMENTS, tools=TOOLS)[0]
        assert all(segment.reused_tokens for segment in output.reuse.segments if segment.kind == "chunk")


def test_no_choice_leaves_the_text_as_it_is(llm: LLM) -> None:
    params = SamplingParams(seed=2, max_tokens=12, ignore_eos=True)
    (none,) = llm.chat(MESSAGES, params, tools=TOOLS, tool_choice="none")[0].outputs
    (auto,) = llm.chat(MESSAGES, params, tools=TOOLS)[0].outputs
    assert none.token_ids == auto.token_ids and not none.tool_calls and not auto.tool_calls
