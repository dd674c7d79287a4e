"""A repaired answer never leaks: every request gets what a fresh engine gives it, and no chunk changes by a bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, build_engine, set_offloader
from support.examples import examples
from support.loaded import loaded_family
from support.tiers import HandClock, TroubledTier
from support.watching import Spy

from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.prompt import Prompt
from kvmosaic.tiers import TieredStore

SYSTEM = [3, 4, 5, 6, 7]
DOCUMENTS = [[(13 * number + 7 * place) % 120 + 3 for place in range(7 + 2 * number)] for number in range(4)]
QUESTIONS = [[90, 91, 92], [91, 90, 92, 93, 94, 95]]
POLICIES = (
    "none",
    "first(2)",
    "first(5)",
    "deviation(0.3)",
    "query(0.3)",
    "combined(0.3)",
    "full",
)
ROOMY = (400, 200)
SMALL = (22, 16)
"""One request at a time has room, and hardly two."""


@dataclass(frozen=True)
class Ask:
    """A request, and after how many steps it is aborted, if it is."""

    order: tuple[int, ...]
    question: int
    repair: str
    n: int = 1
    priority: int = 0
    abort_after: int | None = None

    @property
    def prompt(self) -> Prompt:
        return Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in self.order], QUESTIONS[self.question])

    def send(self, engine: Engine) -> Request:
        params = replace(GREEDY, repair=self.repair, n=self.n, max_tokens=5)
        return engine.add_request(self.prompt, params, priority=10 * self.priority)


asks = st.builds(
    Ask,
    st.permutations(range(4)).flatmap(lambda order: st.integers(1, 4).map(lambda number: tuple(order[:number]))),
    st.integers(0, 1),
    st.sampled_from(POLICIES),
    st.sampled_from([1, 1, 2]),
    st.integers(0, 1),
    st.sampled_from([None, None, None, 1, 3, 6]),
)


@cache
def alone(ask: Ask, strategy: str, context: str) -> list[int]:
    engine = build_engine(loaded_family("llama"), blocks=ROOMY, position_strategy=strategy, chunk_context=context)
    request = ask.send(engine)
    engine.run([request])
    return request.answers[0].token_ids


class Bytes:
    """What every chunk held when it was complete, to be compared later."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[int, tuple[object, list]] = {}

    def check(self) -> None:
        storage = self._engine.runner.storages["chunk_cache"]
        for chunk in self._engine.kv_cache.chunks():
            if not chunk.is_ready:
                continue
            layers = storage.read_chunk(chunk.block_ids, chunk.num_tokens)
            held = [tensor.clone() for pair in layers for tensor in pair if tensor is not None]
            _, known = self._known.setdefault(id(chunk), (chunk, held))
            assert all(torch.equal(one, other) for one, other in zip(held, known, strict=True)), "a chunk has changed"


def with_tier(engine: Engine, *, is_persistent: bool) -> Engine:
    storage, clock = engine.runner.storages["chunk_cache"], HandClock()
    offloader = ChunkOffloader(
        engine.kv_cache,
        storage,
        TieredStore(
            [TroubledTier(is_persistent=is_persistent)], max_pending_bytes=2**20, loading="always", clock=clock
        ),
        ChunkEntries(engine.runner.model.fingerprint, storage, TierConfig()),
        max_staged_bytes=2**20,
        clock=clock,
    )
    offloader._compute.estimate = lambda num_tokens: float(num_tokens)  # loading a tiny chunk pays
    set_offloader(engine, offloader)
    return engine


@settings(max_examples=examples(20))
@given(
    sent=st.lists(st.tuples(asks, st.integers(0, 4)), min_size=2, max_size=6),
    strategy=st.sampled_from(["shared", "sequential"]),
    context=st.sampled_from(["system", "none"]),
    blocks=st.sampled_from([ROOMY, SMALL]),
    budget=st.sampled_from([7, 64]),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    tier=st.sampled_from([None, False, True]),
)
def test_every_answer_is_that_of_a_fresh_engine(
    sent, strategy, context, blocks, budget, prefix_caching, preemption, tier
):
    engine = build_engine(
        loaded_family("llama"),
        blocks=blocks,
        max_batched_tokens=budget,
        prefix_caching=prefix_caching,
        engine_options={"preemption": preemption, "swap_space": "1MiB"},
        clock=count().__next__,
        position_strategy=strategy,
        chunk_context=context,
    )
    if tier is not None:
        with_tier(engine, is_persistent=tier)
    held = Bytes(engine)
    requests: list[Request] = []
    for ask, num_steps in sent:
        requests.append(ask.send(engine))
        for _ in range(num_steps):
            take_step(engine, held)
    for number in range(20_000):
        if not engine.has_unfinished_requests:
            break
        for (ask, _), request in zip(sent, requests, strict=True):
            if ask.abort_after == number:
                engine.abort_all([request])
        take_step(engine, held)
    assert not engine.has_unfinished_requests, "it does not come to an end"
    for (ask, _), request in zip(sent, requests, strict=True):
        assert request.error is None
        expected = alone(replace(ask, n=1, priority=0, abort_after=None), strategy, context)
        for answer in request.answers:
            whole = ask.abort_after is None or answer.output().finish_reason != "abort"
            assert answer.token_ids == expected[: None if whole else len(answer.token_ids)]
    engine.close()


def take_step(engine: Engine, held: Bytes) -> None:
    engine.step()
    engine.check_invariants()
    held.check()


def use_of(engine: Engine, order, repair, question=0, **options):
    prompt = Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in order], QUESTIONS[question], **options)
    request = engine.add_request(prompt, replace(GREEDY, repair=repair))
    engine.run([request])
    assert request.reuse.repair is not None
    return request.reuse.repair


@pytest.mark.parametrize("repair", ["first(3)", "deviation(0.3)", "query(0.3)", "full"])
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_repaired_tokens_are_found_again_for_the_same_chunks_in_the_same_order(strategy, repair):
    engine = build_engine(loaded_family("llama"), blocks=ROOMY, position_strategy=strategy)
    first = use_of(engine, (0, 1, 2), repair)
    again = use_of(engine, (0, 1, 2), repair)
    assert first.computed_tokens == first.repaired_tokens > 0
    assert (again.repaired_tokens, again.computed_tokens) == (first.repaired_tokens, 0)


def test_repaired_tokens_do_not_depend_on_the_question_where_the_policy_does_not():
    engine = build_engine(loaded_family("llama"), blocks=ROOMY)
    use_of(engine, (0, 1, 2), "first(3)", question=0)
    assert use_of(engine, (0, 1, 2), "first(3)", question=1).computed_tokens == 0


@pytest.mark.parametrize(
    ("order", "repair", "options"),
    [
        ((0, 2, 1), "first(3)", {}),
        ((1, 0, 2), "first(3)", {}),
        ((0, 1), "first(3)", {}),
        ((0, 1, 3), "first(3)", {}),
        ((0, 1, 2), "first(4)", {}),
        ((0, 1, 2), "first(2)", {}),
        ((0, 1, 2), "first(3)", {"salt": "another"}),
    ],
)
def test_repaired_tokens_are_found_for_nothing_else(order, repair, options):
    engine = build_engine(loaded_family("llama"), blocks=ROOMY)
    use_of(engine, (0, 1, 2), "first(3)")
    use = use_of(engine, order, repair, **options)
    assert use.computed_tokens == use.repaired_tokens > 0


def test_without_prefix_caching_nothing_is_found_again():
    engine = build_engine(loaded_family("llama"), blocks=ROOMY, prefix_caching=False)
    for _ in range(2):
        use = use_of(engine, (0, 1, 2), "first(3)")
        assert use.computed_tokens == use.repaired_tokens == 6


@pytest.mark.parametrize("token", [1, 4, 8])
def test_an_equal_token_in_another_place_is_another_repair(token):
    engine = build_engine(loaded_family("llama"), blocks=ROOMY)
    prompt = Prompt.from_tokens(SYSTEM, [DOCUMENTS[0], [7] * 9], QUESTIONS[0])
    for number, is_new in ((0, True), (token, True), (0, False)):
        request = engine.add_request(prompt, replace(GREEDY, repair=Spy(frozenset(), [[], [number]])))
        engine.run([request])
        assert request.reuse.repair is not None and request.reuse.repair.computed_tokens == is_new
