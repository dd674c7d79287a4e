"""Conversations through the Python face: what a second turn takes from the first, to the token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from support.families import build
from support.server import loaded_reader
from support.tokenizers import CHATML, COHERE, make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams
from kvmosaic.model import LoadedModel
from kvmosaic.sampling import SegmentReuse

DOCUMENTS = [
    {"id": "ferry", "text": "The ferry goes to Oak Island every day at nine in the morning. It costs four coins."},
    {"id": "mill", "title": "Mill", "text": "The old mill grinds oats. The miller is called Anna Berg."},
]
TURNS = ("Where does the ferry go, and when?", "Who is the miller?", "And what does the mill grind?")
ENDINGS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 7, "ignore_eos": True},
    "one token": {"max_tokens": 1, "ignore_eos": True},
    "end of sequence": {"max_tokens": 30},
    "stop text": {"max_tokens": 30, "stop": ["a", "n", "s", "e"]},
    "stop token": {"max_tokens": 30, "ignore_eos": True, "stop_token_ids": list(range(100, 400))},
    "drawn": {"max_tokens": 12, "ignore_eos": True, "temperature": 3.0, "seed": 5},
}


@cache
def model_of(name: str) -> LoadedModel:
    if name == "reader":
        return loaded_reader()
    tokenizer = make_tokenizer({"chatml": CHATML, "cohere": COHERE}[name])
    module = build("llama", torch.float32, vocab_size=len(tokenizer), max_position_embeddings=2048)
    return LoadedModel.from_module(module, tokenizer)


def make(name: str, **options: Any) -> LLM:
    options = {"position_strategy": "shared", "repair": "none", **options}
    config = ChunkCacheConfig(chunk_cache_size="4MiB", **options)
    return LLM(
        model_of(name),
        chunk_cache_config=config,
        engine_config=EngineConfig(request_cache_size="4MiB", max_num_batched_tokens=256),
        self_check=False,
    )


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make("reader") as face:
        yield face


def alike(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens two runs have in common from the beginning."""
    pairs = zip(one, other, strict=False)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def talk(llm: LLM, params: SamplingParams, documents: list[Any] | None = None) -> Iterator[tuple[SegmentReuse, int]]:
    """A conversation; of each turn, the last segment's report and the tokens that could have been reused."""
    messages = [{"role": "system", "content": "Answer from the documents."}]
    computed: list[tuple[int, ...]] = []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        token_ids = llm.compose(messages, documents=documents).segments[-1].token_ids
        assert token_ids is not None
        (output,) = llm.chat(messages, params, documents=documents)
        known = max((alike(token_ids, before) for before in computed), default=0)
        yield output.reuse.segments[-1], min(known, len(token_ids) - 1)
        answer = output.outputs[0]
        computed.append((*token_ids, *answer.token_ids[:-1]))
        messages.append({"role": "assistant", "content": answer.text if answer.text.strip() else "Yes."})
    llm.engine.check_invariants()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", ["reader", "chatml", "cohere"])
@pytest.mark.parametrize("has_documents", [True, False], ids=["documents", "plain"])
def test_every_turn_reuses_all_tokens_that_were_computed_and_are_written_the_same(name, ending, has_documents):
    params = SamplingParams(**{"temperature": 0, **ENDINGS[ending]})
    with make(name) as llm:
        turns = list(talk(llm, params, DOCUMENTS if has_documents else None))
        assert llm.get_chunk_cache_stats().misses == 2 * has_documents
    assert [segment.reused_tokens for segment, _ in turns] == [known for _, known in turns]
    assert turns[0][1] == 0 and all(known > 4 for _, known in turns[1:])


@pytest.mark.filterwarnings("ignore:documents that are too long")
@pytest.mark.parametrize(
    "options",
    [
        {"position_strategy": "sequential"},
        {"chunk_context": "none"},
        {"long_chunks": "split", "max_chunk_tokens": 9},
        {"block_size": 1},
        {"block_size": 7},
    ],
    ids=str,
)
def test_documents_are_computed_once_in_a_conversation_and_history_once(options):
    with make("reader", **options) as llm:
        turns = list(talk(llm, SamplingParams(temperature=0, max_tokens=8), DOCUMENTS))
        statistics = llm.get_chunk_cache_stats()
    assert statistics.misses * len(TURNS) == statistics.lookups and statistics.misses >= 2
    assert [segment.reused_tokens for segment, _ in turns] == [known for _, known in turns]


def test_the_report_of_a_later_turn_says_what_it_took_from_earlier_ones(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    first, second, _ = (segment for segment, _ in talk(llm, params, DOCUMENTS))
    assert first.note == ""
    assert second.note == f"{second.reused_tokens} of {second.num_tokens} tokens from earlier turns"
    assert second.note in str(second)


def test_a_turn_that_is_asked_again_tells_its_own_tokens_from_those_of_earlier_turns(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    *_, (segment, _) = talk(llm, params, DOCUMENTS)
    *_, (again, _) = talk(llm, params, DOCUMENTS)
    assert again.reused_tokens == again.num_tokens - 1 > segment.reused_tokens
    more = again.reused_tokens - segment.reused_tokens
    assert again.note == f"{segment.note}, {more} more from a prompt that goes on alike"


def test_a_history_beyond_the_first_window_is_told_from_one_in_other_words(llm):
    *_, (segment, _) = talk(llm, SamplingParams(temperature=0, max_tokens=8), DOCUMENTS)
    assert segment.reused_tokens > 12
    rolling = SamplingParams(temperature=0, max_tokens=8, sink_tokens=2, window_tokens=10)
    *_, (segment, _) = talk(llm, rolling, DOCUMENTS)
    assert 11 <= segment.reused_tokens <= 12
    assert segment.note.endswith("more of theirs are beyond the first 12, which a rolling window can reuse")


def test_a_history_in_other_words_is_told_from_one_that_is_known(llm):
    params = SamplingParams(temperature=0, max_tokens=8)
    first = [{"role": "user", "content": TURNS[0]}]
    llm.chat(first, params, documents=DOCUMENTS)
    later = [*first, {"role": "assistant", "content": "Never heard of it."}, {"role": "user", "content": TURNS[1]}]
    (output,) = llm.chat(later, params, documents=DOCUMENTS)
    segment = output.reuse.segments[-1]
    known = segment.reused_tokens
    assert 4 < known < segment.num_tokens
    assert segment.note.startswith(f"{known} of {segment.num_tokens} tokens from earlier turns; ")
    assert segment.note.endswith("more of theirs are now written in other tokens, or were evicted")
    (other,) = llm.chat(later, params, documents=DOCUMENTS[:1])
    assert "tokens of earlier turns is cached after these documents" in other.reuse.segments[-1].note


def test_a_second_turn_answers_as_from_scratch():
    messages = [{"role": "user", "content": TURNS[0]}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make("reader") as llm, make("reader") as other:
        for question in TURNS[1:]:
            (output,) = llm.chat(messages, params, documents=DOCUMENTS)
            messages += [
                {"role": "assistant", "content": output.outputs[0].text},
                {"role": "user", "content": question},
            ]
            other.engine.kv_cache.reset()
            (warm,) = llm.chat(messages, params, documents=DOCUMENTS)
            (cold,) = other.chat(messages, params, documents=DOCUMENTS)
            assert warm.reuse.segments[-1].reused_tokens > 0 == cold.reuse.reused_tokens
            assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
