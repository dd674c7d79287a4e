"""Prompts as applications send them, on real weights: a dated system text, and documents pasted into a message."""

from __future__ import annotations

from typing import Any

import pytest

from kvmosaic import LLM, ChunkCacheConfig, RequestOutput, SamplingParams

DOCUMENTS = [
    "Fenbury was founded in 1642. It lies on the river Quinan, and is known for its tower, which is forty metres high.",
    "Bellos is a donkey. It lives in the boathouse of Tolbury, and eats carrots and apples.",
    "The Silver Heron was built in 1874 in Halport. Its cargo is timber, and its captain is Marla Denwick.",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm(loaded: Any) -> LLM:
    return LLM(
        loaded, chunk_cache_config=ChunkCacheConfig(find_documents="patterns", chunk_context="system"), self_check=False
    )


def messages(day: str, *order: int, pasted: bool = False) -> list[dict[str, str]]:
    question = "When was Fenbury founded?"
    if pasted:
        sources = (f'<source id="{place}">{DOCUMENTS[index]}</source>' for place, index in enumerate(order, 1))
        question = "Use the context.\n<context>\n" + "\n".join(sources) + f"\n</context>\n\n{question}"
    system = f"You answer questions from the documents in one short sentence. Today is {day}."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def ask(llm: LLM, day: str, *order: int, pasted: bool, salt: str) -> RequestOutput:
    documents = None if pasted else [DOCUMENTS[index] for index in order]
    (output,) = llm.chat(messages(day, *order, pasted=pasted), GREEDY, documents=documents, salt=salt)
    return output


@pytest.mark.parametrize("pasted", [False, True], ids=["documents", "pasted"])
def test_another_day_and_another_order_compute_no_document(llm: LLM, pasted: bool) -> None:
    ask(llm, "Monday, 23 November 2026", 0, 1, 2, pasted=pasted, salt="warm")
    cached = ask(llm, "Tuesday, 24 November 2026", 2, 0, 1, pasted=pasted, salt="warm")
    computed = ask(llm, "Tuesday, 24 November 2026", 2, 0, 1, pasted=pasted, salt="cold")
    documents = [segment for segment in cached.reuse.segments if segment.kind == "chunk"]
    assert len(documents) == 3
    assert all(segment.reused_tokens == segment.num_tokens for segment in documents)
    assert cached.outputs[0].token_ids == computed.outputs[0].token_ids
    assert "1642" in cached.outputs[0].text
