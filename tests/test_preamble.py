"""System texts that change with every request: documents are computed once, through the Python face."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from support.loaded import chatting_llama

from kvmosaic import LLM, ChunkCacheConfig, RequestOutput, SamplingParams
from kvmosaic.errors import InvalidConfig

DOCUMENTS = [
    {"id": "fenbury", "text": "Fenbury was founded in 1642. It lies on the river Quinan."},
    {"id": "bellos", "text": "Bellos is a donkey. It lives in the boathouse."},
]
CLOCK = (
    "{{ '<s>' }}{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
    "[system] Knowledge ends in December 2023.\nToday: {{ date_string }}\n"
    "{%- for m in messages %}{{ m['content'] }}\n{%- endfor %}"
)
"""Like the template of Llama 3.1: the date of the day before what the operator says."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
DAYS = ("Monday, 23 November 2026", "Tuesday, 24 November 2026")


@pytest.fixture(scope="module")
def reader() -> Iterator[LLM]:
    yield LLM("reader")


def messages(day: str) -> list[dict[str, str]]:
    system = f"Answer the question from the documents. Today is {day}."
    return [{"role": "system", "content": system}, {"role": "user", "content": "When was Fenbury founded?"}]


def reused(output: RequestOutput) -> list[bool]:
    """For each document, whether it was found in the cache."""
    return [segment.reused_tokens == segment.num_tokens for segment in output.reuse.segments if segment.kind == "chunk"]


def test_documents_are_found_on_the_next_day(reader: LLM) -> None:
    outputs = [reader.chat(messages(day), GREEDY, documents=DOCUMENTS, salt="next day")[0] for day in DAYS]
    assert [reused(output) for output in outputs] == [[False, False], [True, True]]
    assert "tokens before them" in outputs[1].reuse.composition
    cold = reader.chat(messages(DAYS[1]), GREEDY, documents=DOCUMENTS, salt="cold")[0]
    assert cold.outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_with_all_of_the_system_text_they_are_not(reader: LLM) -> None:
    prompts = [reader.compose(messages(day), documents=DOCUMENTS, preamble="all") for day in DAYS]
    outputs = reader.generate(prompts, GREEDY)
    assert [reused(output) for output in outputs] == [[False, False], [False, False]]


def test_warmed_documents_are_found_on_any_day(reader: LLM) -> None:
    system = messages("Friday, 1 January 2027")[0]["content"]
    reader.warm(DOCUMENTS, system=system, salt="warmed")
    output = reader.chat(messages(DAYS[0]), GREEDY, documents=DOCUMENTS, salt="warmed")[0]
    assert reused(output) == [True, True]


def test_a_template_with_a_clock_computes_nothing_again_after_midnight(
    reader: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        today = datetime(2026, 11, 23, 23, 59)

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return cls.today

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    monkeypatch.setattr(reader.model.tokenizer, "chat_template", CLOCK)
    chat = [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": "When?"}]
    outputs = []
    for Clock.today in (datetime(2026, 11, 23, 23, 59), datetime(2026, 11, 24, 0, 1)):
        outputs.append(reader.chat(chat, GREEDY, documents=DOCUMENTS, salt="midnight")[0])
    assert outputs[0].prompt_token_ids != outputs[1].prompt_token_ids
    assert [reused(output) for output in outputs] == [[False, False], [True, True]]


def test_a_model_whose_keys_cannot_be_moved_shows_documents_all_of_the_system_text() -> None:
    llm = LLM(chatting_llama("gpt2"), self_check=False)
    assert llm.chunk_cache_config.preamble == "all"
    outputs = [llm.chat(messages(day), GREEDY, documents=DOCUMENTS)[0] for day in DAYS]
    assert [reused(output) for output in outputs] == [[False, False], [False, False]]


def test_a_setting_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="choose 'auto', 'all'"):
        ChunkCacheConfig(preamble="never")
