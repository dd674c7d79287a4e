"""Chunks that left the device come back from the tiers, and answers do not change by a bit."""

from __future__ import annotations

import time

import pytest
import torch
from support.engines import GREEDY, build_engine
from support.families import build
from support.loaded import random_prompt
from support.tiers import TroubledTier

from kvmosaic.config import TierConfig
from kvmosaic.engine import ChunkEntries, Engine, Keeper
from kvmosaic.errors import TierUnavailable
from kvmosaic.layout import PositionStrategy
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.tiers import Hierarchy

MEBIBYTE = 2**20


def with_tiers(engine: Engine, *tiers: TroubledTier, staged: int = MEBIBYTE, pending: int = MEBIBYTE) -> Keeper:
    """Puts tiers behind an engine."""
    storage = engine.runner.storages["chunk_cache"]
    engine.keeper = Keeper(
        engine.planner,
        storage,
        Hierarchy(tiers, most_pending_bytes=pending),
        ChunkEntries(engine.runner.model.fingerprint, storage, TierConfig()),
        most_staged_bytes=staged,
    )
    engine.keeper._compute.estimate = lambda num_tokens: float(num_tokens)  # or loading a tiny chunk may not pay
    return engine.keeper


def answer(engine: Engine, *prompts: Prompt, strategy: PositionStrategy = "shared"):
    requests = [engine.add_request(prompt, GREEDY, position_strategy=strategy) for prompt in prompts]
    engine.run(requests)
    engine.check_invariants()
    return [request.output() for request in requests]


def flush(engine: Engine) -> None:
    assert engine.keeper is not None and engine.keeper.hierarchy.flush(10)


def empty(engine: Engine) -> None:
    """Everything leaves the device, as if others had needed the room."""
    index = engine.planner._chunks
    while index.evict_one() is not None:
        pass
    engine.planner._prefix.evict(engine.planner._prefix.num_idle)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


@pytest.fixture
def disk() -> TroubledTier:
    return TroubledTier("disk")


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_a_new_engine_finds_the_chunks_of_an_old_one_and_answers_the_same(model, disk, strategy) -> None:
    first = build_engine(model)
    with_tiers(first, disk)
    prompt = random_prompt()
    [expected] = answer(first, prompt, strategy=strategy)
    first_logits = first.runner.logits
    first.close()
    assert len(disk.entries) == 3

    second = build_engine(model)
    with_tiers(second, disk)
    order = Prompt.from_tokens(
        prompt.segments[0].token_ids,
        [segment.token_ids for segment in prompt.chunks],
        prompt.segments[-1].token_ids,
    )
    [found] = answer(second, order, strategy=strategy)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (second.runner.logits[0][-1] - first_logits[0][-1]).abs().max() < 1e-10
    chunks = [segment for segment in found.reuse.segments if segment.kind == "chunk"]
    assert [chunk.note for chunk in chunks] == ["loaded from disk"] * 3
    assert all(chunk.computed_tokens == 0 for chunk in chunks)
    statistics = second.planner.statistics()
    assert (statistics.loaded_chunks, statistics.computed_tokens) == (3, 0)
    second.close()


def test_evicted_chunks_go_to_the_host_and_come_back(model) -> None:
    host = TroubledTier("host", is_persistent=False)
    engine = build_engine(model)
    with_tiers(engine, host)
    prompt = random_prompt()
    [expected] = answer(engine, prompt)
    flush(engine)
    assert not host.entries, "the device still has them"
    empty(engine)
    flush(engine)
    assert len(host.entries) == 3
    [found] = answer(engine, prompt)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert engine.planner.statistics().loaded_chunks == 3


def test_a_chunk_is_written_to_a_persistent_tier_once(model, disk) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk)
    for _ in range(3):
        answer(engine, random_prompt())
        flush(engine)
        empty(engine)
        flush(engine)
    assert disk.count("put") == 3


def test_a_pool_too_small_for_all_documents_answers_as_a_large_one(model, disk) -> None:
    host = TroubledTier("host", is_persistent=False)
    small, large = build_engine(model, blocks=(128, 12)), build_engine(model)
    with_tiers(small, host, disk)
    for seed in [0, 1, 2, 0, 1, 2, 3, 0]:
        prompt = random_prompt(seed)
        assert answer(small, prompt)[0].outputs == answer(large, prompt)[0].outputs
    assert small.planner.statistics().loaded_chunks > 0
    flush(small)
    assert len(disk.entries) == 12


def test_many_requests_wait_for_one_fetch(model, disk) -> None:
    first = build_engine(model)
    with_tiers(first, disk)
    prompt = random_prompt()
    [expected] = answer(first, prompt)
    first.close()
    disk.calls.clear()
    second = build_engine(model)
    with_tiers(second, disk)
    outputs = answer(second, *[prompt] * 10)
    assert all(output.outputs[0].token_ids == expected.outputs[0].token_ids for output in outputs)
    assert disk.count("get") == 3 and second.planner.statistics().loaded_chunks == 3


@pytest.mark.parametrize("trouble", ["fails", "damaged", "other tokens", "empty"])
def test_whatever_is_wrong_with_a_tier_the_answer_is_computed(model, disk, trouble) -> None:
    first = build_engine(model)
    with_tiers(first, disk)
    prompt = random_prompt()
    [expected] = answer(first, prompt)
    first.close()
    keys = list(disk.entries)
    if trouble == "fails":
        disk.error = TierUnavailable("down")
    elif trouble == "damaged":
        disk.entries = {key: entry[:-9] + b"X" + entry[-8:] for key, entry in disk.entries.items()}
    elif trouble == "other tokens":
        entries = list(disk.entries.values())
        disk.entries = dict(zip(keys, [*entries[1:], entries[0]], strict=True))
    else:
        disk.entries.clear()
    second = build_engine(model)
    keeper = with_tiers(second, disk)
    [found] = answer(second, prompt)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert second.planner.statistics().loaded_chunks == 0
    if trouble in ("damaged", "other tokens"):
        assert keeper.hierarchy.stats.invalid == 3 and set(disk.aside) == set(keys)
        flush(second)
        assert set(disk.entries) == set(keys), "computed again, and stored again"


def test_a_tier_that_hangs_delays_a_request_by_its_patience_only(model, disk) -> None:
    disk.gate.clear()
    engine = build_engine(model)
    with_tiers(engine, disk)
    begin = time.monotonic()
    answer(engine, random_prompt())
    assert time.monotonic() - begin < 5, "the gate would have held it for 20 seconds"
    disk.gate.set()
    flush(engine)


def test_others_run_while_a_request_waits_for_its_chunks(model, disk) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk)
    disk.gate.clear()
    waits = engine.add_request(random_prompt(), GREEDY)
    plain = engine.add_request(Prompt.plain([1, 2, 3]), GREEDY)
    assert engine.scheduler.fetching and engine.scheduler.num_waiting == 2
    engine.step()
    assert plain.answers[0].token_ids and not waits.answers[0].token_ids
    engine.abort(waits.request_id)
    assert not engine.scheduler.fetching and engine.keeper._staged_bytes == 0
    disk.gate.set()
    engine.run([plain])


def test_without_room_to_stage_a_request_fetches_when_it_is_next(model, disk) -> None:
    first = build_engine(model)
    with_tiers(first, disk)
    prompts = [random_prompt(seed) for seed in range(4)]
    expected = answer(first, *prompts)
    first.close()
    second = build_engine(model)
    keeper = with_tiers(second, disk, staged=1)
    found = answer(second, *prompts)
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert second.planner.statistics().loaded_chunks == 12 and keeper._staged_bytes == 0


def test_a_deleted_chunk_is_gone_from_the_tiers(model, disk) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk)
    answer(engine, random_prompt())
    flush(engine)
    key = engine.planner.chunks()[0].key
    engine.planner.delete(key)
    flush(engine)
    assert key not in disk.entries and len(disk.entries) == 2


def test_a_failed_step_stores_nothing(model, disk) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    engine.runner.run = fail
    engine.add_request(random_prompt(), GREEDY)
    with pytest.raises(RuntimeError):
        while True:
            engine.step()
    flush(engine)
    assert not disk.entries
    engine.check_invariants()


def test_a_queue_that_is_full_costs_a_copy_in_the_tier_and_nothing_else(model, disk) -> None:
    engine = build_engine(model)
    keeper = with_tiers(engine, disk, pending=1)
    [expected] = answer(engine, random_prompt())
    flush(engine)
    assert not disk.entries and keeper.hierarchy.stats.dropped >= 3
    empty(engine)
    [found] = answer(engine, random_prompt())
    assert found.outputs == expected.outputs
