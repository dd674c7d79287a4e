"""Loading instead of computing never costs more than it saves, in the long run, whatever the tier is like."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import build_engine, set_offloader
from support.families import build
from support.loaded import random_prompt
from support.tiers import TroubledTier
from torch import Tensor

from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.model import LoadedModel
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.tiers import ComputeCost, FetchPolicy, LoadCost, TieredStore
from kvmosaic.tiers import fetch_policy as prospects_module
from kvmosaic.tiers.fetch_policy import LatencyBandwidthFit

seconds = st.floats(1e-6, 10.0)
sizes = st.integers(1, 10**9)


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(latency=seconds, pace=st.floats(1e-12, 1e-6), points=st.lists(sizes, min_size=2, max_size=12))
def test_a_line_through_loads_of_two_sizes_is_found_again(latency: float, pace: float, points: list[int]) -> None:
    line = LatencyBandwidthFit()
    for size in points:
        line.add(size, latency + pace * size)
    found, found_pace = line.fit(0.0)
    for size in points:
        assert found >= 0.0 and found_pace >= 0.0
        if max(points) > 3 * min(points):
            continue
        assert found + found_pace * size == pytest.approx(latency + pace * size, rel=2.0)
    line = LatencyBandwidthFit()
    for size in (10**6, 10**7) * 20:
        line.add(size, latency + pace * size)
    found, found_pace = line.fit(0.0)
    assert found + found_pace * 10**8 == pytest.approx(latency + pace * 10**8, rel=1e-3)


@given(rate=st.lists(st.booleans(), max_size=60), hit=seconds, miss=seconds, compute=seconds)
def test_asking_is_worth_it_where_the_expected_time_says_so(
    rate: list[bool], hit: float, miss: float, compute: float
) -> None:
    cost = LoadCost()
    for is_hit in [True] * 4 + rate:
        cost.note_hit(1000, hit) if is_hit else cost.note_miss(miss)
    chance = max(cost.hit_rate, 0.02)
    miss_seconds = miss if False in rate else 0.0
    expected = chance * hit + (1 - chance) * (miss_seconds + 0.9 * compute)
    if expected != pytest.approx(0.9 * compute, rel=1e-6):
        assert cost.is_worth(1000, compute) == (expected < 0.9 * compute)
    assert cost.is_worth(1000, None)


def test_the_first_hits_do_not_count_as_slow_and_the_fastest_of_them_is_kept() -> None:
    cost = LoadCost()
    for taken in (5.0, 0.01, 1.0):
        cost.note_hit(1000, taken)
        assert cost.is_worth(1000, 0.001)
    assert cost.estimate(1000) == pytest.approx(0.01)
    cost.note_hit(1000, 0.01)
    assert cost.is_worth(1000, 0.1) and not cost.is_worth(1000, 0.01)


def test_asking_in_vain_costs_at_most_a_fiftieth_of_computing() -> None:
    cost = LoadCost()
    for _ in range(200):
        cost.note_miss(0.01)
    assert not cost.is_worth(1000, 0.4) and cost.is_worth(1000, 0.6)


def test_what_computing_takes_is_told_by_entries_and_corrected_by_steps() -> None:
    cost = ComputeCost()
    cost.note_step(10, 1.0)
    assert cost.estimate(100) is None, "an upper bound alone says little"
    cost.tell(100, 20.0)
    assert cost.estimate(100) == pytest.approx(10.01), "a step was faster than the other machine"
    cost.tell(100, 1.0)
    assert cost.estimate(100) == pytest.approx(1.01)
    cost.note(100, 3.0)
    assert cost.estimate(100) == pytest.approx(3.0), "what is measured here counts"
    cost.note_step(50, 0.5)
    assert cost.estimate(100) == pytest.approx(1.0)


@dataclass
class World:
    """A tier and a device in virtual time: what requests take with the tier, and would take without it."""

    latency: float
    pace: float
    compute_pace: float
    hit_rate: float
    noise: float
    seed: int

    def __post_init__(self) -> None:
        self.clock, self.tier = FakeClock(), TroubledTier("disk")
        self.fetch_policy = FetchPolicy([self.tier], self.clock)
        self.chance = random.Random(self.seed)
        self.num_loaded = 0

    def varied(self, taken: float) -> float:
        return taken * self.chance.uniform(1 - self.noise, 1 + self.noise)

    def load_seconds(self, num_bytes: int) -> float:
        return self.varied(self.latency + num_bytes * self.pace)

    def ask(self) -> tuple[float, float]:
        """Seconds of one chunk with the tier, and without it."""
        num_bytes = self.chance.choice([10**6, 3 * 10**6, 10**7])
        compute = num_bytes * self.compute_pace
        is_hit = self.chance.random() < self.hit_rate
        spent = computed = self.varied(compute)
        if self.fetch_policy.is_worth(self.tier, num_bytes, compute):
            if is_hit:
                spent = self.load_seconds(num_bytes)
                self.fetch_policy.note_hit(self.tier, num_bytes, spent, spent)
                self.num_loaded += 1
            else:
                missed = self.varied(self.latency)
                self.fetch_policy.note_miss(self.tier, missed, missed)
                spent += missed
        elif self.fetch_policy.take_probe_slot(self.tier):
            if is_hit:
                taken = self.load_seconds(num_bytes)
                self.fetch_policy.note_hit(self.tier, num_bytes, taken, taken, is_look=True)
            else:
                missed = self.varied(self.latency)
                self.fetch_policy.note_miss(self.tier, missed, missed)
        self.clock.now += spent
        return spent, computed

    def run(self, count: int) -> tuple[float, float]:
        """The same of many, one after the other."""
        pairs = [self.ask() for _ in range(count)]
        return sum(spent for spent, _ in pairs), sum(computed for _, computed in pairs)


worlds = st.builds(
    World,
    latency=st.floats(1e-5, 0.5),
    pace=st.floats(1e-10, 1e-7),
    compute_pace=st.floats(1e-9, 1e-7),
    hit_rate=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.9, 1.0]),
    noise=st.floats(0.0, 0.1),
    seed=st.integers(0, 2**32),
)


@given(world=worlds)
@settings(deadline=None)
def test_in_the_long_run_a_tier_costs_at_most_two_percent(world: World) -> None:
    world.run(2_000 if 0.0 < world.hit_rate < 0.1 else 200)  # what hits are like has to be learned
    spent, computed = world.run(2_000)  # over 400 it was up to 3.2% by chance, over 2,000 up to 1.3%
    assert spent <= 1.02 * computed, vars(world)


@given(world=worlds)
@settings(deadline=None)
def test_a_tier_that_is_twice_as_fast_and_has_everything_is_used(world: World) -> None:
    world.hit_rate = 1.0
    world.latency, world.pace = min(world.latency, world.compute_pace * 4e5), min(world.pace, world.compute_pace / 10)
    world.run(400)
    assert world.num_loaded >= 396


@given(world=worlds)
@settings(deadline=None)
def test_a_tier_that_becomes_slow_is_left_and_one_that_recovers_is_used_again(world: World) -> None:
    world.hit_rate = 1.0
    world.latency, world.pace = 1e-4, world.compute_pace / 10
    world.run(50)
    world.latency, world.num_loaded = 100 * 10**7 * world.compute_pace, 0
    world.run(50)
    assert world.num_loaded <= 2
    world.latency, world.num_loaded = 1e-4, 0
    world.clock.now += 61.0
    world.run(20)
    assert world.num_loaded >= 18


def test_looks_are_rare_where_they_are_much_work() -> None:
    clock, tier = FakeClock(), TroubledTier("disk")
    fetch_policy = FetchPolicy([tier], clock)
    assert not fetch_policy.take_probe_slot(tier)
    clock.now += 4.1
    assert fetch_policy.take_probe_slot(tier) and not fetch_policy.take_probe_slot(tier), "one at a time"
    fetch_policy.note_hit(tier, 1000, 9.0, 2.0, is_look=True)
    clock.now += 39.0
    assert not fetch_policy.take_probe_slot(tier)
    clock.now += 2.0
    assert fetch_policy.take_probe_slot(tier)
    fetch_policy.note_hit(tier, 1000, 9.0, 0.1, is_look=True)
    clock.now += 4.1
    assert fetch_policy.take_probe_slot(tier), "waiting is no work"


def test_where_chunks_are_always_loaded_no_tier_is_too_slow_and_waiting_still_ends() -> None:
    tier = TroubledTier("disk")
    fetch_policy = FetchPolicy([tier], FakeClock(), "always")
    for _ in range(10):
        fetch_policy.note_hit(tier, 1000, 9.0, 9.0)
    assert fetch_policy.is_worth(tier, 1000, 0.001)
    assert 9.0 < fetch_policy.timeout([tier], 1000, 0.001) < 15.0
    assert 5.0 < fetch_policy.longest_wait(1000, 0.001) < 6.0


def test_patience_is_what_loading_is_expected_to_take_but_no_more_than_computing_or_150_ms() -> None:
    fast, unknown = TroubledTier("host"), TroubledTier("disk")
    fetch_policy = FetchPolicy([fast, unknown], FakeClock())
    fetch_policy.note_miss(fast, 0.001, 0.001)
    assert fetch_policy.timeout([fast], 0, None) == pytest.approx(0.151)
    assert fetch_policy.timeout([fast, unknown], 10**8, None) == pytest.approx(0.15 + 0.001 + 1.0 + 1.0), (
        "host is unknown"
    )
    fetch_policy.note_hit(fast, 10**8, 0.02, 0.02)
    assert fetch_policy.timeout([fast, unknown], 10**8, None) == pytest.approx(0.15 + 0.02 + 1.0)
    assert fetch_policy.timeout([fast, unknown], 10**8, 0.3) == pytest.approx(0.3)
    for compute_seconds in (0.001, 0.06, 0.149):
        assert fetch_policy.timeout([fast, unknown], 10**8, compute_seconds) == pytest.approx(0.15)
        assert fetch_policy.longest_wait(10**8, compute_seconds) == pytest.approx(0.15)
    assert fetch_policy.longest_wait(10**8, 2.0) == pytest.approx(2.0)
    assert fetch_policy.longest_wait(10**8, None) == pytest.approx(1.15)


# the real thing


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


def with_tier(engine: Engine, tier: TroubledTier, pending: int = 2**26) -> TieredStore:
    storage = engine.runner.storages["chunk_cache"]
    entries = ChunkEntries(engine.runner.model.fingerprint, storage, TierConfig())
    tiered_store: TieredStore = TieredStore([tier], max_pending_bytes=pending)
    set_offloader(engine, ChunkOffloader(engine.kv_cache, storage, tiered_store, entries, max_staged_bytes=2**26))
    return tiered_store


def ask(engine: Engine, prompt: Prompt) -> float:
    """Seconds to the first token; the chunks leave the device first."""
    engine.kv_cache.evict_cold(2**40, 0.0)
    assert engine.offloader is None or engine.offloader.tiered_store.flush(
        10
    )  # what waits to be written would be found at once
    begin = time.perf_counter()
    engine.run([engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=1))])
    return time.perf_counter() - begin


def num_loaded(engine: Engine) -> int:
    return engine.kv_cache.statistics().loaded_chunks


LONG = {"chunks": (240,) * 2, "question": 8}


class SteadyRunner(Runner):
    """Takes 0.5 ms longer for every token, as a model of 0.1 B parameters does, whoever else computes."""

    def run(self, spans: Any) -> Tensor:
        time.sleep(5e-4 * sum(len(span.token_ids) for span in spans))
        return super().run(spans)


def build_long(model: LoadedModel) -> Engine:
    return build_engine(model, blocks=(64, 512), max_batched_tokens=512, runner=SteadyRunner)


def slow_by_latency(tier: TroubledTier) -> None:
    tier.get_seconds = 0.25


def slow_by_bandwidth(tier: TroubledTier) -> None:
    get_many = tier.get_many

    def slowly(keys, deadline):
        found = get_many(keys, deadline)
        time.sleep(sum(map(len, found.values())) / 5e5)
        return found

    tier.get_many = slowly


@pytest.mark.parametrize("slow", [slow_by_latency, slow_by_bandwidth])
def test_requests_are_not_slower_with_a_slow_tier_than_without_one(model: LoadedModel, slow: Callable) -> None:
    tier = TroubledTier("disk")
    plain, tiered, writer = build_long(model), build_long(model), build_long(model)
    prompt = random_prompt(**LONG)
    tiered_store = with_tier(writer, tier)
    ask(writer, prompt)
    assert tiered_store.flush(10)
    with_tier(tiered, tier, pending=1)  # only reads: what writing costs is another question
    ask(plain, prompt)
    slow(tier)
    for _ in range(4):  # what it is like has to be learned
        ask(tiered, prompt)
    asked, ratios = tier.count("get"), []
    for _ in range(3):
        pairs = [(ask(plain, prompt), ask(tiered, prompt)) for _ in range(7)]
        ratios.append(statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs))
        if ratios[-1] <= 1.2:
            break
    assert min(ratios) <= 1.2, "waiting takes 1.6 times as long; the best of some tries: others compute here, too"
    assert tier.count("get") <= asked + 10, "looks, now and then"
    tiered.close()


def test_a_fast_tier_is_used_left_when_it_becomes_slow_and_used_again_when_it_recovers(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prospects_module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(prospects_module, "_LOOK_SHARE", 1)
    tier = TroubledTier("disk")
    engine = build_long(model)
    tiered_store = with_tier(engine, tier)
    prompt = random_prompt(**LONG)
    ask(engine, prompt)
    assert tiered_store.flush(10)
    for _ in range(4):
        ask(engine, prompt)
    before = num_loaded(engine)
    assert before >= 6, "two of each request, while nothing better is known"
    tier.get_seconds = 5.0
    for _ in range(3):
        ask(engine, prompt)
    left = num_loaded(engine)
    for _ in range(3):
        ask(engine, prompt)
    assert num_loaded(engine) == left
    tier.get_seconds = 0.0
    end = time.monotonic() + 120
    while num_loaded(engine) < left + 4:
        ask(engine, prompt)
        assert time.monotonic() < end, "it is fast again, and nobody looks"
    engine.close()


def test_a_new_process_leaves_a_slow_tier_even_if_it_has_everything(model: LoadedModel) -> None:
    tier = TroubledTier("disk")
    first = build_engine(model)
    tiered_store = with_tier(first, tier)
    prompt = random_prompt(chunks=(8,) * 12)
    ask(first, prompt)
    assert tiered_store.flush(10)
    tier.get_seconds = 1.0
    second = build_engine(model)
    with_tier(second, tier)
    begin = time.monotonic()
    ask(second, prompt)
    assert time.monotonic() - begin < 4.5, "loading all would have taken 6 seconds"
    second.close()
    first.close()
