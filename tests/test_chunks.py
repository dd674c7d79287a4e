"""The chunks of an LLM by name: looked up, evicted, brought back and cleared, with tiers and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.server import loaded_reader

from kvmosaic import LLM, ChunkCacheConfig, Prompt, SamplingParams, TierConfig
from kvmosaic.errors import ChunkInUse, UnknownChunk
from kvmosaic.prompt import Segment, SegmentKind

GREEDY = SamplingParams(temperature=0, max_tokens=4)
DOCUMENTS = [
    {"id": "ferry", "text": "The ferry goes to Oak Island at nine o'clock."},
    {"id": "mill", "text": "The mill grinds oats all day long."},
]
MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]


def open_llm(*tiers: str) -> LLM:
    return LLM(
        loaded_reader(),
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="32MiB", position_strategy="sequential", repair="none"),
        tier_config=TierConfig(chunk_tier=tiers, chunk_loading="always"),
        self_check=False,
    )


def actions(llm: LLM) -> dict[str | None, str]:
    (output,) = llm.chat(MESSAGES, GREEDY, documents=DOCUMENTS)
    return {segment.name: segment.action for segment in output.reuse.segments if segment.kind == "chunk"}


def test_chunks_are_looked_up_by_name() -> None:
    with open_llm() as llm:
        assert "ferry" not in llm.chunks and list(llm.chunks) == [] and llm.chunks
        llm.warm(DOCUMENTS)
        assert "ferry" in llm.chunks and list(llm.chunks) == ["ferry", "mill"] and len(llm.chunks) == 2
        handle = llm.chunks["ferry"]
        assert handle.name == "ferry" and handle.was_cached
        parts = (handle.segment, Segment(SegmentKind.QUESTION, text="Where?"))
        (output,) = llm.generate(Prompt(parts), GREEDY)
        assert output.reuse.segments[0].action in ("reused", "moved", "computed")
        with pytest.raises(KeyError, match="no cached chunk is called 'boat'"):
            llm.chunks["boat"]
        assert None not in llm.chunks


def test_chunk_at_a_position_of_its_own_is_found_with_it() -> None:
    with open_llm() as llm:
        llm.chunks.create([4, 5, 6], system=[1, 2], name="far", position_offset=100)
        assert llm.chunks["far"].position_offset == 100


def test_chunks_of_another_salt_are_not_found() -> None:
    with open_llm() as llm:
        llm.chunks.create([4, 5, 6], name="secret", salt="acme")
        assert "secret" not in llm.chunks and list(llm.chunks) == []
        with pytest.raises(UnknownChunk):
            llm.chunks["secret"]
        assert [handle.name for handle in llm.chunks.wake("secret", salt="acme")] == ["secret"]
        with pytest.raises(UnknownChunk, match="was warmed or created here"):
            llm.chunks.wake("secret")


def test_evicted_chunk_is_loaded_from_a_tier_when_it_is_woken(tmp_path: Path) -> None:
    with open_llm(f"disk:{tmp_path}?quota=1GiB") as llm:
        llm.warm(DOCUMENTS)
        llm.chunks.evict("ferry")
        assert list(llm.chunks) == ["mill"]
        (handle,) = llm.chunks.wake("ferry")
        assert handle.name == "ferry" and "ferry" in llm.chunks
        statistics = llm.get_chunk_cache_stats()
        assert (statistics.loaded_chunks, statistics.evictions) == (1, 1)
        assert actions(llm)["ferry"] in ("reused", "moved")


def test_evicted_chunk_is_computed_again_without_tiers() -> None:
    with open_llm() as llm:
        llm.warm(DOCUMENTS)
        llm.chunks.evict("ferry")
        assert not llm.chunks.wake("ferry")[0].was_cached
        assert llm.chunks.wake("ferry")[0].was_cached, "it is there already"


def test_pinned_chunk_is_not_evicted_by_name() -> None:
    with open_llm() as llm:
        llm.warm(DOCUMENTS)
        llm.chunks.pin("ferry")
        with pytest.raises(ChunkInUse, match="'ferry' is pinned; unpin it first"):
            llm.chunks.evict("ferry")
        llm.chunks.unpin("ferry")
        llm.chunks.evict("ferry")
        with pytest.raises(UnknownChunk):
            llm.chunks.evict("ferry")


def test_clear_deletes_chunks_from_the_tiers_as_well(tmp_path: Path) -> None:
    with open_llm(f"disk:{tmp_path}?quota=1GiB") as llm:
        llm.warm(DOCUMENTS)
        llm.chunks.pin("mill")
        llm.chunks.evict("ferry")
        assert llm.chunks.clear() == 1
        assert list(llm.chunks) == []
        with pytest.raises(UnknownChunk):
            llm.chunks.wake("ferry")
        assert set(actions(llm).values()) == {"computed"}
        assert llm.get_chunk_cache_stats().loaded_chunks == 0


@pytest.mark.parametrize("reset_external", [False, True])
def test_reset_drops_the_device_and_on_request_the_tiers(tmp_path: Path, reset_external: bool) -> None:
    with open_llm(f"disk:{tmp_path}?quota=1GiB") as llm:
        actions(llm)
        assert llm.reset_prefix_cache(reset_external=reset_external)
        assert list(llm.chunks) == []
        actions(llm)
        assert llm.get_chunk_cache_stats().loaded_chunks == (0 if reset_external else 2)


def test_reset_leaves_what_a_running_request_uses() -> None:
    with open_llm() as llm:
        stream = llm.stream(MESSAGES, GREEDY, documents=DOCUMENTS)
        next(stream)
        assert not llm.reset_prefix_cache()
        assert list(llm.chunks) == ["ferry", "mill"]
        (last,) = [output for output in stream if output.finished]
        assert last.outputs[0].finish_reason in ("stop", "length")
        llm.engine.kv_cache.check_invariants()
        assert llm.reset_prefix_cache()
