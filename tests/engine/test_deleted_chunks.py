"""What is deleted by name is deleted everywhere, whether the device has it, only a tier, or nobody yet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engine.test_chunk_offloader import answer, empty, flush, with_tiers
from support.engines import GREEDY, build_engine
from support.families import build
from support.loaded import random_prompt
from support.tiers import TroubledTier

from kvmosaic.chunks import ChunkStore
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.engine import Engine
from kvmosaic.errors import UnknownChunk
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, PromptEncoder, SegmentKind


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


@pytest.fixture
def disk() -> TroubledTier:
    return TroubledTier("disk")


@pytest.fixture
def engine(model: LoadedModel, disk: TroubledTier) -> Engine:
    engine = build_engine(model)
    with_tiers(engine, disk)
    return engine


def named(prompt: Prompt, salt: str = "") -> Prompt:
    """Its chunks are called a, b, c, …"""
    names = iter("abcdef")
    segments = tuple(
        replace(segment, name=next(names)) if segment.kind is SegmentKind.CHUNK else segment
        for segment in prompt.segments
    )
    return replace(prompt, segments=segments, salt=salt)


def store_of(engine: Engine) -> ChunkStore:
    return ChunkStore(engine, PromptEncoder.__new__(PromptEncoder), ChunkCacheConfig())


@pytest.mark.parametrize("has_left", [False, True])
def test_a_name_is_deleted_from_device_and_tiers(engine, disk, has_left) -> None:
    answer(engine, named(random_prompt(0)), named(random_prompt(0), salt="s"))
    flush(engine)
    assert len(disk.entries) == 6
    if has_left:
        empty(engine)
    store = store_of(engine)
    assert store.delete("a") == 1
    flush(engine)
    assert len(disk.entries) == 5, "the other salt keeps its own"
    assert store.delete("a", salt="s") == 1
    with pytest.raises(UnknownChunk):
        store.delete("a")
    flush(engine)
    assert len(disk.entries) == 4
    engine.offloader.kept.check_invariants()


def test_what_was_loaded_from_an_older_process_is_known_by_its_name(model, engine, disk) -> None:
    answer(engine, named(random_prompt(0)))
    flush(engine)
    second = build_engine(model)
    with_tiers(second, disk)
    answer(second, named(random_prompt(0)))
    assert second.kv_cache.statistics().loaded_chunks == 3
    empty(second)
    assert store_of(second).delete("b") == 1
    flush(second)
    assert len(disk.entries) == 2


def test_names_that_a_chunk_got_later_are_known_when_it_has_left(engine, disk) -> None:
    prompt = random_prompt(0)
    answer(engine, prompt)
    answer(engine, named(prompt))
    empty(engine)
    assert store_of(engine).delete("c") == 1
    flush(engine)
    assert len(disk.entries) == 2


def test_a_chunk_that_is_deleted_while_it_is_computed_reaches_no_tier(model, disk) -> None:
    engine = build_engine(model, max_batched_tokens=8)
    with_tiers(engine, disk)
    request = engine.add_request(named(random_prompt(0)), GREEDY)
    while not any(chunk.num_computed and not chunk.is_ready for chunk in engine.kv_cache.chunks()):
        engine.step()
    (chunk,) = [chunk for chunk in engine.kv_cache.chunks() if chunk.num_computed and not chunk.is_ready]
    engine.kv_cache.delete(chunk.key, when_idle=True)
    engine.run([request])
    flush(engine)
    assert request.error is None and chunk.is_ready
    assert chunk.key not in disk.entries and len(disk.entries) == 2
