"""The Python face: text, chat, tokens and handles in; answers with a reuse report out."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.families import build
from support.loaded import chatting_llama
from support.tokenizers import make_tokenizer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.assembly import device_memory_bytes
from kvmosaic.attention import TorchBackend
from kvmosaic.errors import (
    ChunkCacheFull,
    ChunkCacheOff,
    ChunkTooLong,
    EmptySegment,
    EngineStopped,
    InvalidConfig,
    InvalidDocument,
    InvalidMessages,
    InvalidOffset,
    InvalidPrompt,
    InvalidSampling,
    InvalidSees,
    InvalidTokenId,
    ModelNotFound,
    NotMovable,
    PromptTooLong,
    RequestTooLarge,
    TooManyChunks,
    UnknownChunk,
)
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Segment, SegmentKind

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL = EngineConfig(request_cache_size="4MiB", max_num_batched_tokens=256)
TEXT = "Be brief. ## The ferry goes to Oak Island. ## The mill grinds oats. ## Where does the ferry go?"
SWAPPED = "Be brief. ## The mill grinds oats. ## The ferry goes to Oak Island. ## Where does the ferry go?"
DOCUMENTS = [{"id": "ferry", "text": "The ferry goes to Oak Island."}, {"id": "mill", "text": "The mill grinds oats."}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the ferry go?"}]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return chatting_llama()


@pytest.fixture
def llm(model):
    with make(model) as face:
        yield face


def make(model, *, engine=None, **options):
    fixed = {"position_strategy": "shared", "repair": "none"}
    config = ChunkCacheConfig(**{"chunk_cache_size": "1MiB", "chunk_separator": "##", **fixed, **options})
    return LLM(model, chunk_cache_config=config, engine_config=engine or SMALL)


def actions(output):
    return [segment.action for segment in output.reuse.segments]


def test_known_documents_in_another_order_are_reused(llm):
    (cold,) = llm.generate(TEXT, GREEDY)
    (warm,) = llm.generate(SWAPPED, GREEDY)
    assert actions(cold) == ["computed"] * 4
    assert actions(warm) == ["reused", "reused", "reused", "partly reused"]
    assert warm.reuse.computed_tokens == 1, "the same question behind the same documents, but for its last token"
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids
    assert cold.outputs[0].finish_reason == "length" and cold.finished
    assert warm.reuse.time_to_first_token > 0 and warm.num_cached_tokens == warm.reuse.reused_tokens
    stats = llm.get_chunk_cache_stats()
    assert (stats.lookups, stats.hits, stats.misses, stats.hit_rate) == (4, 2, 2, 0.5)
    assert stats.cached_chunks == 2 and stats.evictions == 0 and stats.used_blocks > 0
    assert min(stats.average_lookup_ms, stats.average_allocate_ms, stats.average_compute_ms) > 0


def test_moved_documents_say_how_far(model):
    with make(model, position_strategy="sequential", chunk_context="system") as llm:
        llm.generate(TEXT, GREEDY)
        (warm,) = llm.generate(SWAPPED, GREEDY)
    first, second = warm.reuse.segments[1:3]
    assert (first.action, first.distance) == ("reused", 0)
    assert (second.action, second.distance) == ("moved", first.num_tokens)
    assert warm.reuse.moved_tokens == second.num_tokens


def test_blind_documents_are_reused_under_another_system_prompt_and_say_so(model):
    with make(model, chunk_context="none") as llm:
        llm.generate(TEXT, GREEDY)
        (other,) = llm.generate(TEXT.replace("Be brief", "Be verbose"), GREEDY)
    assert actions(other) == ["computed", "moved", "moved", "computed"]
    assert "did not see the system prompt" in other.reuse.composition


def test_a_request_chooses_what_its_documents_saw(llm):
    other = [{"role": "system", "content": "Be verbose."}, MESSAGES[1]]
    llm.warm(DOCUMENTS, system="Be brief.", chunk_context="none")
    (context_free,) = llm.chat(other, GREEDY, documents=DOCUMENTS, chunk_context="none")
    assert [segment.reused_tokens > 0 for segment in context_free.reuse.segments] == [False, True, True, False]
    assert "documents did not see the system prompt" in context_free.reuse.composition
    (seeing,) = llm.chat(other, GREEDY, documents=DOCUMENTS)
    assert actions(seeing)[1:3] == ["computed", "computed"], "those that saw it are other chunks"
    assert "did not see" not in seeing.reuse.composition
    assert llm.plan(TEXT, chunk_context="none").spans[1].action == "compute"
    llm.generate(TEXT, GREEDY, chunk_context="none")
    assert llm.plan(TEXT, chunk_context="none").spans[1].num_reused > 0
    assert llm.plan(TEXT).spans[1].num_reused == 0
    *_, streamed = llm.stream(other, GREEDY, documents=DOCUMENTS, chunk_context="none", adapter="")
    with pytest.raises(InvalidPrompt, match=r"there is no adapter 'mine'; .* or LLM\(model, adapter=…\)"):
        next(llm.stream(other, GREEDY, adapter="mine"))
    assert streamed.outputs[0].token_ids == context_free.outputs[0].token_ids


def test_a_request_answers_as_an_llm_whose_settings_say_the_same(model, llm):
    with make(model, chunk_context="none") as context_free:
        (configured,) = context_free.generate(TEXT, GREEDY)
        (seeing,) = context_free.generate(TEXT, GREEDY, chunk_context="system")
        handle = context_free.chunks.create("Another.", chunk_context="system")
        assert not context_free.chunks.create("Another.").was_cached
        assert context_free.chunks.create("Another.", chunk_context="system").was_cached and handle.name is None
    (asked,) = llm.generate(TEXT, GREEDY, chunk_context="none")
    (plain,) = llm.generate(TEXT, GREEDY)
    assert asked.outputs[0].token_ids == configured.outputs[0].token_ids
    assert seeing.outputs[0].token_ids == plain.outputs[0].token_ids
    assert [configured.reuse.composition, plain.reuse.composition] == [
        asked.reuse.composition,
        seeing.reuse.composition,
    ]


def test_documents_depend_on_the_system_prompt_by_default(llm):
    llm.generate(TEXT, GREEDY)
    (other,) = llm.generate(TEXT.replace("Be brief", "Be verbose"), GREEDY)
    assert actions(other) == ["computed"] * 4


def test_prompts_are_answered_together_and_in_order(llm):
    questions = [TEXT, "just an ordinary prompt", Prompt.from_tokens([1, 2], [[3, 4]], [5])]
    together = llm.generate(questions, [replace(GREEDY, max_tokens=count) for count in (2, 3, 4)])
    assert [len(output.outputs[0].token_ids) for output in together] == [2, 3, 4]
    assert together[1].reuse.composition == "exact"
    with pytest.raises(InvalidConfig, match="2 sampling_params for 3 prompts"):
        llm.generate(questions, [GREEDY, GREEDY])


def test_chat_with_documents_reuses_what_warm_computed(llm):
    handles = llm.warm(DOCUMENTS, system="Be brief.")
    assert [handle.name for handle in handles] == ["ferry", "mill"]
    assert not any(handle.was_cached for handle in handles)
    assert all(handle.was_cached for handle in llm.warm(DOCUMENTS, system="Be brief."))
    (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS[::-1])
    assert [segment.name for segment in output.reuse.segments[1:3]] == ["mill", "ferry"]
    assert actions(output)[1:3] == ["reused", "reused"]
    two = llm.chat([MESSAGES, MESSAGES[1:]], GREEDY, documents=DOCUMENTS)
    assert len(two) == 2


def test_a_model_without_a_chat_template_takes_one_question_as_text():
    tokenizer = make_tokenizer()
    bare = LoadedModel.from_module(build("llama", torch.float32, vocab_size=len(tokenizer)), tokenizer)
    with make(bare) as llm:
        kinds = [segment.kind for segment in llm.compose(MESSAGES, documents=DOCUMENTS).segments]
        assert kinds == ["system", "chunk", "chunk", "question"]
        with pytest.raises(InvalidMessages, match="chat_template"):
            llm.compose([*MESSAGES, {"role": "assistant", "content": "no"}, *MESSAGES[1:]], documents=DOCUMENTS)


def test_streaming_grows_to_the_same_answer(llm):
    (whole,) = llm.generate(TEXT, GREEDY)
    parts = list(llm.stream(TEXT, GREEDY))
    assert [len(part.outputs[0].token_ids) for part in parts] == list(range(1, 7))
    assert parts[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert parts[-1].finished and not parts[0].finished
    assert list(llm.stream(MESSAGES, GREEDY, documents=DOCUMENTS))[-1].finished


def test_streams_that_take_turns_each_give_their_whole_answer(llm):
    texts = [TEXT, SWAPPED + " Or the mill?"]
    alone = [output.outputs[0].token_ids for output in llm.generate(texts, GREEDY)]
    streams = [llm.stream(text, GREEDY) for text in texts]
    last = [None, None]
    for _ in range(20):
        for number in (0, 1, 1):
            last[number] = next(streams[number], last[number])
    assert [output.outputs[0].token_ids for output in last] == alone
    assert all(output.finished for output in last)


def test_closing_a_stream_gives_the_blocks_back(llm):
    stream = llm.stream(TEXT, replace(GREEDY, max_tokens=200))
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_invariants()
    assert llm.engine.kv_cache.request_pool.num_shared == 0


def test_logprobs_stop_and_n_have_vllm_names(llm):
    (output,) = llm.generate(TEXT, replace(GREEDY, n=2, logprobs=3))
    assert len(output.outputs) == 2
    first = output.outputs[0]
    assert len(first.logprobs) == 6 and len(first.logprobs[0]) >= 3
    assert first.logprobs[0][first.token_ids[0]].rank == 1
    assert first.cumulative_logprob < 0
    (stopped,) = llm.generate(TEXT, replace(GREEDY, stop_token_ids=[first.token_ids[2]]))
    assert stopped.outputs[0].finish_reason == "stop" and stopped.outputs[0].stop_reason == first.token_ids[2]


def test_handles_can_be_mixed_at_will(model):
    with make(model, position_strategy="sequential") as llm:
        a, b = (llm.chunks.create(body, system=[1, 2, 3], name=name) for body, name in (([4] * 9, "a"), ([5] * 7, "b")))
        system, question = Segment(SegmentKind.SYSTEM, (1, 2, 3)), Segment(SegmentKind.QUESTION, (6, 7))
        (output,) = llm.generate(Prompt((system, b.segment, a.segment, b.segment, question)), GREEDY)
    assert actions(output) == ["reused", "reused", "moved", "moved", "computed"]


def test_absolute_handles_are_baked_at_their_offset(llm):
    handle = llm.chunks.create([4, 5, 6], system=[1, 2], position_offset=100)
    assert handle.position_offset == 100
    prompt = Prompt((Segment(SegmentKind.SYSTEM, (1, 2)), handle.segment, Segment(SegmentKind.QUESTION, (9,))))
    (output,) = llm.generate(prompt, GREEDY, position_strategy="absolute")
    assert actions(output) == ["reused", "reused", "computed"]
    elsewhere = llm.chunks.create([4, 5, 6], system=[1, 2], position_offset=200)
    assert not elsewhere.was_cached, "baked KV is reused only at its offset"


def test_pinned_documents_stay_and_deleted_ones_go(model):
    capacity = 12 * 16 * model.bytes_per_token()
    with make(model, chunk_cache_size=capacity) as llm:
        llm.warm([{"id": "kept", "text": "The ferry goes to Oak Island."}])
        llm.chunks.pin("kept")
        for number in range(12):
            llm.warm([{"id": f"other {number}", "text": f"Mill number {number} grinds oats all day long."}])
        names = [name for chunk in llm.chunks.entries() for name in chunk.names]
        assert "kept" in names and llm.get_chunk_cache_stats().evictions > 0
        llm.chunks.unpin("kept")
        llm.chunks.delete("kept")
        with pytest.raises(UnknownChunk, match="kept"):
            llm.chunks.delete("kept")


def test_a_plan_changes_nothing_and_can_be_printed(llm):
    assert llm.plan(TEXT).reused_tokens == 0
    llm.generate(TEXT, GREEDY)
    plan = llm.plan(SWAPPED)
    assert [span.action for span in plan.spans] == ["reuse", "reuse", "reuse", "compute"]
    assert "chunk" in str(plan)


def test_without_the_chunk_cache_segments_are_joined(model):
    config = ChunkCacheConfig(chunk_separator="##")
    with LLM(model, enable_chunk_cache=False, chunk_cache_config=config, engine_config=SMALL) as llm:
        (output,) = llm.generate(TEXT, GREEDY)
        assert not llm.has_chunk_cache and llm.self_check is None
        assert [span.kind for span in llm.plan(TEXT).spans] == ["plain"]
        with pytest.raises(ChunkCacheOff, match="switched off"):
            llm.warm(DOCUMENTS)
        assert [segment.kind for segment in output.reuse.segments] == ["plain"]
        assert "not composed: switched off" in output.reuse.composition
        (again,) = llm.generate(TEXT, GREEDY)
        assert again.num_cached_tokens > 0, "ordinary prefix caching goes on"


def test_a_failed_self_check_switches_the_chunk_cache_off(model):
    wrong = tuple(
        replace(layer, rotation=replace(layer.rotation, inv_freq=tuple(2 * f for f in layer.rotation.inv_freq)))
        for layer in model.layers
    )
    with pytest.warns(UserWarning, match="chunk cache is off"):
        llm = make(replace(model, layers=wrong), position_strategy="sequential")
    assert not llm.has_chunk_cache and "differ" in llm.chunk_cache_off_reason
    (output,) = llm.generate(TEXT, GREEDY)
    assert "not composed" in output.reuse.composition


def test_models_that_cannot_move_documents_say_so():
    learned = LoadedModel.from_module(build("gpt2", torch.float32))
    with pytest.raises(NotMovable, match="position_strategy='sequential'"):
        make(learned, position_strategy="sequential")
    with make(learned) as llm:
        with pytest.raises(NotMovable, match="chunk_context='none' moves documents"):
            llm.generate(Prompt.from_tokens([1, 2], [[3, 4], [5]], [6]), GREEDY, chunk_context="none")
        (output,) = llm.generate(Prompt.from_tokens([1, 2], [[3, 4], [5]], [6]), GREEDY)
        assert actions(output) == ["computed"] * 4
        (output,) = llm.generate(Prompt.from_tokens([1, 2], [[5], [3, 4]], [6]), GREEDY)
        assert actions(output) == ["reused", "reused", "reused", "computed"]


def snapshot(llm):
    kv_cache = llm.engine.kv_cache
    kv_cache.check_invariants()
    stats = kv_cache.statistics()
    return (
        kv_cache.request_pool.num_used,
        kv_cache.chunk_pool.num_used,
        stats.cached_chunks,
        stats.prefix_blocks,
        stats.evictions,
        llm.engine.has_unfinished_requests,
        [(chunk.key, chunk.num_tokens, chunk.pinned, chunk.ref_count) for chunk in kv_cache.chunks()],
    )


LONG = "word " * 3000
BAD_CALLS = {
    "empty question": (lambda llm: llm.generate("system ## document ## ", GREEDY), EmptySegment),
    "empty document": (lambda llm: llm.generate("system ## ## question", GREEDY), EmptySegment),
    "empty system": (lambda llm: llm.generate(" ## document ## question", GREEDY), EmptySegment),
    "empty tokens": (lambda llm: llm.generate(Prompt.from_tokens([1], [[]], [2]), GREEDY), EmptySegment),
    "unknown token": (lambda llm: llm.generate(Prompt.from_tokens([1], [[10**6]], [2]), GREEDY), InvalidTokenId),
    "negative token": (lambda llm: llm.generate(Prompt.from_tokens([1], [[-1]], [2]), GREEDY), InvalidTokenId),
    "long document": (lambda llm: llm.generate(f"system ## {LONG} ## question", GREEDY), ChunkTooLong),
    "long prompt": (lambda llm: llm.generate(LONG, GREEDY), PromptTooLong),
    "long composed prompt": (
        lambda llm: llm.generate(Prompt.from_tokens([1] * 2000, [[2] * 60], [3]), GREEDY),
        PromptTooLong,
    ),
    "many documents": (lambda llm: llm.generate("s" + " ## d" * 20 + " ## q", GREEDY), TooManyChunks),
    "cache too small": (
        lambda llm: llm.generate(Prompt.from_tokens([1], [[n] * 60 for n in range(9)], [2]), GREEDY),
        ChunkCacheFull,
    ),
    "no messages": (lambda llm: llm.chat([], GREEDY), InvalidMessages),
    "message without role": (lambda llm: llm.chat([{"content": "hello"}], GREEDY), InvalidMessages),
    "document without text": (lambda llm: llm.chat(MESSAGES, GREEDY, documents=[{"id": "x"}]), InvalidDocument),
    "bad sampling": (lambda llm: llm.generate(TEXT, SamplingParams(temperature=-1)), InvalidSampling),
    "unknown pin": (lambda llm: llm.chunks.pin("nobody"), UnknownChunk),
    "empty prompt": (lambda llm: llm.generate("  ", GREEDY), EmptySegment),
    "number as prompt": (lambda llm: llm.generate(5, GREEDY), InvalidPrompt),
    "nothing as prompt": (lambda llm: llm.generate([None], GREEDY), InvalidPrompt),
    "mapping without prompt": (lambda llm: llm.generate({"text": "x"}, GREEDY), InvalidPrompt),
    "mapping as parameters": (lambda llm: llm.generate(TEXT, {"temperature": 0}), InvalidSampling),
    "one document to warm": (lambda llm: llm.warm({"text": "x"}), InvalidDocument),
    "pin of nothing": (lambda llm: llm.chunks.pin(None), UnknownChunk),
    "offset missing": (lambda llm: llm.generate(TEXT, GREEDY, position_strategy="absolute"), InvalidOffset),
    "unknown context": (lambda llm: llm.generate(TEXT, GREEDY, chunk_context="all"), InvalidConfig),
    "sees a later chunk": (
        lambda llm: llm.generate(Prompt((Segment("chunk", (1,), sees=(1,)), Segment("question", (2,)))), GREEDY),
        InvalidSees,
    ),
    "question too large for the pool": (lambda llm: llm.generate(Prompt.plain([1] * 2000), GREEDY), RequestTooLarge),
    "second prompt too long": (
        lambda llm: llm.generate([TEXT, Prompt.from_tokens([1] * 2000, [[2] * 60], [3])], GREEDY),
        PromptTooLong,
    ),
    "second prompt bad": (lambda llm: llm.generate([TEXT + " more", "a ## ## b"], GREEDY), EmptySegment),
}


def test_documents_without_places_are_told_the_ways_out(llm):
    with pytest.raises(
        InvalidOffset, match=r"one of at least \d+ per document: give it, or choose another position_str"
    ):
        llm.chat(MESSAGES, GREEDY, documents=["x"], position_strategy="absolute")


def test_documents_found_in_a_message_stay_text_where_they_cannot_be_placed_with_the_ways_out(llm):
    text = "The tower of Fenbury is forty metres high, and older than the town."
    message = f"Use the context.\n<doc>{text}</doc>\nHow high is the tower?"
    options = {"find_documents": "patterns", "position_strategy": "absolute"}
    found, plain = (
        llm.chat([{"role": "user", "content": message}], GREEDY, **how)[0]
        for how in (options, {"find_documents": "none"})
    )
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert re.search(r"could not be .*\(pattern .*; set find_documents='none', or another", found.reuse.composition)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named_and_leaves_the_cache_as_it_was(model, name):
    call, error = BAD_CALLS[name]
    capacity = 24 * 16 * model.bytes_per_token()
    small = EngineConfig(request_cache_size=100 * 16 * model.bytes_per_token(), max_num_batched_tokens=256)
    config = ChunkCacheConfig(
        chunk_cache_size=capacity,
        chunk_separator="##",
        max_chunk_tokens=64,
        max_prompt_chunks=12,
        long_chunks="error",
        position_strategy="shared",
        repair="none",
        oversized_prompts="error",
    )
    with LLM(model, chunk_cache_config=config, engine_config=small) as llm:
        llm.generate(TEXT, GREEDY)
        before = snapshot(llm)
        with pytest.raises(error) as caught:
            call(llm)
        assert snapshot(llm) == before
        assert str(caught.value)
        (after,) = llm.generate(TEXT, GREEDY)
        assert actions(after)[:3] == ["reused"] * 3


WRONG_SEGMENTS = {
    "offset is no whole number": (lambda: Segment("chunk", (1,), position_offset=3.5), InvalidOffset),
    "offset is a truth value": (lambda: Segment("chunk", (1,), position_offset=True), InvalidOffset),
    "offset is huge": (lambda: Segment("chunk", (1,), position_offset=2**70), InvalidOffset),
    "sees is a number": (lambda: Segment("chunk", (1,), sees=0), InvalidSees),
    "name is a list": (lambda: Segment("chunk", (1,), name=[1]), InvalidPrompt),
    "name is endless": (lambda: Segment("chunk", (1,), name="x" * 10**6), InvalidPrompt),
    "text is a number": (lambda: Segment("chunk", text=5), InvalidPrompt),
    "text is no unicode": (lambda: Segment("chunk", text="a\udcff"), InvalidPrompt),
    "document is no unicode": (lambda: Prompt.from_documents(["a\udcff"], "q"), InvalidDocument),
    "kind is unknown": (lambda: Segment("part", (1,)), InvalidPrompt),
    "size is a fraction": (lambda: ChunkCacheConfig(chunk_cache_size=1.5), InvalidConfig),
    "size is missing": (lambda: EngineConfig(request_cache_size=None), InvalidConfig),
    "no such engine": (lambda: LLM("reader", engine="llama.cpp"), InvalidConfig),  # it ran in transformers
    "threads are none": (lambda: EngineConfig(num_threads=0), InvalidConfig),
    "threads are endless": (lambda: EngineConfig(num_threads=10**6), InvalidConfig),
    "size is endless": (lambda: ChunkCacheConfig(chunk_cache_size="9" * 400 + "GiB"), InvalidConfig),
    "fraction is a text": (lambda: ChunkCacheConfig(chunk_cache_fraction="0.5"), InvalidConfig),
    "seconds are a text": (lambda: ChunkCacheConfig(log_stats_seconds="1"), InvalidConfig),
    "separator is a number": (lambda: ChunkCacheConfig(chunk_separator=3), InvalidConfig),
    "separator escapes": (lambda: ChunkCacheConfig(chunk_separator="\\"), InvalidConfig),
}


@pytest.mark.parametrize("name", WRONG_SEGMENTS)
def test_wrong_types_and_values_are_named(name):
    make_it, error = WRONG_SEGMENTS[name]
    with pytest.raises(error):
        make_it()


def test_a_handle_of_a_text_too_long_for_one_chunk_is_refused(model):
    with make(model, max_chunk_tokens=8, long_chunks="split") as llm, pytest.raises(ChunkTooLong, match="use warm"):
        llm.chunks.create(list(range(10, 30)), name="long")


def test_a_handle_of_a_text_is_found_by_prompts_in_text(llm):
    handle = llm.chunks.create("The ferry goes to Oak Island.")
    prompt = Prompt((handle.segment, Segment(SegmentKind.QUESTION, text="Where?")))
    (output,) = llm.generate(prompt, GREEDY)
    (twin,) = llm.generate(Prompt.from_documents(["The ferry goes to Oak Island."], "Where?"), GREEDY)
    assert actions(output)[1] == "reused" and output.outputs[0].token_ids == twin.outputs[0].token_ids


@pytest.mark.parametrize("of_ids", [torch.tensor, np.array, tuple])
def test_a_handle_is_made_of_tensors_and_arrays_of_token_ids(llm, of_ids):
    plain = llm.chunks.create([4, 5, 6], system=[1, 2])
    handle = llm.chunks.create(of_ids([4, 5, 6]), system=of_ids([1, 2]))
    assert handle.was_cached and handle.segment == plain.segment
    assert set(map(type, handle.segment.token_ids)) == {int}
    with pytest.raises(InvalidTokenId, match="token ids must be whole numbers"):
        llm.chunks.create(of_ids([0.5, 1.5]))


def test_tenants_warm_pin_and_delete_their_own_documents(llm):
    llm.warm(DOCUMENTS, system="Be brief.", salt="a")
    with pytest.raises(UnknownChunk):
        llm.chunks.pin("ferry")
    llm.chunks.pin("ferry", salt="a")
    (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS, salt="a")
    assert actions(output)[1:3] == ["reused", "reused"]
    (other,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS)
    assert other.reuse.reused_tokens == 0
    llm.chunks.unpin("ferry", salt="a")
    llm.chunks.delete("ferry", salt="a")


def test_more_documents_than_one_prompt_may_have_can_be_warmed(model):
    with make(model, max_prompt_chunks=2) as llm:
        handles = llm.warm([f"Document number {number}." for number in range(5)])
        assert len(handles) == 5 and llm.get_chunk_cache_stats().cached_chunks == 5


def test_parts_of_split_documents_count_as_documents(model):
    options = {"max_chunk_tokens": 4, "max_prompt_chunks": 3, "long_chunks": "split"}
    with make(model, **options) as llm, pytest.raises(TooManyChunks, match="parts of long ones included"):
        llm.generate("s ## " + "word " * 60 + " ## q", GREEDY)


@pytest.mark.filterwarnings("ignore:documents that are too long")
def test_long_documents_are_split_by_configuration(model):
    with make(model, max_chunk_tokens=64, long_chunks="split") as llm:
        (output,) = llm.generate("system ## " + "word " * 100 + " ## question", GREEDY)
        assert sum(segment.kind == "chunk" for segment in output.reuse.segments) > 1


def test_a_closed_llm_refuses_requests(model):
    llm = make(model)
    llm.close()
    with pytest.raises(EngineStopped):
        llm.generate(TEXT, GREEDY)


def test_prompts_may_be_mappings_and_token_ids_as_in_vllm(llm):
    as_text, as_ids, bare = (
        llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
        for prompt in ({"prompt": TEXT}, {"prompt_token_ids": [5, 6, 7]}, [5, 6, 7])
    )
    assert as_text == llm.generate(TEXT, GREEDY)[0].outputs[0].token_ids
    assert as_ids == bare


def test_a_backend_and_a_policy_of_ones_own_are_used(model):
    class Counting(TorchBackend):
        calls = 0

        def attend(self, query, key, value, **options):
            Counting.calls += 1
            return super().attend(query, key, value, **options)

    class LargestFirst:
        name = "largest first"

        def rank(self, candidate):
            return -candidate.num_tokens

    config = ChunkCacheConfig(chunk_cache_size="1MiB", chunk_separator="##", eviction=LargestFirst())
    with LLM(model, chunk_cache_config=config, engine_config=SMALL, attention_backend=Counting()) as llm:
        llm.generate(TEXT, GREEDY)
    assert Counting.calls > 0
    with pytest.raises(InvalidConfig, match="settings must be a ChunkCacheConfig, got dict"):
        LLM(model, chunk_cache_config={"chunk_cache_size": "1MiB"})


@pytest.mark.filterwarnings("ignore:documents that are too long")
def test_split_documents_fit_beside_the_system_prompt_and_the_question(model):
    with make(model, long_chunks="split", chunk_cache_size="8MiB") as llm:
        (output,) = llm.generate("system ## " + "word " * 4000 + " ## question", GREEDY)
        chunks = [segment.num_tokens for segment in output.reuse.segments if segment.kind == "chunk"]
        assert len(chunks) > 1 and max(chunks) < 1024


def test_an_unknown_model_says_what_to_do():
    with pytest.raises(ModelNotFound):
        LLM("./no/such/folder")


def test_memory_for_less_than_one_block_is_refused(model):
    with pytest.raises(InvalidConfig, match="chunk cache's capacity is 10 bytes"):
        make(model, chunk_cache_size=10)


def test_memory_utilization_leaves_the_rest_of_the_device_to_documents(model):
    total = device_memory_bytes(model.device)
    fraction = (model.weight_bytes + 2**22 + 2**24) / total
    with make(model, memory_utilization=fraction, engine=replace(SMALL, request_cache_size=2**22)) as llm:
        size = llm.engine.kv_cache.chunk_pool.num_blocks * llm.model.bytes_per_token() * 16
    assert 2**24 - 2**16 < size <= 2**24
    assert model.weight_bytes >= model.num_parameters * 2
    with pytest.raises(
        InvalidConfig, match=r"but the weights take 0\.\d\d GiB and the request cache 0\.00 GiB; raise it"
    ):
        make(model, memory_utilization=1e-9)


def test_statistics_are_logged_when_asked_for(model, caplog):
    caplog.set_level("INFO", logger="kvmosaic")
    with make(model, log_stats_seconds=1e-6) as llm:
        llm.generate(TEXT, GREEDY)
    told = next(record.getMessage() for record in caplog.records if "lookups=" in record.getMessage())
    figures = told.removeprefix("chunk cache: ").split(" ")
    assert len(figures) == 12 and all(re.fullmatch(r"[a-z_]+=[0-9.]{1,16}", figure) for figure in figures), told
    with pytest.raises(AttributeError, match="no attribute 'hit_count'; here it is 'hits'"):
        _ = llm.get_chunk_cache_stats().hit_count


def test_settings_have_their_names_as_keywords_and_other_names_are_told(model):
    with LLM(model, engine_config=SMALL, chunk_separator="##", max_num_seqs=3, chunk_codec="int8") as llm:
        assert (llm.chunk_cache_config.chunk_separator, llm.tier_config.chunk_codec) == ("##", "int8")
        assert llm.engine_config == replace(SMALL, max_num_seqs=3)
    for name, told in (
        ("chunk_cache_gpu_memory_utilization", "did you mean 'chunk_cache_fraction'"),
        ("enable_chunk_aware", "did you mean 'enable_chunk_cache'"),
        ("max_chunk_token", "did you mean 'max_chunk_tokens'?"),
        ("colour", "LLM has no setting 'colour'$"),
    ):
        with pytest.raises(TypeError, match=told):
            LLM(model, **{name: 1})


def test_repair_is_set_where_positions_are(model):
    with make(model) as llm:
        prompt = Prompt.from_tokens(range(3, 9), [range(9, 20), range(20, 30)], range(30, 33))
        (output,) = llm.generate(prompt, GREEDY, repair="first(3)")
        assert (output.reuse.repair.policy, output.reuse.repair.repaired_tokens) == ("first(3)", 3)
        assert list(llm.stream(prompt, GREEDY, repair="none"))[-1].reuse.repair is None
        assert llm.generate([prompt] * 2, [GREEDY] * 2, repair="none")[1].reuse.repair is None
        with pytest.raises(InvalidConfig, match="here 'virtual' is 'shared'"):
            llm.generate(prompt, GREEDY, position_strategy="virtual")


def test_separators_inside_lines_are_told_of(model):
    with make(model, chunk_separator=None) as llm:
        with pytest.warns(UserWarning, match=r"one ordinary prompt; if they separate documents, use Prompt\.from_text"):
            llm.generate("system ## first ## question", GREEDY)
        llm.generate("# Title\n\n## First\n\ntext\n  ## Second\n### c ##", GREEDY)  # Markdown


def test_split_documents_are_told_of(model):
    with make(model, max_chunk_tokens=24, long_chunks="split") as llm:
        for act in (
            lambda: llm.warm([{"id": "a", "text": "word " * 60}, "b"]),
            lambda: llm.chat([{"role": "user", "content": "q"}], GREEDY, documents=["word " * 60, "b"]),
        ):
            with pytest.warns(UserWarning, match=r"divided \(long_chunks\): .*, 8 parts; no part sees"):
                act()


def test_the_longest_unused_chunks_are_evicted_first(model):
    with make(model) as llm:
        llm.warm(["one", "two", {"id": "three", "text": "three"}])
        before = llm.chunks.entries()
        llm.chunks.pin("three")
        assert [llm.chunks.evict_oldest(), llm.chunks.evict_oldest(5), llm.chunks.evict_oldest()] == [1, 1, 0]
        assert llm.chunks.entries() == before[2:]


@pytest.mark.parametrize("wanted", [None, 2])
def test_threads_are_left_alone_unless_they_are_given(model, wanted):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with LLM(model, engine_config=replace(SMALL, num_threads=wanted)):
            assert torch.get_num_threads() == (wanted or 1)
    finally:
        torch.set_num_threads(before)


def test_default_sampling_params_are_those_that_the_model_advises(model):
    with LLM(replace(model, generation_settings={"temperature": 0.6, "top_k": 20}), engine_config=SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    with LLM(model, engine_config=SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with LLM(engine_config=SMALL) as llm:  # the bundled model
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
