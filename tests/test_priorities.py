"""Priorities in the Python face: of requests, and of documents in a full cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.loaded import chatting_llama
from support.server import loaded_reader

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.errors import InvalidConfig, InvalidDocument, InvalidPriority, UnknownChunk
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Document, Segment

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Where?"}]
SMALL = EngineConfig(request_cache_size="4MiB", max_num_batched_tokens=256, max_num_seqs=1)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return chatting_llama()


@pytest.fixture
def llm(model):
    config = ChunkCacheConfig(chunk_cache_size="1MiB", max_chunks=2, eviction="priority", repair="none")
    with LLM(model, chunk_cache_config=config, engine_config=SMALL, self_check=False) as face:
        yield face


def document(name: str, priority: float | None = None) -> dict:
    return {"id": name, "text": f"The {name} is here.", "priority": priority}


def cached(llm) -> dict[str, float]:
    return {next(iter(chunk.names)): chunk.priority for chunk in llm.chunks.entries()}


def test_prompts_of_one_call_end_in_the_order_of_their_priority(llm):
    ended = []
    finish = llm.engine._core.end

    def watched(request):
        ended.append(request.priority)
        finish(request)

    llm.engine._core.end = watched
    outputs = llm.generate(["one", "two", "three"], GREEDY, priority=[-5, 0, 5])
    assert ended == [5, 0, -5], "one at a time"
    assert [output.prompt for output in outputs] == ["one", "two", "three"], "in the order in which they were given"
    llm.chat([QUESTION, QUESTION], GREEDY, priority=[1, 2])
    assert ended[3:] == [2, 1]
    list(llm.stream("one", GREEDY, priority=7))
    assert ended[5:] == [7]


@pytest.mark.parametrize("priority", [101, -101, 0.5, True, "high", [0], [0, 101]])
def test_a_priority_that_cannot_be_is_refused_before_anything_runs(llm, priority):
    with pytest.raises(InvalidPriority):
        llm.generate(["one", "two"], GREEDY, priority=priority)
    with pytest.raises(InvalidPriority):
        llm.chat([QUESTION, QUESTION], GREEDY, priority=priority)
    with pytest.raises(InvalidPriority):
        llm.stream("one", GREEDY, priority=priority)
    assert not llm.engine.has_unfinished_requests


def test_a_document_with_a_high_priority_stays_in_a_full_cache(llm):
    for first, second in (("ferry", "mill"), ("mill", "ferry")):
        llm.engine.kv_cache.reset()
        llm.chat(QUESTION, GREEDY, documents=[document(first, 0.9), document(second, 0.1)])
        llm.chat(QUESTION, GREEDY, documents=[document("bakery")])
        assert cached(llm) == {first: 0.9, "bakery": 0.5}


def test_what_a_document_says_last_counts_and_nothing_said_changes_nothing(llm):
    for priority, counts in ((None, 0.5), (0.9, 0.9), (None, 0.9), (0.0, 0.0)):
        llm.chat(QUESTION, GREEDY, documents=[document("ferry", priority)])
        assert cached(llm) == {"ferry": counts}


def test_priorities_reach_chunks_without_a_template_warmed_by_hand_and_by_name(llm):
    prompt = Prompt.from_documents([Document("The ferry is here.", id="ferry", priority=0.8)], "Where?")
    llm.generate(prompt, GREEDY)
    assert cached(llm) == {"ferry": 0.8}
    llm.warm([document("mill", 0.2)])
    assert cached(llm) == {"ferry": 0.8, "mill": 0.2}
    llm.chunks.set_priority("ferry", 0.1)
    assert cached(llm)["ferry"] == 0.1
    handle = llm.chunks.create("The ferry is here.", name="ferry", priority=1)
    assert cached(llm)["ferry"] == 1
    assert handle.segment.priority == 1


@pytest.mark.filterwarnings("ignore:documents that are too long")
def test_all_parts_of_a_split_document_have_its_priority(model):
    config = ChunkCacheConfig(chunk_cache_size="1MiB", max_chunk_tokens=8, long_chunks="split", repair="none")
    with LLM(model, chunk_cache_config=config, engine_config=SMALL, self_check=False) as llm:
        long = {"id": "log", "text": "The ferry is late. " * 8, "priority": 0.75}
        llm.chat(QUESTION, GREEDY, documents=[document("mill", 0.25), long])
        chunks = llm.chunks.entries()
        assert len(chunks) > 2
        assert {chunk.priority for chunk in chunks if "log" in str(chunk.names)} == {0.75}
        assert {chunk.priority for chunk in chunks if "mill" in str(chunk.names)} == {0.25}


def test_a_priority_is_no_part_of_what_is_cached(llm):
    (cold,) = llm.chat(QUESTION, GREEDY, documents=[document("ferry", 0.2)])
    (warm,) = llm.chat(QUESTION, GREEDY, documents=[document("ferry", 0.7)])
    assert llm.get_chunk_cache_stats().hits == 1
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


@pytest.mark.parametrize("priority", [-0.1, 1.1, 5, float("nan"), "0.5", True, [1]])
def test_a_priority_that_no_document_can_have_is_refused(llm, priority):
    for make in (
        lambda: Document("text", priority=priority),
        lambda: llm.chat(QUESTION, GREEDY, documents=[{"text": "The ferry.", "priority": priority}]),
        lambda: Segment("chunk", (1,), priority=priority),
        lambda: replace(Document("text"), priority=priority),
    ):
        with pytest.raises(InvalidDocument, match="a number from 0"):
            make()
    llm.chat(QUESTION, GREEDY, documents=[document("ferry")])
    with pytest.raises(InvalidConfig, match="between 0 and 1"):
        llm.chunks.set_priority("ferry", priority)
    with pytest.raises(UnknownChunk):
        llm.chunks.set_priority("mill", 0.5)


def test_with_the_policy_priority_answers_of_high_priority_stay_cached_longer() -> None:
    low, high = list(range(100, 164)), list(range(200, 264))
    config = ChunkCacheConfig(eviction="priority", chunk_cache_size="1MiB")
    size = EngineConfig(request_cache_size=16 * 16 * loaded_reader().bytes_per_token(), max_num_seqs=1)
    with LLM(loaded_reader(), chunk_cache_config=config, engine_config=size, self_check=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([high, low], params, priority=[50, -50])
        llm.generate([list(range(300, 300 + 12 * 16))], params)  # needs most of the 16 blocks
        reused = [llm.generate([each], params)[0].reuse.reused_tokens for each in (high, low)]
    assert reused[0] > reused[1]
