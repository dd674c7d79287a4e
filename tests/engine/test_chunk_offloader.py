"""Chunks that left the device come back from the tiers, and answers do not change by a bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.engines import GREEDY, build_engine, set_offloader
from support.families import build
from support.loaded import random_prompt
from support.tiers import HandClock, TroubledTier

from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.errors import QueueFull, TierUnavailable
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.tiers import TieredStore

MEBIBYTE = 2**20


def with_tiers(
    engine: Engine,
    *tiers: TroubledTier,
    staged: int = MEBIBYTE,
    pending: int = MEBIBYTE,
    clock: HandClock | None = None,
    codec: str = "none",
) -> ChunkOffloader:
    """Puts tiers behind an engine, whose patience ends when this clock says so: without one, never."""
    clock = clock or HandClock()
    storage = engine.runner.storages["chunk_cache"]
    offloader = ChunkOffloader(
        engine.kv_cache,
        storage,
        TieredStore(tiers, max_pending_bytes=pending, loading="always", clock=clock),
        ChunkEntries(engine.runner.model.fingerprint, storage, TierConfig(chunk_codec=codec)),
        max_staged_bytes=staged,
        clock=clock,
    )
    offloader._compute.estimate = lambda num_tokens: float(num_tokens)  # or loading a tiny chunk may not pay
    return set_offloader(engine, offloader)


def answer(engine: Engine, *prompts: Prompt, strategy: str = "shared"):
    requests = [engine.add_request(prompt, GREEDY, position_strategy=strategy) for prompt in prompts]
    engine.run(requests)
    engine.check_invariants()
    return [request.output() for request in requests]


def flush(engine: Engine) -> None:
    assert engine.offloader is not None and engine.offloader.tiered_store.flush(60)


def empty(engine: Engine) -> None:
    """Everything leaves the device, as if others had needed the room."""
    index = engine.kv_cache._chunks
    while index.evict_one() is not None:
        pass
    engine.kv_cache._prefix.evict(engine.kv_cache._prefix.num_idle)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


@pytest.fixture
def disk() -> Iterator[TroubledTier]:
    disk = TroubledTier("disk")
    yield disk
    disk.gate.set()


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
    statistics = second.kv_cache.statistics()
    assert (statistics.loaded_chunks, statistics.computed_tokens) == (3, 0)
    assert all(
        bound is not None and len(entry) <= bound < 2**18 for bound in disk.bounds for entry in disk.entries.values()
    )
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
    assert engine.kv_cache.statistics().loaded_chunks == 3


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
    assert small.kv_cache.statistics().loaded_chunks > 0
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
    assert disk.count("get") == 3 and second.kv_cache.statistics().loaded_chunks == 3


def test_chunks_that_come_while_another_request_asks_for_them_are_fetched_once(model, disk, monkeypatch) -> None:
    prompt = random_prompt()
    known_to(disk, model, prompt)
    engine = build_engine(model)
    offloader = with_tiers(engine, disk)
    disk.gate.clear()
    requests = [engine.add_request(prompt, GREEDY)]
    fetches = [staged.fetch for staged in engine.scheduler.fetching[0].fetches.values()]
    ask = offloader.tiered_store.fetch

    def ask_late(*arguments: object, **more: object) -> object:
        disk.gate.set()
        while not all(fetch.is_over for fetch in fetches):
            offloader.wait(0.01)
        return ask(*arguments, **more)

    monkeypatch.setattr(offloader.tiered_store, "fetch", ask_late)
    requests.append(engine.add_request(prompt, GREEDY))
    engine.run(requests)
    assert disk.count("get") == 3 and engine.kv_cache.statistics().loaded_chunks == 3


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
    offloader = with_tiers(second, disk)
    [found] = answer(second, prompt)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert second.kv_cache.statistics().loaded_chunks == 0
    if trouble in ("damaged", "other tokens"):
        assert offloader.tiered_store.stats.invalid == 3 and set(disk.aside) == set(keys)
        flush(second)
        assert set(disk.entries) == set(keys), "computed again, and stored again"


def test_a_tier_that_hangs_delays_a_request_by_its_patience_only(model, disk) -> None:
    disk.gate.clear()
    engine, clock = build_engine(model), HandClock()
    with_tiers(engine, disk, clock=clock)
    request = engine.add_request(random_prompt(), GREEDY)
    while disk.count("get") < 2:
        time.sleep(0.001)
    clock.advance(4.9)
    engine.step()
    assert engine.scheduler.fetching
    clock.advance(0.2)
    engine.run([request])
    assert request.output().outputs[0].token_ids and engine.kv_cache.statistics().loaded_chunks == 0
    assert disk.count("get") == 2, "both are still at the gate"
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
    assert not engine.scheduler.fetching and engine.offloader._staged_bytes == 0
    disk.gate.set()
    engine.run([plain])


def test_without_room_to_stage_a_request_fetches_when_it_is_next(model, disk) -> None:
    first = build_engine(model)
    with_tiers(first, disk)
    prompts = [random_prompt(seed) for seed in range(4)]
    expected = answer(first, *prompts)
    first.close()
    second = build_engine(model)
    offloader = with_tiers(second, disk, staged=1)
    found = answer(second, *prompts)
    assert [output.outputs for output in found] == [output.outputs for output in expected]
    assert second.kv_cache.statistics().loaded_chunks == 12 and offloader._staged_bytes == 0


def test_a_deleted_chunk_is_gone_from_the_tiers(model, disk) -> None:
    engine = build_engine(model)
    with_tiers(engine, disk)
    answer(engine, random_prompt())
    flush(engine)
    key = engine.kv_cache.chunks()[0].key
    engine.kv_cache.delete(key)
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
    offloader = with_tiers(engine, disk, pending=1)
    [expected] = answer(engine, random_prompt())
    flush(engine)
    assert not disk.entries and offloader.tiered_store.stats.dropped >= 3
    empty(engine)
    [found] = answer(engine, random_prompt())
    assert found.outputs == expected.outputs


def known_to(disk: TroubledTier, model: LoadedModel, *prompts: Prompt) -> None:
    """Has an engine that is gone by now put the documents of these prompts into the tier."""
    first = build_engine(model, blocks=(256, 512))
    with_tiers(first, disk)
    answer(first, *prompts)
    first.close()
    disk.calls.clear()


def test_a_large_request_has_its_turn_though_small_ones_keep_coming(model, disk) -> None:
    large = [random_prompt(seed, chunks=(60, 60, 60)) for seed in range(2)]
    small = [random_prompt(seed, chunks=(9,)) for seed in range(2, 60)]
    known_to(disk, model, *large, *small)
    engine = build_engine(model, blocks=(128, 256))
    per_token = engine.runner.storages["chunk_cache"].bytes_per_block // 4
    offloader = with_tiers(engine, disk, staged=100 * per_token)
    disk.get_seconds = 0.02
    coming = iter(small)
    for _ in range(4):
        engine.add_request(next(coming), GREEDY)
    asked = [engine.add_request(prompt, GREEDY) for prompt in large]
    others = 0
    while not all(request.is_finished for request in asked):
        engine.step()
        assert offloader._staged_bytes <= 280 * per_token, "what fits, and one request that does not"
        if engine.scheduler.num_waiting < 9:
            engine.add_request(next(coming), GREEDY)
            others += 1
    assert others < 50
    engine.abort_all(engine.unfinished_requests)
    assert offloader._staged_bytes == 0 and offloader._crowded_out is None


def test_chunks_of_an_urgent_request_are_fetched_before_those_of_others(model, disk) -> None:
    patient, urgent = random_prompt(1, chunks=(5,) * 6), random_prompt(2, chunks=(7,) * 2)
    known_to(disk, model, patient, urgent)
    engine = build_engine(model)
    offloader = with_tiers(engine, disk)
    disk.gate.clear()
    engine.add_request(patient, GREEDY)
    while disk.count("get") < 2:
        time.sleep(0.001)
    engine.add_request(urgent, GREEDY, priority=1)
    keys = set(engine.scheduler.fetching[1].fetches)
    disk.gate.set()
    while disk.count("get") < 8:
        offloader.wait(0.01)
    asked = [next(iter(wanted)) for what, wanted in disk.calls if what == "get"]
    assert set(asked[2:4]) == keys
    engine.abort_all(engine.unfinished_requests)


def test_requests_that_wait_for_chunks_count_as_waiting(model, disk) -> None:
    disk.gate.clear()
    engine = build_engine(model)
    with_tiers(engine, disk)
    engine.config = replace(engine.config, max_waiting=2)
    requests = [engine.add_request(random_prompt(seed), GREEDY) for seed in range(2)]
    assert len(engine.scheduler.fetching) == 2
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.add_request(random_prompt(9), GREEDY)
    engine.abort_all(requests)
    engine.abort_all([engine.add_request(random_prompt(9), GREEDY)])
    disk.gate.set()


def test_what_only_an_aborted_request_wanted_is_not_read(model, disk) -> None:
    disk.gate.clear()
    engine = build_engine(model)
    offloader = with_tiers(engine, disk)
    request = engine.add_request(random_prompt(chunks=(5,) * 10), GREEDY)
    other = engine.add_request(random_prompt(chunks=(5,) * 10), GREEDY)
    while disk.count("get") < 2:
        time.sleep(0.001)
    engine.abort(request.request_id)
    assert offloader._staged_bytes > 0, "another waits for the same"
    engine.abort(other.request_id)
    assert offloader._staged_bytes == 0
    disk.gate.set()
    answer(engine, random_prompt(5, chunks=(4,)))
    assert disk.count("get") == 3


def test_what_is_deleted_after_it_was_fetched_is_computed(model, disk) -> None:
    prompt = random_prompt()
    known_to(disk, model, prompt)
    engine = build_engine(model)
    offloader = with_tiers(engine, disk)
    request = engine.add_request(prompt, GREEDY)
    staged = dict(engine.scheduler.fetching[0].fetches)
    while not all(each.fetch.is_over for each in staged.values()):
        offloader.wait(0.01)
    offloader.delete([next(iter(staged))])
    engine.run([request])
    assert engine.kv_cache.statistics().loaded_chunks == 2 and offloader._staged_bytes == 0


def test_a_preempted_request_gets_its_evicted_chunks_from_the_tiers_again(model, disk) -> None:
    prompts = [random_prompt(seed, chunks=(9, 12)) for seed in range(4)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    large = build_engine(model)
    expected = [large.add_request(prompt, params) for prompt in prompts]
    large.run(expected)
    engine = build_engine(model, blocks=(24, 128))
    offloader = with_tiers(engine, disk)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
        engine.kv_cache.evict_cold(2**40, 0.0)
    assert engine.scheduler.num_preemptions > 0 and engine.kv_cache.statistics().loaded_chunks > 0
    assert [request.output().outputs for request in requests] == [request.output().outputs for request in expected]
    assert offloader._staged_bytes == 0


def test_while_a_large_request_waits_for_room_no_later_one_takes_it(model, disk) -> None:
    disk.gate.clear()
    engine = build_engine(model, blocks=(128, 256))
    per_token = engine.runner.storages["chunk_cache"].bytes_per_block // 4
    offloader = with_tiers(engine, disk, staged=100 * per_token)
    first, large, later = (
        engine.add_request(random_prompt(seed, chunks=chunks), GREEDY)
        for seed, chunks in enumerate([(9,), (60, 60), (8,)])
    )
    assert len(engine.scheduler.fetching) == 2, "what comes before it is its turn may begin"
    engine.abort(later.request_id)
    engine.step()
    later = engine.add_request(random_prompt(4, chunks=(8,)), GREEDY)
    assert len(engine.scheduler.fetching) == 1 and engine.scheduler.num_waiting == 3
    engine.abort(large.request_id)
    last = engine.add_request(random_prompt(5, chunks=(7,)), GREEDY)
    assert len(engine.scheduler.fetching) == 2
    disk.gate.set()
    engine.run([first, later, last])
    assert offloader._staged_bytes == 0
