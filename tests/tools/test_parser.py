"""Calls in the text of answers: each format, cut anywhere, broken anywhere, and in linear time."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.examples import examples
from support.tool_calls import parse_calls
from support.tool_families import TOOL_FAMILIES, tool

from kvmosaic.tools import (
    TOOL_FORMATS,
    CallCollector,
    CallParser,
    CallStart,
    ContentText,
    detect_tool_format,
    read_tool_request,
)

REQUEST = read_tool_request([tool("weather", city={"type": "string"}, days={"type": "integer"}), tool("search")])
assert REQUEST is not None
TOOLS = REQUEST.tools
ARGUMENTS = {"city": 'Os{lo "</tool_call>" \\ ☃\n[TOOL_CALLS]', "days": 2}
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
SEARCH = {"query": "owls"}
_ONE, _TWO = f'{{"name": "weather", "arguments": {WRITTEN}}}', '{"name": "search", "arguments": {"query": "owls"}}'
_DS = "<｜tool▁call▁begin｜>"
WITH_CALLS = {
    "hermes": f"Let me see.\n<tool_call>\n{_ONE}\n</tool_call>\n<tool_call>{_TWO}</tool_call>",
    "granite": f"Let me see.<|tool_call|>[{_ONE}, {_TWO}]",
    "mistral": f"Let me see.[TOOL_CALLS] [{_ONE}, {_TWO}]",
    "mistral_args": f"Let me see.[TOOL_CALLS]weather[ARGS]{WRITTEN}"
    '[TOOL_CALLS]search[CALL_ID]7[ARGS]{"query": "owls"}',
    "llama3_json": f"Let me see.<|python_tag|>{_ONE.replace('arguments', 'parameters')}; {_TWO}",
    "json": f"{_ONE}; {_TWO}",
    "deepseek_v3": f"Let me see.<｜tool▁calls▁begin｜>{_DS}function<｜tool▁sep｜>weather\n```json\n{WRITTEN}\n```"
    f'<｜tool▁call▁end｜>\n{_DS}function<｜tool▁sep｜>search\n```json\n{{"query": "owls"}}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": f"Let me see.<｜tool▁calls▁begin｜>{_DS}weather<｜tool▁sep｜>{WRITTEN}<｜tool▁call▁end｜>"
    f'{_DS}search<｜tool▁sep｜>{{"query": "owls"}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.weather <|constrain|>json<|message|>{WRITTEN}<|call|>"
    "<|start|>assistant to=functions.search<|channel|>commentary json"
    '<|message|>{"query": "owls"}<|call|>',
    "qwen3_coder": "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\n"
    f"{ARGUMENTS['city']}\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=search>\n<parameter=query>\nowls\n</parameter>\n</function>\n</tool_call>",
}
"""An answer of each format: a text and two calls."""


def parser(name: str, **options: Any) -> CallParser:
    return CallParser(TOOL_FORMATS[name], TOOLS, **options)


def parsed(name: str, text: str, size: int = 0, **options: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning and calls of an answer that arrives in pieces of so many characters (0: as a whole)."""
    reading, collector = parser(name, **options), CallCollector()
    for start in range(0, len(text), size or max(len(text), 1)):
        collector.add(reading.feed(text[start : start + (size or len(text))]))
    collector.add(reading.finish())
    return collector.content, collector.reasoning, [(call.name, call.arguments) for call in collector.calls]


def test_there_is_an_answer_and_a_family_for_each_format() -> None:
    assert set(TOOL_FORMATS) == set(WITH_CALLS) == set(TOOL_FAMILIES)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_format_is_known_from_the_template(name: str) -> None:
    found = detect_tool_format(TOOL_FAMILIES[name].template)
    assert found is not None and found.name == name


def test_a_template_that_shows_tools_and_no_calls_has_no_format() -> None:
    assert detect_tool_format("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}") is None


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_content_and_calls_of_an_answer(name: str) -> None:
    content, reasoning, calls = parsed(name, WITH_CALLS[name])
    assert (content, reasoning) == ("" if name == "json" else "Let me see.", "")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [
        ("weather", ARGUMENTS),
        ("search", SEARCH),
    ]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_cut_anywhere_gives_the_same_events(name: str) -> None:
    whole = parsed(name, WITH_CALLS[name])
    for size in (1, 2, 3, 5, 8, 13):
        assert parsed(name, WITH_CALLS[name], size) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_is_announced_before_its_arguments_are_complete(name: str) -> None:
    reading = parser(name)
    text = WITH_CALLS[name]
    events = reading.feed(text[: text.index(" \\ ") if name == "qwen3_coder" else text.index("☃")])
    start = next(event for event in events if isinstance(event, CallStart))
    assert (start.index, start.name) == (0, "weather")
    assert '"city"' in "".join(getattr(event, "text", "") for event in events[events.index(start) :])
    assert not any(isinstance(event, ContentText) for event in events[events.index(start) :])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_ids_are_unique_and_short_for_mistral(name: str) -> None:
    _, calls = parse_calls(parser(name), WITH_CALLS[name])
    assert len({call.id for call in calls}) == 2
    assert {len(call.id) == 9 and call.id.isalnum() for call in calls} == {name.startswith("mistral")}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_beyond_the_allowed_one_are_dropped(name: str) -> None:
    assert [called for called, _ in parsed(name, WITH_CALLS[name], 4, max_calls=1)[2]] == ["weather"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("cut", [0.3, 0.5, 0.7, 0.9])
def test_an_answer_that_is_cut_off_keeps_what_is_there(name: str, cut: float) -> None:
    text = WITH_CALLS[name][: int(len(WITH_CALLS[name]) * cut)]
    assert parsed(name, text, 3) == parsed(name, text)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call>\n",
        "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>{bad}</tool_call>",
        "<tool_call>[]</tool_call>",
        "<tool_call>null</tool_call>",
        '<tool_call>{"name": "weather"</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"city": 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {bad}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {\'city\': 1}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": 7}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": NaN}</tool_call>',
        "a < b, <tool_cal",
    ],
)
def test_what_begins_like_a_call_and_is_none_is_content(text: str) -> None:
    for size in (0, 1, 4):
        assert parsed("hermes", text, size) == (text, "", [])


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    "text", ["", " ", "Hello!", "Hello! \n", "{", '{"a": 1}', "[1, 2]", "<", "Hi <b>there</b>\n\n  x"]
)
def test_an_answer_without_calls_is_content_as_it_is(name: str, text: str) -> None:
    assert parsed(name, text) == parsed(name, text, 1) == (text, "", [])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_further_call_that_the_end_cuts_before_its_arguments_is_no_content(name: str) -> None:
    text = WITH_CALLS[name]
    for size in range(text.rindex("<tool_call>") + len("<tool_call>"), text.rindex("search")):
        content, _, calls = parsed(name, text[:size])
        assert content == "Let me see." and len(calls) == 1


def test_arguments_that_break_later_stay_as_written() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>Done.'
    assert parsed("hermes", text, 2) == parsed("hermes", text) == ("Done.", "", [("weather", '{"city": Oslo}}')])


def test_keys_in_any_order_arguments_as_text_and_braces_too_many() -> None:
    other = f'<tool_call>{{"id": 3, "arguments": {WRITTEN}, "name": "weather"}}}}\n</tool_call> '
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>'
    nothing = '<tool_call>{"name": "search", "arguments": null}</tool_call><tool_call>{"name": "search"}</tool_call>'
    for size in (0, 1, 7):
        assert parsed("hermes", other, size) == ("", "", [("weather", WRITTEN)])
        assert parsed("hermes", text, size) == ("", "", [("weather", '{"city": "Oslo"}')])
        assert parsed("hermes", nothing, size) == ("", "", [("search", "{}"), ("search", "{}")])


def test_llama_calls_without_a_tag_only_at_the_beginning() -> None:
    call = '{"name": "search", "parameters": {"query": "owls"}}'
    assert parsed("llama3_json", f"\n{call}") == ("", "", [("search", '{"query": "owls"}')])
    assert parsed("llama3_json", f"I call {call}") == (f"I call {call}", "", [])
    hidden = ["<|python_tag|>"]
    assert parsed("llama3_json", "<|python_tag|>print(1)", 2, hidden=hidden) == ("print(1)", "", [])


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json"])
def test_an_answer_that_is_one_object_is_a_call(name: str) -> None:
    for text in (
        _ONE,
        f"\n{_ONE}\n",
        f"```json\n{_ONE}\n```",
        f"```\n{_ONE}```\n",
        _ONE.replace("arg", 'id": 1, "arg', 1),
    ):
        for size in (0, 1, 5):
            assert parsed(name, text, size) == ("", "", [("weather", WRITTEN)])
    others = ["```json\n[1]\n```", "```python\nx\n```", '{"name": "search", "rank": 1}', '{"name": "search"}']
    for text in (*others, f"So: {_ONE}", f"```json\n{_ONE.replace('weather', 'unknown')}\n```"):
        for size in (0, 1, 5):
            assert parsed(name, text, size) == (text, "", [])
    content, _, calls = parsed(name, f"{_ONE}\nDone.", 3)
    assert (content.strip(), calls) == ("Done.", [("weather", WRITTEN)])


def test_a_strict_tool_is_called_within_tags_only() -> None:
    strict = [replace(each, is_strict=True) for each in TOOLS]
    assert parse_calls(CallParser(TOOL_FORMATS["hermes"], strict), _ONE) == (_ONE, ())


def test_harmony_reasoning_is_apart_and_control_tokens_are_no_content() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    hidden = TOOL_FORMATS["harmony"].markers
    for size in (0, 1, 9):
        assert parsed("harmony", text, size, hidden=hidden) == ("Hello", "Hm.", [])
        assert parsed("harmony", "<|channel|>x<|end|>y<|call|>", size, hidden=hidden)[2] == []


def test_qwen_values_have_the_type_of_the_schema() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
    more = "<parameter=new>\nTrue\n</parameter><parameter=other>[1, x</parameter>\n</function>\n</tool_call>"
    [(_, arguments)] = parsed("qwen3_coder", text + more, 3)[2]
    assert json.loads(arguments) == {"city": "12", "days": 12, "new": True, "other": "[1, x"}


PIECES = st.sampled_from(
    [
        *('<tool_call> </tool_call> { } [ ] : , " \\ \\u12 \n null 12 -0.5e3 a ☃ ; weather function'.split(" ")),
        *'"name" "arguments" "parameters" "weather" {"name":'.split(),
        *"[TOOL_CALLS] [ARGS] <|python_tag|> <|tool_call|>".split(),
        *("<function=weather> <parameter=city> </parameter> </function> <|channel|> <|message|> <|start|>".split()),
        *("to=functions.weather analysis <|end|> ```json <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>".split()),
        *("<｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>".split()),
        WRITTEN,
        _ONE,
        "\n",
        " ",
    ]
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=examples(60), deadline=None)
@given(pieces=st.lists(PIECES, max_size=30), sizes=st.integers(1, 9))
def test_no_text_breaks_a_parser_and_cuts_change_nothing(name: str, pieces: list[str], sizes: int) -> None:
    text = "".join(pieces)
    whole = parsed(name, text)
    assert parsed(name, text, sizes) == whole
    assert {called for called, _ in whole[2]} <= {"weather", "search"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_nested_tags_stay_content_in_linear_time(name: str) -> None:
    """Four times the text takes about four times the time; a quadratic parser takes sixteen times as long."""
    units = [*TOOL_FORMATS[name].triggers, '<tool_call>{"name": "weather", "arguments": {"a":', '{"a":', "[{", " ", '"']
    for unit in units:

        def read(number: int, unit: str = unit) -> None:
            content, _, calls = parsed(name, unit * number, 4)
            assert len(content) == len(unit) * number or calls or name == "harmony"

        for tries in (1, 3):  # the least of three: a machine that stood still for a moment proves nothing
            short, long = (least_cpu_seconds(partial(read, number), tries=tries) for number in (1_250, 5_000))
            if long < 8 * short + 0.05:
                break
        assert long < 8 * short + 0.05, (unit, short, long)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_whose_last_arguments_a_stop_text_cuts_calls_nothing(name: str) -> None:
    for end in range(len(WITH_CALLS[name]) + 1):
        reading = parser(name)
        _, calls = parse_calls(reading, WITH_CALLS[name][:end])
        assert reading.is_called("stop text") == (bool(calls) and is_json(calls[-1].arguments))
        assert reading.is_called(None) == bool(calls)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
