"""Documents in the histories of agents: results of tools, and long blocks that were pasted."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cpu_time import least_cpu_seconds
from support.target import slowness
from support.tokenizers import CHATML, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.prompt import Prompt
from kvmosaic.prompt.encoder import PromptEncoder
from kvmosaic.prompt.found_documents import MIN_PASTED_CHARACTERS, MIN_RESULT_CHARACTERS
from kvmosaic.prompt.patterns import document_finder

AGENTS = document_finder(("agents",), None)
BOTH = document_finder(("auto", "agents"), None)
SOURCE = "".join(f"def function_{number}(x):\n    return x + {number}\n\n" for number in range(40))
ASSISTANT = {"role": "assistant", "content": "Read."}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": ""}
USER = {"role": "user", "content": ""}


def found(text: str, message: dict[str, str] | None, finder=AGENTS) -> list[tuple[str, str, str | None]]:
    return [(text[each.start : each.end], each.origin, each.name) for each in finder.find(text, message)]


def test_a_result_of_a_tool_is_a_document_unless_it_is_short():
    assert found(f"\n{SOURCE}\n", RESULT) == [(SOURCE.strip(), "tool result", None)]
    assert found("x" * MIN_RESULT_CHARACTERS, RESULT)
    assert found("x" * (MIN_RESULT_CHARACTERS - 1), RESULT) == []
    for message in (USER, {"role": "assistant"}, {"role": "system"}, None):
        assert found(SOURCE, message) == []


def test_documents_that_a_pattern_finds_in_a_result_are_the_documents():
    text = f"<document>{SOURCE}</document><document>{SOURCE[40:]}</document>"
    assert [each[1] for each in found(text, RESULT, BOTH)] == ["pattern document-tags"] * 2
    assert [each[1] for each in found(text, RESULT)] == ["tool result"]


@pytest.mark.parametrize("tag", ["file", "file_content", "attachment", "attached_file"])
def test_long_files_and_fenced_blocks_of_a_user_are_documents(tag):
    fenced = f"```python\n{SOURCE}```"
    text = f'Look:\n<{tag} path="src/a.py" line="3">\n{SOURCE}</{tag}>\nand\n{fenced}\nand ```x = 1```. Why?'
    assert found(text, USER) == [(SOURCE.strip(), "pasted block", "src/a.py"), (fenced, "pasted block", None)]
    assert found(text, {"role": "assistant"}) == []
    assert found(f"```\n{'x' * (MIN_PASTED_CHARACTERS - 12)}\n```", USER) == []


def test_a_fence_inside_a_file_is_a_part_of_it():
    text = f"<file>\n# Guide\n```\n{SOURCE}```\n{SOURCE}</file>"
    assert len(found(text, USER)) == 1


@given(st.lists(st.sampled_from(["<file>", "</file>", "```\n", "\n```\n", SOURCE, "x" * 600]), max_size=8).map("".join))
def test_found_blocks_are_in_order_and_apart(text):
    ends = 0
    for each in AGENTS.find(text, USER):
        assert ends <= each.start < each.end <= len(text)
        ends = each.end


@pytest.mark.slow
def test_a_text_that_opens_blocks_without_end_is_searched_in_linear_time():
    allowed = 0.2 * slowness()
    for piece in ('<file path="', "<file ", "```\n", "<file>", "</file>\n"):
        long, short = (
            least_cpu_seconds(lambda text=piece * count: AGENTS.find(text, USER)) for count in (8_000, 1_000)
        )
        assert long <= allowed + 12 * short, piece


NUMBERS = "".join(str(number**3) for number in range(80))
"""A text that is unlike the source."""


def encoder(**options: object) -> PromptEncoder:
    tokenizer = make_tokenizer(CHATML)
    settings = ChunkCacheConfig(find_documents="agents", **options)  # type: ignore[arg-type]
    return PromptEncoder(tokenizer, settings, vocab_size=len(tokenizer), max_positions=100_000)


def kinds(prompt: Prompt) -> list[str]:
    return [str(segment.kind) for segment in prompt.segments]


def test_a_result_like_one_before_it_is_text_and_the_same_one_is_a_document():
    texts = [SOURCE[:900], NUMBERS, "".join(chr(97 + number * number % 26) + "-" for number in range(400))]
    newer = texts[0].replace(texts[0][400:420], "changed")

    def chunks(*results: str) -> list[str | None]:
        messages = [message for text in results for message in (ASSISTANT, {**RESULT, "content": text})]
        prompt = encoder().encode_chat(
            [{"role": "user", "content": "Go."}, *messages, {"role": "user", "content": "Why?"}]
        )
        assert "".join(segment.text or "" for segment in prompt.segments).count("changed") == results.count(newer)
        return [chunk.text for chunk in prompt.chunks]

    first, *others = (text.strip() for text in texts)
    assert chunks(texts[0], *texts[1:], newer, texts[1]) == [first, *others, others[0]]
    assert chunks(texts[0], newer, newer) == [first]
    assert chunks(newer, *texts[1:], texts[1], texts[0]) == [newer.strip(), *others, others[0]]
    assert chunks(texts[0], texts[1], texts[0]) == [first, others[0], first]
    assert chunks(*texts[1:], newer) == [*others, newer.strip()]


def test_a_history_is_results_and_the_texts_between_them():
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": "a.py"})}}
    messages = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {**RESULT, "content": SOURCE[:600]},
        {"role": "assistant", "content": "Read."},
        {**RESULT, "content": "done"},
        {**RESULT, "content": NUMBERS},
        {"role": "user", "content": "Why?"},
    ]
    prompt = encoder().encode_chat(messages)
    assert kinds(prompt) == ["system", "text", "chunk", "text", "chunk", "question"]
    assert [chunk.text for chunk in prompt.chunks] == [SOURCE[:600].strip(), NUMBERS]
    assert prompt.place == len(prompt.companions) > 0, "the first one has companions, too: it may come later"
    assert encoder().encode_chat(messages, finder=document_finder((), None)).is_plain
    ordinary = encoder().encode_chat(messages, finder=document_finder((), None)).segments[0].text
    assert "".join(segment.text or "" for segment in prompt.segments) == ordinary


def test_a_long_result_is_divided_so_that_an_edit_changes_one_part():
    parts = encoder(max_section_tokens=256)
    texts = []
    chance = random.Random(0)
    code = "\n\n".join("".join(chance.choices("bcdfghjklmnpqrstvwxyz0123456789", k=200)) for _ in range(12))
    for source in (code, f"{code[:1300]}edited{code[1300:]}"):
        messages = [{"role": "user", "content": "Read it."}, {**RESULT, "content": source}, USER | {"content": "Why?"}]
        texts.append([chunk.text for chunk in parts.encode_chat(messages).chunks])
    assert len(texts[0]) == len(texts[1]) > 3
    assert sum(one != other for one, other in zip(*texts, strict=True)) == 1


def test_the_order_of_names_makes_no_difference_to_what_is_warmed():
    warmed = [
        encoder().encode_documents([{"text": SOURCE, "title": "a.py"}], find_documents=names).chunks
        for names in ("auto", "auto,agents", "agents,auto", "agents")
    ]
    assert warmed[0] == warmed[1] == warmed[2] != warmed[3]
