"""Shares: what each tenant gets of places, blocks and steps, whatever the others send; on a clock that counts steps."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocked import World, policy
from support.engines import build_engine
from support.examples import examples
from support.loaded import loaded_family

from kvmosaic.engine import Request
from kvmosaic.engine.priorities import TimeSlice
from kvmosaic.engine.shares import Shares
from kvmosaic.engine.step import LEAST_TOKENS, SHARED_STEP_SECONDS
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

ENDLESS = {"tokens": 2**20, "sink_tokens": 4, "window_tokens": 16}
SLICE = 20.0


def jain(values: list[float]) -> float:
    """Jain's index: 1 is equal, 1/n is all for one."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def fair_parts(wanted: dict[str, int], places: int) -> dict[str, float]:
    """What max-min fairness gives: nobody more than it wants, and the rest alike."""
    parts: dict[str, float] = {}
    left, waiting = float(places), dict(wanted)
    while waiting:
        each = left / len(waiting)
        small = {tenant: count for tenant, count in waiting.items() if count <= each}
        for tenant in small or waiting:
            parts[tenant] = min(waiting[tenant], each)
        left -= sum(small.values())
        waiting = {tenant: count for tenant, count in waiting.items() if tenant not in small} if small else {}
    return parts


def tokens_of(requests: list[Request]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for request in requests:
        counts[request.prompt.tenant] += sum(len(answer.token_ids) for answer in request.answers)
    return counts


@pytest.mark.parametrize("order", [("one", "few", "many"), ("many", "few", "one")])
@policy(time_slice=SLICE)
def test_tenants_with_one_eight_and_many_requests_without_end_get_fair_parts(order: tuple[str, ...]) -> None:
    wanted = {"one": 1, "few": 8, "many": 64}
    world = World(max_running=8, blocks=1_024)
    requests: list[Request] = []
    for tenant in order:
        requests += [world.add(tenant=tenant, **ENDLESS) for _ in range(wanted[tenant])]
        for _ in range(10):
            world.step()
    before = tokens_of(requests)
    for _ in range(1_000):
        world.step()
    got = tokens_of(requests) - before
    parts = fair_parts(wanted, 8)
    # what is computed again after a turn counts as well, and those who wait for turns have more of it
    assert jain([got[tenant] / parts[tenant] for tenant in wanted]) > 0.95
    assert got["one"] > 0.95 * 1_000, "it is alone in its place"
    per_request = [len(request.answers[0].token_ids) for request in requests if request.prompt.tenant == "many"]
    assert min(per_request) > 0, "each has had turns"
    waits = [request.first_token_time - request.arrival_time for request in requests]
    assert max(waits) < 64 / 3 * (SLICE + 3), "the last of 64 waits until 61 of them have had theirs, three at a time"
    of_one = [wait for wait, request in zip(waits, requests, strict=True) if request.prompt.tenant == "one"]
    assert max(of_one) <= 2


def test_one_request_for_many_endless_answers_does_not_keep_others_waiting() -> None:
    world = World(max_running=64, blocks=2_048)
    world.add(tenant="hostile", n=64, **ENDLESS)
    for _ in range(5):
        world.step()
    for _ in range(20):
        honest = world.add(tenant="honest", tokens=2)
        for _ in range(3):
            world.step()
        assert honest.is_finished
    assert world.engine.scheduler.num_preemptions <= 25


def test_answers_to_one_prompt_take_no_more_places_than_there_are() -> None:
    world = World(max_running=4, blocks=512)
    request = world.add(n=10, tokens=6)
    while world.engine.has_unfinished_requests:
        world.step()
        assert len(world.engine.scheduler.running) <= 4
    assert [len(answer.token_ids) for answer in request.answers] == [6] * 10


@policy(time_slice=SLICE)
def test_nobody_waits_for_ever_behind_endless_answers_of_its_own_tenant() -> None:
    world = World(max_running=4, blocks=512)
    endless = [world.add(**ENDLESS) for _ in range(4)]
    world.step()
    waits = []
    for _ in range(10):
        short = world.add(tokens=3)
        while not short.is_finished:
            world.step()
        waits.append(short.first_token_time - short.arrival_time)
    assert max(waits) <= SLICE + 2
    counts = [len(request.answers[0].token_ids) for request in endless]
    assert min(counts) > 0.7 * world.now, "they go on when their turn comes again"


@policy(time_slice=math.inf)
def test_without_a_time_slice_endless_answers_would_keep_their_places() -> None:
    world = World(max_running=2, blocks=512)
    for _ in range(2):
        world.add(**ENDLESS)
    world.step()
    short = world.add(tokens=1)
    for _ in range(300):
        world.step()
    assert short.first_token_time is None


def test_a_time_slice_is_not_spent_on_what_was_computed_before() -> None:
    turn = TimeSlice()
    turn.begin(0.0)
    turn.note(10, 1.0)
    assert not turn.is_over(60.0, 60.0) and turn.is_over(61.0, 60.0)
    turn.end(500)
    turn.begin(100.0)
    turn.note(200, 150.0)
    assert not turn.is_over(1_000.0, 60.0), "it has not come to where it was"
    turn.note(500, 300.0)
    assert not turn.is_over(499.0, 60.0) and turn.is_over(500.0, 60.0), "as long as it took to come there"


@policy(time_slice=SLICE)
def test_weights_decide_between_tenants() -> None:
    world = World(max_running=9, blocks=1_024)
    world.engine.scheduler.shares.set_weight("heavy", 2.0)
    requests = [world.add(tenant=tenant, **ENDLESS) for tenant in ("light", "heavy") for _ in range(20)]
    for _ in range(400):
        world.step()
    got = tokens_of(requests)
    assert got["heavy"] / got["light"] == pytest.approx(2.0, rel=0.2)


def test_what_nobody_else_wants_goes_to_anybody() -> None:
    world = World(max_running=8, blocks=1_024)
    for _ in range(20):
        world.add(tenant="many", **ENDLESS)
    one = world.add(tenant="one", tokens=5)
    for _ in range(10):
        world.step()
    assert one.is_finished and len(world.engine.scheduler.running) == 8


def test_a_prompt_shares_each_step_with_long_prompts_of_other_tenants() -> None:
    world = World(max_batched_tokens=32, blocks=2_048)
    long = [world.add(tenant="many", prompt=400, tokens=1) for _ in range(10)]
    world.step()
    short = world.add(tenant="one", prompt=30, tokens=1)
    for _ in range(2):
        world.step()
    assert short.is_finished and not any(request.is_finished for request in long)
    world.run()


@pytest.mark.parametrize("each", [1e-4, 1e-3])
@pytest.mark.parametrize("prompt", [8, 400])
@pytest.mark.parametrize("attack", ["endless answers", "long prompts"])
def test_another_tenant_at_most_doubles_the_wait_after_the_step_under_way(
    attack: str, prompt: int, each: float
) -> None:
    """Whether tokens or steps are what costs."""
    least = 8e-3
    world = World(max_running=32, max_batched_tokens=512, blocks=8_192, costs=(least, each))

    def seconds() -> float:
        asked = world.add(tenant="one", prompt=prompt, tokens=3)
        begin = world.now
        while not asked.answers[0].token_ids:
            world.step()
        first = world.now - begin
        while not asked.is_finished:
            world.step()
        return first

    def flood() -> None:
        count, options = (32, ENDLESS) if attack == "endless answers" else (8, {"prompt": 1_600, "tokens": 1})
        missing = count - sum(not request.is_finished for request in others)
        others.extend(world.add(tenant="many", **options) for _ in range(missing))

    alone = min(seconds() for _ in range(3))
    others: list[Request] = []
    for _ in range(40):
        flood()
        world.engine.step()
    waits = []
    for _ in range(4):
        flood()
        begin = world.now
        world.step()
        waits.append(world.now - begin + seconds())
    assert max(waits[1:]) <= 2 * alone + max(SHARED_STEP_SECONDS, 2 * least, least + LEAST_TOKENS * each), (
        alone,
        waits,
    )


def test_a_step_is_full_though_shares_are_not() -> None:
    world = World(max_batched_tokens=32, blocks=2_048)
    long = world.add(tenant="many", prompt=320, tokens=1)
    tiny = world.add(tenant="one", prompt=2, tokens=1)
    for _ in range(11):
        world.step()
    assert tiny.is_finished and long.is_finished, "10.06 steps of 32 tokens"


def test_blocks_are_shared_too() -> None:
    world = World(max_running=8, blocks=64)
    for _ in range(4):
        world.add(tenant="many", prompt=16, tokens=400)
    for _ in range(45):
        world.step()
    assert world.engine.kv_cache.request_pool.num_free < 8
    honest = world.add(tenant="one", prompt=30, tokens=40)
    for _ in range(100):
        world.step()
    assert honest.is_finished, "a quarter of the blocks is less than its share"


def test_an_admin_s_priority_goes_before_shares() -> None:
    world = World(max_running=4, blocks=512)
    for _ in range(4):
        world.add(5, tenant="admin", tokens=30)
    world.step()
    other = world.add(0, tenant="other", tokens=2)
    for _ in range(10):
        world.step()
    assert other.first_token_time is None


TENANTS = ("a", "b", "c")
ASKED = st.tuples(
    st.sampled_from(TENANTS),
    st.integers(0, 1),
    st.integers(1, 40),
    st.integers(1, 30),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=examples(40), deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=14),
    blocks=st.integers(20, 40),
    running=st.integers(1, 5),
    budget=st.sampled_from([4, 16, 64]),
    pause=st.integers(0, 3),
    weight=st.sampled_from([0.5, 1.0, 3.0]),
)
@policy(time_slice=7.0)
def test_everybody_ends_whatever_comes(
    asked: list[tuple[str, int, int, int, int, bool]], blocks: int, running: int, budget: int, pause: int, weight: float
) -> None:
    world = World(max_running=running, blocks=blocks, max_batched_tokens=budget)
    scheduler = world.engine.scheduler
    scheduler.shares.set_weight("c", weight)
    requests = []
    for tenant, priority, prompt, tokens, n, rolls in asked:
        window = {"sink_tokens": 4, "window_tokens": 8} if rolls else {}
        requests.append(world.add(priority, tenant=tenant, prompt=prompt, tokens=tokens, n=n, **window))
        for _ in range(pause):
            world.step()
    world.run(4_000)
    assert all(request.error is None for request in requests)
    assert not scheduler.running.num_by_tenant and not scheduler.admission.refused - {None}


def answers(asked: list[tuple[str, int, int, int]], **options: object) -> list[list[tuple[int, ...]]]:
    """Token ids of all answers, drawn at random; one request comes after another, each a step later."""
    ticks = itertools.count()
    engine = build_engine(
        loaded_family("llama", torch.float64), blocks=(48, 40), clock=lambda: float(next(ticks)), **options
    )
    requests = []
    for tenant, seed, n, tokens in asked:
        chance = random.Random(seed)
        documents = [[chance.randrange(50) for _ in range(9)] for _ in range(chance.randint(0, 2))]
        question = [chance.randrange(50) for _ in range(chance.randint(1, 12))]
        prompt = Prompt.from_tokens([1, 2, 3], documents, question) if documents else Prompt.plain(question)
        window = {"sink_tokens": 2, "window_tokens": 8} if seed % 3 == 0 else {}
        params = SamplingParams(max_tokens=tokens, n=n, seed=seed, ignore_eos=True, **window)
        requests.append(engine.add_request(replace(prompt, tenant=tenant), params))
        engine.step()
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    return [[tuple(answer.token_ids) for answer in request.answers] for request in requests]


@settings(max_examples=12, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 9), st.integers(1, 4), st.integers(1, 24)),
        min_size=3,
        max_size=8,
    ),
    running=st.integers(1, 4),
    budget=st.sampled_from([6, 32]),
)
def test_no_answer_depends_on_whose_turn_it_is(
    asked: list[tuple[str, int, int, int]], running: int, budget: int
) -> None:
    alone = {each: answers([each])[0] for each in asked}
    with policy(time_slice=40.0):
        together = answers(asked, max_running=running, max_batched_tokens=budget)
    assert together == [alone[each] for each in asked]


@given(st.dictionaries(st.sampled_from(TENANTS), st.floats(0.001, 1_000), min_size=1), st.integers(0, 10_000))
def test_a_division_leaves_nobody_out_and_gives_little_too_much(weights: dict[str, float], amount: int) -> None:
    shares = Shares()
    for tenant, weight in weights.items():
        shares.set_weight(tenant, weight)
    parts = shares.divided(amount, weights)
    assert all(part >= min(amount, 1) for part in parts.values())
    assert amount <= sum(parts.values()) <= amount + len(parts) + 1
