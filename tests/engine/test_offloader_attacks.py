"""Attacks on what keeps chunks beyond the device: small pools, failing tiers, sleep, interrupts, many tenants."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import GREEDY, build_engine, fragment, set_offloader
from support.loaded import loaded_family, random_prompt
from support.tiers import HandClock, TroubledTier

from kvmosaic.cache import Key
from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.errors import ChunkCacheFull, TierUnavailable
from kvmosaic.memory import ChunkTensors
from kvmosaic.prompt import Prompt, SegmentKind
from kvmosaic.sampling import SamplingParams
from kvmosaic.tiers import TieredStore

MEBIBYTE = 2**20
STRATEGIES = ("shared", "sequential", "absolute")


def with_tiers(
    engine: Engine,
    *tiers: Any,
    staged: int = MEBIBYTE,
    pending: int = 8 * MEBIBYTE,
    clock: Callable[[], float] = time.monotonic,
) -> ChunkOffloader:
    """Puts tiers behind an engine."""
    storage = engine.runner.storages["chunk_cache"]
    entries = ChunkEntries(engine.runner.model.fingerprint, storage, TierConfig())
    tiered_store: TieredStore[ChunkTensors] = TieredStore(tiers, max_pending_bytes=pending, clock=clock)
    offloader = ChunkOffloader(engine.kv_cache, storage, tiered_store, entries, max_staged_bytes=staged, clock=clock)
    return set_offloader(engine, offloader)


class Truth:
    """What every chunk must be, to the last bits that depend on how rows are batched: computed in one large pool."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._chunks: dict[Key, list[torch.Tensor]] = {}
        self._answers: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def ask(self, prompt: Prompt, strategy: str) -> tuple[int, ...]:
        """The right answer."""
        name = (prompt, strategy)
        if name not in self._answers:
            request = self._engine.add_request(prompt, GREEDY, position_strategy=strategy)
            self._engine.run([request])
            self._answers[name] = request.output().outputs[0].token_ids
            storage = self._engine.runner.storages["chunk_cache"]
            for chunk in self._engine.kv_cache.chunks():
                if chunk.key not in self._chunks:
                    self._chunks[chunk.key] = flat(storage.read_chunk(chunk.block_ids, chunk.num_tokens))
        return self._answers[name]

    def check_answer(self, found: tuple[int, ...], prompt: Prompt, strategy: str) -> None:
        """An answer, whole or begun, is right."""
        assert found == self.ask(prompt, strategy)[: len(found)]

    def check(self, engine: Engine) -> None:
        """Whatever can be found on the device of another engine is right."""
        storage = engine.runner.storages["chunk_cache"]
        if storage.is_asleep:
            return
        for chunk in engine.kv_cache.chunks():
            if chunk.is_ready:
                found = flat(storage.read_chunk(chunk.block_ids, chunk.num_tokens))
                for one, other in zip(found, self._chunks[chunk.key], strict=True):
                    assert (one - other).abs().max() < 1e-9, f"wrong keys or values in {chunk.key.hex()}"


def flat(chunk: ChunkTensors) -> list[torch.Tensor]:
    return [tensor for pair in chunk for tensor in pair if tensor is not None]


def prompts(seed: int, count: int) -> list[tuple[Prompt, str]]:
    """Prompts of few documents in many orders, some twice in one prompt; two systems, salts and tenants."""
    chance = random.Random(seed)
    documents = [[chance.randrange(3, 128) for _ in range(length)] for length in (9, 4, 12, 7, 4, 16)]
    systems = [None, [5, 6, 7], [8, 9, 10, 11, 12]]
    found = []
    for _ in range(count):
        chunks = [chance.choice(documents) for _ in range(chance.randint(1, 4))]
        prompt = Prompt.from_tokens(
            system=chance.choice(systems), chunks=chunks, question=[chance.randrange(3, 128), 17, 18]
        )
        strategy, offset, number = chance.choice(STRATEGIES), 6, 0
        segments = []
        for segment in prompt.segments:
            if segment.kind is SegmentKind.CHUNK:
                sees = (number - 1,) if number and chance.random() < 0.4 else ()
                segment = replace(
                    segment,
                    name=f"d{documents.index(list(segment.token_ids or ()))}",
                    sees=sees,
                    position_offset=offset if strategy == "absolute" else None,
                )
                offset, number = offset + segment.num_tokens + chance.choice([0, 0, 2]), number + 1
            segments.append(segment)
        salt, tenant = chance.choice(["", "s"]), chance.choice(["", "t"])
        found.append((replace(prompt, segments=tuple(segments), salt=salt, tenant=tenant), strategy))
    return found


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3n"])
@pytest.mark.parametrize("seed", range(2))
def test_no_storm_makes_a_wrong_chunk_or_leaks_anything(family: str, seed: int) -> None:
    model = loaded_family(family)
    strategies = STRATEGIES if model.is_movable else ("shared", "absolute")
    asked = [(prompt, strategy) for prompt, strategy in prompts(seed, 25) if strategy in strategies]
    truth = Truth(build_engine(model, blocks=(512, 1024)))
    for prompt, strategy in asked:
        truth.ask(prompt, strategy)
    chance = random.Random(seed + 100)
    host = TroubledTier("host", is_persistent=False)
    disk = TroubledTier("disk")
    for life in range(2):
        engine = build_engine(
            model,
            blocks=(30, 26),
            max_batched_tokens=chance.choice([8, 64]),
            max_running=chance.choice([3, 8]),
            prefix_caching=chance.random() < 0.7,
        )
        if life:
            fragment(engine, seed)
        offloader = with_tiers(engine, host, disk, staged=chance.choice([1, 20_000, MEBIBYTE]))
        storm(engine, offloader, truth, asked, chance, (host, disk), is_fragmented=life > 0)
    assert host.entries or disk.entries


def storm(
    engine: Engine,
    offloader: ChunkOffloader,
    truth: Truth,
    asked: list[tuple[Prompt, str]],
    chance: random.Random,
    tiers: tuple[TroubledTier, ...],
    *,
    is_fragmented: bool = False,
) -> None:
    """Prompts and troubles in random order; what can be found, and each answer, is right after each step.

    In a fragmented pool, blocks that nobody gives back may leave a prompt no room.
    """
    waiting, running, run = list(asked), [], engine.runner.run
    while waiting or running:
        dice = chance.random()
        if waiting and dice < 0.4:
            prompt, strategy = waiting.pop()
            n = chance.choice([1, 1, 2])
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=n)
            if chance.random() < 0.15:
                engine.add_warm_up(prompt, position_strategy=strategy)
            else:
                priority = chance.choice([0, 0, 1])
                request = engine.add_request(prompt, params, position_strategy=strategy, priority=priority)
                running.append((request, prompt, strategy))
        elif dice < 0.44 and running:
            request = chance.choice(running)[0]
            if not request.is_finished:
                engine.abort(request.request_id)
        elif dice < 0.48 and engine.kv_cache.chunks():
            key = chance.choice(engine.kv_cache.chunks())
            engine.kv_cache.delete(key.key, None, key.tenant, when_idle=True)
        elif dice < 0.50:
            engine.kv_cache.set_quota("t", chance.choice([None, 20, 5, 12]))
        elif dice < 0.515 and engine.kv_cache.chunks():
            chunk = chance.choice(engine.kv_cache.chunks())
            (engine.kv_cache.unpin if chunk.pinned else engine.kv_cache.pin)(chunk.key, None, chunk.tenant)
        elif dice < 0.53:
            engine.kv_cache.evict_cold(2**40, 0.0)
        elif dice < 0.55:
            tier = chance.choice(tiers)
            tier.error = None if tier.error else TierUnavailable("down")
        elif dice < 0.57:
            tier = chance.choice(tiers)
            for key in list(tier.entries)[:2]:
                entry = bytearray(tier.entries[key])
                entry[chance.randrange(len(entry))] ^= 1
                tier.entries[key] = bytes(entry)
        elif dice < 0.585 and not engine.sleep_level:
            engine.sleep(chance.choice([1, 1, 2]))
        elif engine.is_asleep:
            engine.wake()
        elif dice < 0.61:

            def fail(*_: Any) -> Any:
                raise RuntimeError("no device")

            engine.runner.run = fail
            with suppress(RuntimeError):
                engine.step()
            engine.runner.run = run
        else:
            engine.step()
        engine.check_invariants()
        offloader.kept.check_invariants()
        truth.check(engine)
        for request, prompt, strategy in list(running):
            if request.is_finished:
                running.remove((request, prompt, strategy))
                # Quotas and pins may have left its documents no room: its report says so, and each sees those before.
                asked = prompt.joined() if request.note else prompt
                # a second answer that waited for its first step may have lost its room to a pin or a quota
                is_full = request.params.n > 1 and isinstance(request.error, ChunkCacheFull)
                is_lost = "failed" in str(request.error) or is_full  # the step, or the forward of this one alone
                assert request.error is None or is_lost or is_fragmented, repr(request.error)
                for output in request.output().outputs:
                    truth.check_answer(output.token_ids, asked, strategy)
    engine.wake()
    while engine.has_unfinished_requests:
        engine.step()
    assert offloader._staged_bytes == 0 and not offloader._staged
    for tier in tiers:
        tier.error = None
    assert offloader.tiered_store.flush(20) and offloader.tiered_store.pending_bytes == 0
    engine.close()
    assert not engine.scheduler.running and not engine.scheduler.fetching


@pytest.fixture
def disk() -> TroubledTier:
    return TroubledTier("disk")


def asked(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    request = engine.add_request(prompt, GREEDY)
    engine.run([request])
    engine.check_invariants()
    return request.output().outputs[0].token_ids


def leave(engine: Engine) -> None:
    """Everything leaves the device, as if others had needed the room."""
    engine.kv_cache.evict_cold(2**40, 0.0)
    assert not engine.kv_cache.chunks()
    assert engine.offloader is not None and engine.offloader.tiered_store.flush(10)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3n"])
@pytest.mark.parametrize("is_fragmented", [False, True])
def test_chunks_that_leave_a_sleeping_device_are_stored_as_they_were(family: str, is_fragmented: bool) -> None:
    host = TroubledTier("host", is_persistent=False)
    engine = build_engine(loaded_family(family))
    if is_fragmented:
        fragment(engine)
    offloader, storage = with_tiers(engine, host), engine.runner.storages["chunk_cache"]
    expected = asked(engine, random_prompt())
    chunks = engine.kv_cache.chunks()
    before = [flat(storage.read_chunk(chunk.block_ids, chunk.num_tokens)) for chunk in chunks]
    engine.sleep(1)
    while not engine.is_asleep:
        engine.step()
    after = [flat(storage.read_chunk(chunk.block_ids, chunk.num_tokens)) for chunk in chunks]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    leave(engine)
    assert len(host.entries) == 3
    engine.wake()
    assert asked(engine, random_prompt()) == expected
    assert not offloader.tiered_store.stats.invalid
    engine.close()


def test_a_store_that_fails_at_once_is_tried_again_when_the_chunk_leaves(disk: TroubledTier) -> None:
    engine = build_engine(loaded_family("llama"))
    offloader = with_tiers(engine, disk)
    store = offloader.tiered_store.store

    def store_and_wait(*args: Any, **more: Any) -> bool:
        done, told = more.pop("done"), threading.Event()

        def tell(is_stored: bool) -> None:
            done(is_stored)
            told.set()

        is_queued = store(*args, **more, done=tell)
        assert told.wait(60)
        return is_queued

    offloader.tiered_store.store = store_and_wait  # type: ignore[method-assign]
    disk.error = TierUnavailable("down")
    asked(engine, random_prompt())
    assert not disk.entries
    disk.error = None
    leave(engine)
    assert len(disk.entries) == 3
    engine.close()


@pytest.mark.parametrize("place", ["queue", "wait", "copy up", "copy down"])
def test_an_interrupt_anywhere_leaves_nothing_behind(place: str, disk: TroubledTier) -> None:
    first = build_engine(loaded_family("llama"))
    with_tiers(first, disk)
    expected = asked(first, random_prompt())
    first.close()
    engine = build_engine(loaded_family("llama"), blocks=(64, 8))
    offloader = with_tiers(engine, disk, TroubledTier("host", is_persistent=False), clock=HandClock())
    storage = engine.runner.storages["chunk_cache"]
    owner, name = {
        "queue": (offloader.tiered_store, "fetch"),
        "wait": (offloader, "wait"),
        "copy up": (storage, "write_chunk"),
        "copy down": (storage, "read_chunk"),
    }[place]
    if place == "copy down":
        asked(engine, random_prompt(1, chunks=(16, 16)))
    right, calls = getattr(owner, name), []

    def interrupted(*args: Any, **more: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return right(*args, **more)  # interrupts come to the main thread only
        calls.append(1)
        if len(calls) == 2 or place == "wait":
            raise KeyboardInterrupt
        return right(*args, **more)

    if place == "wait":
        disk.gate.clear()
    setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(engine, random_prompt())
        asked(engine, random_prompt(2))
    setattr(owner, name, right)
    disk.gate.set()
    engine.check_invariants()
    assert not engine.has_unfinished_requests and not engine.scheduler.num_waiting and not engine.scheduler.running
    assert not offloader._staged and offloader._staged_bytes == 0
    assert asked(engine, random_prompt()) == expected
    assert engine.kv_cache.chunk_pool.num_free == 8 - sum(len(chunk.block_ids) for chunk in engine.kv_cache.chunks())
    engine.close()


def test_an_engine_that_is_dropped_ends_its_threads(disk: TroubledTier) -> None:
    engine = build_engine(loaded_family("llama"))
    offloader = with_tiers(engine, disk)
    asked(engine, random_prompt())
    threads, alive = list(offloader.tiered_store._threads), weakref.ref(offloader)
    del engine, offloader
    gc.collect()
    assert alive() is None
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert disk.is_closed and len(disk.entries) == 3
