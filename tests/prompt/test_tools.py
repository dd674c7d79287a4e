"""Tools in prompts: before the documents, before what changes, in one order, and only as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.examples import examples
from support.target import slowness
from support.tokenizers import CHATML, make_tokenizer
from support.tool_families import DEEPSEEK, TOOL_FAMILIES, tool, tool_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidMessages, InvalidTools
from kvmosaic.prompt import Prompt, PromptEncoder, SegmentKind
from kvmosaic.prompt.conversation import could_write
from kvmosaic.prompt.message import read_messages

DOCUMENTS = [{"id": "a", "text": "Owls see at night."}, {"id": "b", "text": "Bellos is a donkey."}]
TOOLS = [tool("weather"), tool("add"), tool("search")]
SYSTEM = "You answer from documents."
CHANGING = f"{SYSTEM} Today is Monday, 23 November 2026."
ALL = sorted(TOOL_FAMILIES)
IN_SYSTEM_TURN = ["hermes", "qwen3_coder", "harmony"]
"""Tools after the system text, in its turn."""


def encode(family: str, system: str = CHANGING, tools: Any = TOOLS, documents: Any = DOCUMENTS, **more: Any) -> Prompt:
    tokenizer = tool_tokenizer(family)
    encoder = PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer), tells_tools=True)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Who sees?"}]
    return encoder.encode_chat(messages, documents, tools=tools, **more)


def kinds(prompt: Prompt) -> list[SegmentKind]:
    return [segment.kind for segment in prompt.segments]


@pytest.mark.parametrize("family", ALL)
def test_permuted_tools_are_the_same_prompt(family: str) -> None:
    for documents in (DOCUMENTS, None):
        one, other = (encode(family, tools=tools, documents=documents) for tools in (TOOLS, TOOLS[::-1]))
        assert [segment.token_ids for segment in one.segments] == [segment.token_ids for segment in other.segments]


@pytest.mark.parametrize("family", ALL)
def test_tools_come_before_documents(family: str) -> None:
    prompt = encode(family, SYSTEM)
    first = next(number for number, segment in enumerate(prompt.segments) if segment.kind is SegmentKind.CHUNK)
    before = "".join(segment.text or "" for segment in prompt.segments[:first])
    after = "".join(segment.text or "" for segment in prompt.segments[first:])
    for name in ("weather", "add", "search"):
        assert name in before and name not in after
    assert "Who sees?" in after


@pytest.mark.parametrize("family", ["hermes", "granite", "mistral", "llama3_json"])
def test_documents_are_the_same_under_another_day(family: str) -> None:
    one, other = (encode(family, f"{SYSTEM} Today is {day} November 2026.") for day in ("Monday, 23", "Tuesday, 24"))
    chunks = [
        [segment.token_ids for segment in prompt.segments if segment.kind in (SegmentKind.SYSTEM, SegmentKind.CHUNK)]
        for prompt in (one, other)
    ]
    assert len(chunks[0]) == 3 and chunks[0] == chunks[1]
    assert one.segments != other.segments


@pytest.mark.parametrize("family", ["hermes", "granite"])
def test_what_changes_comes_after_the_tools(family: str) -> None:
    prompt = encode(family)
    rest = prompt.segments[1 if family == "hermes" else -1]  # or after the documents
    stable, changing = prompt.segments[0].text or "", rest.text or ""
    assert kinds(prompt)[0] is SegmentKind.SYSTEM and rest.kind in (SegmentKind.TEXT, SegmentKind.QUESTION)
    assert SYSTEM in stable and "weather" in stable and "Monday" not in stable
    assert "Today is Monday, 23 November 2026." in changing and "weather" not in changing
    assert rest.num_tokens < 80


def test_a_template_of_one_system_message_keeps_its_order() -> None:
    prompt = encode("mistral")
    text = "".join(segment.text or "" for segment in prompt.segments)
    assert text.count("Today is Monday") == 1 and "weather" in (prompt.segments[0].text or "")


def test_a_system_text_that_does_not_change_stays_whole() -> None:
    prompt = encode("hermes", SYSTEM)
    assert kinds(prompt) == [SegmentKind.SYSTEM, SegmentKind.CHUNK, SegmentKind.CHUNK, SegmentKind.QUESTION]
    assert (prompt.segments[0].text or "").count("<|im_start|>system") == 1


@pytest.mark.parametrize("family", IN_SYSTEM_TURN)
def test_tools_do_not_move_the_border(family: str) -> None:
    """Neither a date in a tool, nor a text that the rule of the preamble looks for, is taken for the system text's."""
    date = tool(
        "weather", "On 23 November 2026. BORDER here. <|im_end|>", q={"type": "string", "description": "BORDER"}
    )
    for rule in ("auto", "before:BORDER"):
        plain = encode(family, SYSTEM, [tool("weather")], preamble=rule)
        assert kinds(encode(family, SYSTEM, [date], preamble=rule)) == kinds(plain)
        split = encode(family, f"{SYSTEM} BORDER. Today is 24 November 2026.", [date], preamble=rule)
        assert "BORDER here" in (split.segments[0].text or "")
        assert "24 November" in (split.segments[1].text or "")


@pytest.mark.parametrize("family", ALL)
def test_descriptions_become_no_control_tokens(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    control = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if len(token.content) > 3}
    control -= {tokenizer.convert_tokens_to_ids("kvmosaic"), tokenizer.convert_tokens_to_ids("    ")}
    hostile = " ".join(tokenizer.convert_ids_to_tokens(sorted(control)))
    found = []
    for text in ("harmless", hostile):
        bad = tool("weather", text, **{"q": {"type": "string", "description": text}})
        prompt = encode(family, SYSTEM, [bad])
        found.append([token for segment in prompt.segments for token in segment.token_ids or () if token in control])
    assert found[0] == found[1]


def _control_ids(family: str) -> dict[int, str]:
    vocabulary = ("kvmosaic", "    ")
    added = tool_tokenizer(family).added_tokens_decoder.items()
    return {token_id: token.content for token_id, token in added if token.content not in vocabulary}


@pytest.mark.parametrize("family", ALL)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_no_field_of_tools_and_calls_writes_control_tokens(family: str, data: st.DataObject) -> None:
    """Pieces of control tokens in any field, which neighbours may complete, against harmless texts in their place."""
    control = _control_ids(family)
    cuts = [(text[:place], text[place:]) for text in control.values() for place in range(len(text))]
    fragments = st.sampled_from([part for cut in cuts for part in cut if part] + ['"', "}", "\\", "\n", " ", "x"])
    texts = st.lists(fragments, min_size=1, max_size=3).map("".join)
    fields = [data.draw(texts) for _ in range(8)]
    counts = []
    for a, b, c, d, e, f, g, h in (fields, [f"a{number}" for number in range(8)]):
        about = {"type": "string", "description": b, "enum": [c, d], "default": {c: [d, a]}}
        tools = [tool("weather", a, **{b: about}, city={"type": "string"}), tool("add", c)]
        call = _called(json.dumps({"city": e, "more": [f, {"k": g}]}))
        if family not in ("mistral", "mistral_args"):  # whose templates count the letters of ids
            call["id"] = h
        messages = [
            {"role": "user", "content": f"{g}{h}" if f"{g}{h}".strip() else "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": a, "content": f + b},
            {"role": "user", "content": d if d.strip() else "x"},
        ]
        tokenizer = tool_tokenizer(family)
        encoder = PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer), tells_tools=True)
        prompt = encoder.encode_chat(messages, [{"id": a, "title": b, "text": f"{c} mill"}], tools=tools)
        ids = [token for segment in prompt.segments for token in segment.token_ids or ()]
        counts.append([control[token] for token in ids if token in control])
    assert counts[0] == counts[1]


def test_tools_of_many_texts_take_linear_time_beside_hundreds_of_control_tokens() -> None:
    tokens = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    choices = [f"<x{number}" for number in range(8_000)]
    tools = [tool("weather", q={"type": "string", "enum": choices})]
    assert not could_write(tools, tokens)
    assert least_cpu_seconds(lambda: could_write(tools, tokens)) < 0.5 * slowness()


@pytest.mark.parametrize(
    "text", ["a <|END|> b", "<|end|>", "a <", "a <|end|", "nd|> a", ">", "|>", "<|end|><", "a <|en", "end|> <b"]
)
def test_texts_that_are_or_complete_a_control_token_could_write_one(text: str) -> None:
    assert could_write([tool("weather", text)], ["<|end|>", "<s>"])
    assert could_write([{"enum": {text: 1}}], ["<|end|>", "<s>"])


@pytest.mark.parametrize("text", ["", "a", "a < b", "<b> c", "|", "end", "a |> b", "<|end| >x"])
def test_other_texts_could_not(text: str) -> None:
    assert not could_write([tool("weather", text)], ["<|end|>", "<s>"])
    assert not could_write([tool("weather", text)], [])


def test_a_template_without_tools_is_refused() -> None:
    tokenizer = make_tokenizer(CHATML)
    encoder = PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer))
    user = [{"role": "user", "content": "hi"}]
    for template in (CHATML, "{% set x = tools %}" + CHATML):
        tokenizer.chat_template = template
        with pytest.raises(InvalidTools, match="does not show tools, so it cannot call them"):
            encoder.encode_chat(user, tools=TOOLS)
    assert encoder.encode_chat(user, tools=[]).num_tokens


HISTORY = [
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "add", "arguments": '{"a": 5, "b": "<|im_end|>"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "seven"},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize("family", ALL)
def test_calls_and_results_of_earlier_turns_are_rendered(family: str) -> None:
    tokenizer = tool_tokenizer(family)
    encoder = PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer), tells_tools=True)
    prompt = encoder.encode_chat(HISTORY, tools=TOOLS)
    text = prompt.segments[0].text or ""
    assert "seven" in text and "Thanks." in text and text.index("5") < text.index("seven")
    ids = prompt.segments[0].token_ids or ()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    harmless = [{**HISTORY[1], "tool_calls": [_called('{"a": 5, "b": "x"}')]}]
    plain = encoder.encode_chat([HISTORY[0], *harmless, *HISTORY[2:]], tools=TOOLS).segments[0].token_ids or ()
    assert ids.count(end) == plain.count(end)


def _called(arguments: str) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_deepseek_asks_for_a_message_without_content() -> None:
    assert "is none" in DEEPSEEK
    tokenizer = tool_tokenizer("deepseek_v3")
    encoder = PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer))
    text = encoder.encode_chat(HISTORY, tools=TOOLS).segments[0].text or ""
    assert 'function<｜tool▁sep｜>add\n```json\n{"a": 5, "b": "<|im_end|>"}\n```<｜tool▁call▁end｜>' in text


@pytest.mark.parametrize(
    "arguments",
    ["", "no JSON", "[1]", '{"a": ', "9" * 5_000, '{"": 1}', '{"a, b": 1}', '{"a": ' * 40 + "1" + "}" * 40],
)
def test_arguments_that_are_no_plain_object_stay_a_text(arguments: str) -> None:
    [message] = read_messages([{"role": "assistant", "content": "", "tool_calls": [_called(arguments)]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_an_empty_result_is_a_result() -> None:
    assert read_messages([{"role": "tool", "content": "", "tool_call_id": "1"}])[0]["content"] == ""
    with pytest.raises(InvalidMessages, match="has no content"):
        read_messages([{"role": "user", "content": ""}])
