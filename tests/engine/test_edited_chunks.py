"""Edited chunks in an engine with tiers, and asleep: what is shared is read, written and stored as if it were not."""

from __future__ import annotations

import pytest
import torch
from engine.test_chunk_offloader import empty, flush, with_tiers
from support.engines import GREEDY, answer, build_engine, fragment, token_ids
from support.families import build
from support.tiers import TroubledTier

from kvmosaic.cache import Chunk
from kvmosaic.engine import Engine
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

SYSTEM, QUESTION = list(range(5, 12)), [3, 4, 5]
BEFORE = [10 + n % 90 for n in range(40)]
AFTER = [*BEFORE[:30], 1, 2, 3, *BEFORE[30:]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


def prompt_of(*documents: list[int]) -> Prompt:
    return Prompt.from_tokens(SYSTEM, documents, QUESTION)


def expected(model: LoadedModel, *documents: list[int]) -> tuple[list[int], torch.Tensor]:
    request, logits = answer(build_engine(model), prompt_of(*documents))
    return token_ids(request), logits


def check(engine: Engine, model: LoadedModel, *documents: list[int], note: str = "") -> None:
    """The answer is that of an engine that never saw another text."""
    request, logits = answer(engine, prompt_of(*documents))
    tokens, others = expected(model, *documents)
    assert token_ids(request) == tokens
    torch.testing.assert_close(logits[-1], others[-1], atol=1e-10, rtol=0)
    assert note in request.reuse.segments[1].note


def test_a_stored_text_is_loaded_into_the_blocks_that_it_does_not_share(model) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk := TroubledTier("disk"))
    answer(engine, prompt_of(BEFORE))
    check(engine, model, AFTER, note="first 28 of 43 tokens kept")
    flush(engine)
    assert len(disk.entries) == 2, "an entry is whole"
    engine.kv_cache._chunks.evict(next(c for c in engine.kv_cache.chunks() if list(c.token_ids) == AFTER))
    storage = engine.runner.storages["chunk_cache"]
    (old,) = engine.kv_cache.chunks()
    kept = storage.read_chunk(old.block_ids, old.num_tokens)
    check(engine, model, AFTER, note="loaded from disk")
    for (keys, _), (others, _) in zip(storage.read_chunk(old.block_ids, old.num_tokens), kept, strict=True):
        assert torch.equal(keys, others)
    check(engine, model, BEFORE)
    engine.close()


@pytest.mark.parametrize("is_persistent", [True, False])
def test_both_texts_come_back_whole_from_a_tier(model, is_persistent) -> None:
    engine = build_engine(model)
    fragment(engine)
    with_tiers(engine, TroubledTier("disk", is_persistent=is_persistent))
    for document in (BEFORE, AFTER):
        answer(engine, prompt_of(document))
    flush(engine)
    empty(engine)
    flush(engine)
    assert engine.kv_cache.statistics().cached_chunks == 0
    check(engine, model, AFTER, note="loaded from disk")
    check(engine, model, BEFORE, note="loaded from disk")
    check(engine, model, AFTER, BEFORE)
    engine.close()


def test_shared_blocks_are_written_to_a_tier_after_the_old_text_has_left(model) -> None:
    disk = TroubledTier("disk")
    disk.put_seconds = 0.3  # little is written before the blocks are written again
    engine = build_engine(model)
    with_tiers(engine, disk)
    for document in (BEFORE, AFTER):
        answer(engine, prompt_of(document))
    empty(engine)
    answer(engine, prompt_of([7] * 200))
    flush(engine)
    empty(engine)
    check(engine, model, AFTER, note="loaded from disk")
    check(engine, model, BEFORE, note="loaded from disk")
    engine.close()


def test_shared_blocks_survive_sleep(model) -> None:
    engine = build_engine(model)
    for document in (BEFORE, AFTER):
        answer(engine, prompt_of(document))
    engine.sleep(1)
    while engine.has_work:
        engine.step()
    engine.wake()
    check(engine, model, AFTER, BEFORE)
    assert engine.kv_cache.statistics().computed_tokens == 40 + 15


def test_a_preempted_request_keeps_what_is_shared(model) -> None:
    engine = build_engine(model, blocks=(40, 40), max_batched_tokens=8)
    answer(engine, prompt_of(BEFORE))
    request = engine.add_request(prompt_of(AFTER), GREEDY)
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler.running
    engine.scheduler.preempt(sequence)
    engine.check_invariants()
    engine.run([request])
    engine.check_invariants()
    assert token_ids(request) == expected(model, AFTER)[0]
    assert len(engine.kv_cache.chunks()) == 2 and engine.kv_cache.chunk_pool.num_used == 10 + 11 - 7


@pytest.mark.parametrize("max_batched_tokens", [8, 256])
@pytest.mark.parametrize("documents", [(BEFORE, AFTER), (AFTER, BEFORE), (BEFORE[:30], AFTER, BEFORE, BEFORE[:17])])
def test_new_texts_of_one_prompt_compute_their_common_beginning_once(model, documents, max_batched_tokens) -> None:
    truth = build_engine(model, block_size=64)
    right, others = answer(truth, prompt_of(*documents))
    engine = build_engine(model, max_batched_tokens=max_batched_tokens)
    request, logits = answer(engine, prompt_of(*documents))
    assert token_ids(request) == token_ids(right)
    torch.testing.assert_close(logits[-1], others[-1], atol=1e-10, rtol=0)
    lines = [line for line in request.reuse.segments if line.kind == "chunk"]
    assert sum(line.reused_tokens for line in lines) >= 28
    assert any("computed once, with a document that begins alike" in line.note for line in lines)
    computed = engine.kv_cache.statistics().computed_tokens
    assert computed == sum(line.num_tokens - line.reused_tokens for line in lines)


@pytest.mark.parametrize("end", ["", "abort", "fail", "delete"])
def test_requests_at_once_compute_a_common_beginning_once_whatever_becomes_of_the_first(model, end) -> None:
    engine = build_engine(model, max_batched_tokens=16)
    first = engine.add_request(prompt_of(BEFORE), GREEDY)
    engine.step()
    second = engine.add_request(prompt_of(AFTER), GREEDY, priority=1)
    engine.step()
    assert len(engine.scheduler.running) == 2 and engine.kv_cache.chunk_pool.num_used == 10 + 11 - 7
    if end == "abort":
        engine.abort(first.request_id)
    elif end == "delete":
        engine.kv_cache.delete(engine.kv_cache.chunks()[0].key, when_idle=True)
    elif end == "fail":
        run, engine.runner.run = engine.runner.run, None
        with pytest.raises(TypeError):
            engine.step()
        engine.runner.run = run
        second = engine.add_request(prompt_of(AFTER), GREEDY)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    assert token_ids(second) == expected(model, AFTER)[0]
    if not end:
        assert engine.kv_cache.statistics().computed_tokens == 40 + 15
    check(engine, model, BEFORE)


@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("stored", [(BEFORE,), (AFTER,), (BEFORE, AFTER)])
@pytest.mark.parametrize("num_blocks", [128, 14])
def test_texts_of_one_prompt_are_loaded_or_share_what_is_computed(codec, stored, num_blocks) -> None:
    model = LoadedModel.from_module(build("llama", torch.float32))
    disk, sizes = TroubledTier("disk"), {"blocks": (64, num_blocks)}
    first = build_engine(model)
    with_tiers(first, disk, codec=codec)
    for document in stored:
        answer(first, prompt_of(document))
    flush(first)
    first.close()
    engine = build_engine(model, **sizes)
    with_tiers(engine, disk, codec=codec)
    request, _ = answer(engine, prompt_of(BEFORE, AFTER))
    assert not request.note
    lines = [line for line in request.reuse.segments if line.kind == "chunk"]
    num_loaded = sum("loaded from disk" in line.note for line in lines)
    assert num_loaded == len(stored) if num_blocks == 128 else num_loaded <= len(stored)
    for chunk in engine.kv_cache.chunks():
        truth = build_engine(model)
        answer(truth, prompt_of(list(chunk.token_ids)))
        for found, right in zip(content(engine, chunk), content(truth, truth.kv_cache.chunks()[0]), strict=True):
            torch.testing.assert_close(found, right, atol=0.2 if chunk.codec else 1e-5, rtol=0)
    engine.close()


def content(engine: Engine, chunk: Chunk) -> list[torch.Tensor]:
    pairs = engine.runner.storages["chunk_cache"].read_chunk(chunk.block_ids, chunk.num_tokens)
    return [tensor for pair in pairs for tensor in pair]
