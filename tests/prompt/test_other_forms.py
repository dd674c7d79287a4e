"""A conversation that the chat template refuses is read in the first form that it takes, and that is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import CHATML, LLAMA2, make_tokenizer

from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.encoder import PromptEncoder
from kvmosaic.prompt.segment import Prompt

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
"""As Gemma's: neither a system message nor two of the user in a row."""
FIRST_ONLY = (
    "{% for message in messages[1:] %}{% if message['role'] == 'system' %}{{ raise_exception('late') }}{% endif %}"
    "{% endfor %}"
)
TEMPLATES = {"no system": NO_SYSTEM + LLAMA2, "turns": LLAMA2, "first only": FIRST_ONLY + CHATML}
ENCODERS = {
    name: PromptEncoder(tokenizer, ChunkCacheConfig(), vocab_size=len(tokenizer))
    for name, template in TEMPLATES.items()
    for tokenizer in [make_tokenizer(template=template)]
}
CODEX = [("developer", "Be brief."), ("developer", "No tools."), ("user", "cwd: /"), ("user", "Say hello.")]


def encoded(name: str, turns: list[tuple[str, str]], documents: list[str] | None = None) -> tuple[Prompt, str]:
    encoder = ENCODERS[name]
    prompt = encoder.encode_chat([{"role": role, "content": text} for role, text in turns], documents)
    assert encoder.tokenizer is not None
    return prompt, encoder.tokenizer.decode([token for each in prompt.segments for token in each.token_ids])


def test_what_coding_agents_send_is_read_by_every_template() -> None:
    for name, told in (
        ("no system", "the system message begins the user's message; neighbouring messages of the user were joined"),
        ("turns", "system messages were joined, or begin the user's next message; neighbouring messages of the user"),
        ("first only", "the conversation as it was sent: system messages were joined, or begin the user's next messa"),
    ):
        prompt, text = encoded(name, CODEX)
        assert told in prompt.remark
        assert "Be brief.\n\nNo tools." in text and text.index("No tools.") < text.index("cwd: /") < text.index("Say")
        more = [*CODEX, ("assistant", "Hello."), ("system", "Now in French."), ("user", "Again.")]
        assert "Now in French.\n\nAgain." in encoded(name, more)[1]


def test_what_a_template_takes_is_left_as_it_is() -> None:
    for name in ("turns", "first only"):
        assert not encoded(name, [("system", "Be brief."), ("user", "Hello.")])[0].remark


def test_calls_and_results_of_tools_that_are_no_longer_sent_are_written_as_text() -> None:
    """A client that summarizes a history sends its calls without the tools; roles of tools are refused by many."""
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    turns = [
        {"role": "user", "content": "Read it."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "x = 1"},
        {"role": "user", "content": "Summarize."},
    ]
    encoder = ENCODERS["turns"]
    prompt = encoder.encode_chat(turns)
    assert "calls and results of tools are written as text" in prompt.remark
    assert encoder.tokenizer is not None
    text = encoder.tokenizer.decode([token for each in prompt.segments for token in each.token_ids])
    places = [text.index(said) for said in ("Read it.", '"path": "a.py"', "x = 1\n\nSummarize.")]
    assert places == sorted(places)


def test_documents_and_a_warmed_prompt_are_read_in_the_same_form() -> None:
    documents = ["The ferry goes at noon.", "The mill is old."]
    for name, encoder in ENCODERS.items():
        asked, _ = encoded(name, [("system", "Be brief."), ("user", "When does it go?")], documents)
        warm = encoder.encode_documents(documents, "Be brief.")
        assert [each.token_ids for each in warm.segments[:-1]] == [each.token_ids for each in asked.segments[:-1]]


def test_what_no_form_mends_is_refused_with_the_first_reason() -> None:
    with pytest.raises(InvalidMessages, match="Conversation roles must alternate"):
        encoded("turns", [("assistant", "Hello."), ("user", "Who?")])


@given(st.lists(st.sampled_from(["system", "developer", "user"]), max_size=6), st.sampled_from(list(TEMPLATES)))
def test_no_text_is_lost_and_none_changes_its_place(roles: list[str], name: str) -> None:
    turns = [(role, f"text {number};") for number, role in enumerate([*roles, "user"])]
    _, text = encoded(name, turns)
    places = [text.index(said) for _, said in turns]
    assert places == sorted(places)
