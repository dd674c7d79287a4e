"""What counts where nobody says anything: positions, repair, and where neither can be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import build
from support.loaded import chatting_llama
from support.server import loaded_reader
from support.tiny import save_tiny_model

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.errors import InvalidRepair
from kvmosaic.model import LoadedModel
from kvmosaic.repair import ASKED_REPAIR, DEFAULT_REPAIR, MANY_ASKED_REPAIR, UNMEASURED_REPAIR

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL = EngineConfig(request_cache_size="1MiB")
DOCUMENTS = [list(range(10, 30)), list(range(30, 55)), list(range(60, 80))]
PROMPT = Prompt.from_tokens([3, 4, 5], DOCUMENTS, [6, 7, 8])


def open_llm(family: str = "llama", max_model_len: int | None = None, **chunk_options: object) -> LLM:
    config = ChunkCacheConfig(**{"chunk_cache_size": "1MiB", "block_size": 4, **chunk_options})
    model = LoadedModel.from_module(build(family, torch.float32))
    return LLM(model, chunk_cache_config=config, engine_config=replace(SMALL, max_model_len=max_model_len))


def answer(llm: LLM, prompt: Prompt = PROMPT, params: SamplingParams = GREEDY, **options: object):
    (output,) = llm.generate(prompt, params, **options)
    return output


def test_documents_stand_one_behind_the_other_and_their_first_tokens_are_repaired():
    with open_llm() as llm:
        silent = answer(llm)
        assert "composed (sequential)" in silent.reuse.composition
        assert silent.reuse.repair.policy == DEFAULT_REPAIR
        assert silent.reuse.repair.repaired_tokens == 16, "eight of each document but the first, which is exact"
    with open_llm(position_strategy="sequential", repair=DEFAULT_REPAIR) as llm:
        assert answer(llm).outputs[0].token_ids == silent.outputs[0].token_ids


def test_a_prompt_that_does_not_fit_overlaps_and_says_so():
    with open_llm(max_model_len=60) as llm:
        assert "composed (shared)" in answer(llm).reuse.composition
        short = Prompt.from_tokens([3, 4, 5], DOCUMENTS[:2], [6, 7, 8])
        assert "composed (sequential)" in answer(llm, short).reuse.composition
        assert answer(llm).outputs[0].token_ids == answer(llm).outputs[0].token_ids, "cold and warm"


def test_none_is_one_word_away():
    with open_llm(repair="none") as llm:
        assert answer(llm).reuse.repair is None
    with open_llm() as llm:
        assert answer(llm, params=replace(GREEDY, repair="none")).reuse.repair is None
        assert "composed (shared)" in answer(llm, position_strategy="shared").reuse.composition


@pytest.mark.parametrize("family", ["gpt2", "bloom_twelve"])
def test_models_that_cannot_be_repaired_go_without_by_default_and_say_why_when_asked(family):
    with open_llm(family) as llm:
        assert answer(llm).reuse.repair is None
        with pytest.raises(InvalidRepair, match=r"positions|bias"):
            answer(llm, params=replace(GREEDY, repair=DEFAULT_REPAIR))
        assert answer(llm).outputs[0].token_ids == answer(llm).outputs[0].token_ids


def test_texts_without_end_go_without_repair_by_default():
    with open_llm() as llm:
        params = replace(GREEDY, sink_tokens=4, window_tokens=32)
        assert answer(llm, params=params).reuse.repair is None
        with pytest.raises(InvalidRepair, match="window_tokens"):
            answer(llm, params=replace(params, repair=DEFAULT_REPAIR))


def test_plain_prompts_know_nothing_of_it():
    with open_llm() as llm:
        output = answer(llm, Prompt.plain(range(3, 40)))
        assert output.reuse.composition == "exact" and output.reuse.repair is None


@pytest.mark.filterwarnings("ignore:documents that are too long")
def test_a_split_document_is_told_and_its_parts_are_found_again_in_any_positions():
    text_free = {"max_chunk_tokens": 12, "long_chunks": "split", "repair": "none"}
    with open_llm(**text_free) as llm:
        first = answer(llm)
        notes = [segment.note for segment in first.reuse.segments if segment.kind == "chunk"]
        assert notes[0].startswith("part 1 of 2 of a document that is longer than a chunk may be")
        again = answer(llm, position_strategy="shared")
        assert all(segment.reused_tokens for segment in again.reuse.segments if segment.kind == "chunk")


@pytest.mark.filterwarnings("ignore:documents that are too long")
def test_parts_of_a_document_that_is_longer_than_the_model_overlap_and_say_so():
    with open_llm(max_model_len=64, max_chunk_tokens=30, long_chunks="split", repair="none") as llm:
        prompt = Prompt.from_tokens([3, 4, 5], [list(range(10, 100))], [6, 7, 8])
        output = answer(llm, prompt)
        assert "composed (shared)" in output.reuse.composition
        notes = [segment.note for segment in output.reuse.segments if segment.kind == "chunk"]
        assert len(notes) == 3 and all("its parts overlap" in note for note in notes[1:])


DOCS = ["The ferry goes to Oak Island.", "A kiln burns lime.", "Oats are milled here."]
CHAT = [{"role": "user", "content": "Where?"}]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def actions(llm: LLM, documents: list[str], **options: object) -> list[str]:
    (output,) = llm.chat(CHAT, GREEDY, documents=documents, **options)
    return [segment.action for segment in output.reuse.segments if segment.kind == "chunk"]


def test_documents_after_the_first_have_met_a_companion_and_warming_computes_both_copies(tiny_model, monkeypatch):
    monkeypatch.setattr("kvmosaic.engine.placement.are_short", lambda _: False)
    with LLM(
        tiny_model, dtype="float32", self_check=False, chunk_cache_config=ChunkCacheConfig(chunk_cache_size="8MiB")
    ) as llm:
        (cold,) = llm.chat(CHAT, GREEDY, documents=DOCS)
        assert "documents after the first were computed after companions" in cold.reuse.composition
        (one,) = llm.chat(CHAT, GREEDY, documents=DOCS[:1])
        assert "companions" not in one.reuse.composition, "one document is exact"
        (turned,) = llm.chat(CHAT, GREEDY, documents=DOCS[::-1])
        misses = [segment.miss for segment in turned.reuse.segments if segment.kind == "chunk"]
        assert misses == ["other_companions", None, "other_companions"]
        assert actions(llm, [DOCS[1], DOCS[2], DOCS[0]])[1:] == ["moved", "moved"], "any later place"
        llm.warm(DOCS)
        assert "computed" not in actions(llm, [DOCS[1], DOCS[0], DOCS[2]])
        (shared,) = llm.chat(CHAT, GREEDY, documents=DOCS, position_strategy="shared")
        assert "companions" not in shared.reuse.composition, "they have no order"


def test_documents_that_have_met_companions_are_repaired_by_the_first_question(monkeypatch):
    """A longer one would cost more than it brings, and earlier turns would be computed again at every turn."""
    monkeypatch.setattr("kvmosaic.engine.placement.are_short", lambda _: False)
    monkeypatch.setattr("kvmosaic.prompt.found_documents.MAX_ASKING_TOKENS", 90)
    turns = [*CHAT, {"role": "assistant", "content": "Where the ferry goes."}, *CHAT]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with LLM(chatting_llama(), self_check=False) as llm:
        for messages, options, policy in [
            (CHAT, {}, ASKED_REPAIR),
            ([{"role": "user", "content": "word " * 110}], {}, None),
            (turns, {}, None),
            (CHAT, {"tools": [tool]}, None),
            (CHAT, {"position_strategy": "shared"}, DEFAULT_REPAIR),
            (CHAT, {"chunk_context": "system"}, DEFAULT_REPAIR),
        ]:
            (output,) = llm.chat(messages, GREEDY, documents=DOCS, **options)
            used = output.reuse.repair
            assert (used and used.policy) == policy, messages
        (output,) = llm.chat(CHAT, GREEDY, documents=[letter * 40 for letter in "abcdefghi"])
        assert output.reuse.repair.policy == MANY_ASKED_REPAIR
        monkeypatch.setattr(type(llm.model), "no_scores_reason", "it gives no attention")
        (output,) = llm.chat(CHAT, GREEDY, documents=DOCS)
        assert output.reuse.repair.policy == UNMEASURED_REPAIR
        monkeypatch.setattr("kvmosaic.engine.placement.MAX_REPAIR_LOOKS", 60)
        (output,) = llm.chat(CHAT, GREEDY, documents=DOCS)
        assert output.reuse.repair is None, "a default never refuses a prompt for its size"


@pytest.mark.slow
def test_documents_of_a_model_that_says_so_have_met_no_companion():
    with LLM(loaded_reader(), self_check=False) as llm:
        (output,) = llm.chat(CHAT, GREEDY, documents=DOCS)
        assert "companions" not in output.reuse.composition
        assert "computed" not in actions(llm, DOCS[::-1])
