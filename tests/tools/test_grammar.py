"""Forced calls, token by token with random choices: they parse, and they keep to the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tool_calls import parse_calls
from support.tool_families import TOOL_FAMILIES, tool, tool_tokenizer

from kvmosaic.errors import InvalidSampling, InvalidTools
from kvmosaic.sampling import CallGrammar, Detokenizer, GrammarCompiler, SamplingParams, StructuredOutputs, ToolCalling
from kvmosaic.tools import ToolCall, read_tool_request

EASY = {
    "city": {"enum": ["Oslo", "Rome"]},
    "days": {"type": "integer", "minimum": 0, "maximum": 99},
    "exact": {"type": "boolean"},
}


@cache
def calling_of(family: str) -> ToolCalling:
    return ToolCalling(tool_tokenizer(family), TOOL_FAMILIES[family].template)


@cache
def compiler_of(family: str) -> GrammarCompiler:
    tokenizer = tool_tokenizer(family)
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def written(
    family: str, tools: list[dict[str, Any]], choice: Any, seed: int, *, first: str = "", parallel: bool = True
) -> tuple[str, tuple[ToolCall, ...], bool]:
    """Content and calls of an answer of random allowed tokens, and whether it is complete.

    Tokens that spell `first` are taken where they are allowed; the end is taken as soon as it is.
    """
    request = read_tool_request(tools, choice, parallel)
    assert request is not None
    first = first or "<|channel|>commentary" * (family == "harmony")
    params, tokenizer = calling_of(family).sampling(SamplingParams(), request), tool_tokenizer(family)
    compiler = compiler_of(family)
    assert isinstance(params.structured_outputs, CallGrammar)
    matcher = compiler.compile(params.structured_outputs).start()
    detokenizer = Detokenizer(tokenizer, shown_ids=tuple(params.shown_special_token_ids or ()))
    vocabulary, draw, text = matcher.vocabulary, random.Random(seed), ""
    wanted = tokenizer(first, add_special_tokens=False)["input_ids"]
    ends = set(vocabulary.eos_token_ids)
    for _ in range(2_000):
        if matcher.is_complete:
            break
        allowed = np.flatnonzero(vocabulary.begin(matcher)).tolist()
        assert not matcher.failure and allowed
        if wanted and wanted[0] in allowed:
            token = wanted.pop(0)
        elif ends & set(allowed):
            break
        else:
            token = draw.choice(allowed)
        text += detokenizer.append(token)
        matcher.take(token)
    else:
        return text, (), False
    hidden_params = SamplingParams()
    content, calls = parse_calls(calling_of(family).parser(request, hidden_params), text + detokenizer.flush())
    return content, calls, True


def check(tools: list[dict[str, Any]], calls: tuple[ToolCall, ...]) -> None:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_parses_and_validates(family: str, seed: int) -> None:
    tools = [tool("weather", **EASY), tool("weather_of_week", **EASY), tool("add", a=EASY["days"], b=EASY["days"])]
    content, calls, is_complete = written(family, tools, "required", seed)
    assert is_complete and not content and calls
    check(tools, calls)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_named_call_is_of_this_tool(family: str) -> None:
    tools = [tool("weather", **EASY), tool("add", a=EASY["days"])]
    for seed in range(3):
        choice = {"type": "function", "function": {"name": "add"}}
        _, calls, is_complete = written(family, tools, choice, seed)
        assert is_complete and [call.name for call in calls] == ["add"]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names[::2], "additionalProperties": False}


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 999},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "b c", 'd"e', "☃", 3]},
        {"const": "</tool_call>"},
        {"type": "string", "maxLength": 8},
        {"type": "string", "enum": ["x", "y\nz"]},
        {"type": "number", "minimum": 0, "maximum": 9},
    ]
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(
            _object, st.dictionaries(st.sampled_from(["a", "b-c", "d_e", "name", "arguments"]), inner, max_size=3)
        ),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "mistral_args", "deepseek_v3", "qwen3_coder"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    properties=st.dictionaries(st.sampled_from(["q", "limit", "a.b", "parameters"]), SCHEMAS, max_size=3),
    seed=st.integers(0, 99),
)
def test_forced_calls_keep_to_any_schema(family: str, properties: dict[str, Any], seed: int) -> None:
    if family == "qwen3_coder":
        properties = {name: about for name, about in properties.items() if "maxLength" not in about}
    tools = [{"type": "function", "function": {"name": "f", "parameters": _object(properties)}}]
    content, calls, is_complete = written(family, tools, "required", seed, parallel=False)
    assert is_complete and not content
    assert [call.name for call in calls] == ["f"]
    check(tools, calls)


BEGINNINGS = {
    "hermes": "Hm <tool_call>",
    "granite": "Hm <|tool_call|>",
    "mistral": "Hm [TOOL_CALLS]",
    "mistral_args": "Hm [TOOL_CALLS]",
    "llama3_json": "{",
    "json": "{",
    "deepseek_v3": "Hm <｜tool▁calls▁begin｜>",
    "deepseek_v31": "Hm <｜tool▁calls▁begin｜>",
    "qwen3_coder": "Hm <tool_call>",
    "harmony": "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary",
}


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_strict_tool_is_called_by_its_schema_or_not_at_all(family: str) -> None:
    tools = [tool("weather", **EASY)]
    tools[0]["function"]["strict"] = True  # type: ignore[index]
    said = "<|channel|>final<|message|>Hi" if family == "harmony" else "Hi"
    _, calls, _ = written(family, tools, "auto", 1, first=said)
    assert calls == ()
    for seed in range(3):
        content, calls, is_complete = written(family, tools, "auto", seed, first=BEGINNINGS[family])
        assert is_complete and calls and content == ("" if BEGINNINGS[family][:2] != "Hm" else "Hm")
        check(tools, calls)


@pytest.mark.parametrize("family", ["llama3_json", "json"])
def test_a_block_of_json_cannot_pass_by_a_strict_tool(family: str) -> None:
    tools = [tool("weather", **EASY)]
    tools[0]["function"]["strict"] = True  # type: ignore[index]
    assert written(family, tools, "auto", 1, first="```json\n{")[0][:9] != "```json\n{"
    assert written(family, tools, "auto", 1, first="```python\n{")[0][:11] == "```python\n{"


def test_without_a_forced_or_strict_call_there_is_no_grammar() -> None:
    request = read_tool_request([tool("weather")])
    assert request is not None
    assert calling_of("hermes").sampling(SamplingParams(), request).structured_outputs is None


def test_special_tags_stay_in_the_text_and_others_do_not() -> None:
    request = read_tool_request([tool("weather")])
    assert request is not None
    tokenizer = tool_tokenizer("mistral")
    params = calling_of("mistral").sampling(SamplingParams(), request)
    detokenizer = Detokenizer(tokenizer, shown_ids=tuple(params.shown_special_token_ids or ()))
    ids = tokenizer("[INST][TOOL_CALLS]a[/INST] b", add_special_tokens=False)["input_ids"]
    assert "".join(map(detokenizer.append, ids)) + detokenizer.flush() == "[TOOL_CALLS]a b"


def test_tools_beside_another_form_are_refused() -> None:
    request = read_tool_request([tool("weather")])
    assert request is not None
    with pytest.raises(InvalidSampling, match="exclude each other; leave one out"):
        calling_of("hermes").sampling(SamplingParams(structured_outputs=StructuredOutputs(json_object=True)), request)


def test_schemas_that_cost_too_much_or_cannot_be_required_are_refused() -> None:
    patterns = {"anyOf": [{"type": "string", "pattern": f"a{i}"} for i in range(300)]}
    nested = {"anyOf": [{"items": {"$ref": f"#/properties/q/anyOf/{i}"}} for i in range(300)]}
    for family, about, told in [
        ("hermes", nested, "at most 512 are allowed: use fewer or flatter definitions"),
        ("hermes", patterns, "300 patterns and formats; at most 256"),
        ("qwen3_coder", {"type": "string", "pattern": "a+"}, "'pattern' of the text 'q' cannot be required"),
    ]:
        request = read_tool_request([tool("f", q=about)], "required")
        assert request is not None
        with pytest.raises((InvalidSampling, InvalidTools), match=told):
            calling_of(family).sampling(SamplingParams(), request)
    request = read_tool_request([tool("f", **{"a b": {"type": "string"}})], "required")
    assert request is not None
    with pytest.raises(InvalidTools, match="the parameter 'a b'"):
        calling_of("qwen3_coder").sampling(SamplingParams(), request)


def test_a_model_of_an_unknown_format_is_told_how_to_name_it() -> None:
    request = read_tool_request([tool("weather")])
    assert request is not None
    unknown = ToolCalling(tool_tokenizer("hermes"), "{{ tools }}")
    with pytest.raises(
        InvalidTools, match=r"does not say how it calls tools; start with tool_format \(--tool-format\)"
    ):
        unknown.sampling(SamplingParams(), request)
    named = ToolCalling(tool_tokenizer("hermes"), "{{ tools }}", "hermes")
    assert named.sampling(SamplingParams(), request).shown_special_token_ids == ()
