"""Answers that give way: their blocks go to the host and come back bit by bit, or are computed again."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, build_engine, token_ids
from support.families import build

from kvmosaic.config import EngineConfig
from kvmosaic.engine import Engine
from kvmosaic.engine.swap_space import SwapCost
from kvmosaic.errors import InvalidConfig
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

SYSTEM = [1, 2, 3, 4, 5, 6]
DOCUMENTS = [list(range(10 * n + 7, 10 * n + 7 + 9 + n)) for n in range(4)]


@cache
def model(family: str = "llama", dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


def ask(number: int, documents: tuple[int, ...] = (0,)) -> Prompt:
    return Prompt.from_tokens(SYSTEM, [DOCUMENTS[n] for n in documents], [number, 3, 5])


def small(choice: str, *, blocks: tuple[int, int] = (20, 40), family: str = "llama", **options) -> Engine:
    space = options.pop("swap_space", "1MiB")
    engine_options = {"preemption": choice, "swap_space": space}
    options.setdefault("clock", count().__next__)  # no decision depends on how fast the machine is
    return build_engine(model(family), blocks=blocks, engine_options=engine_options, **options)


def run(engine: Engine, requests) -> list[list[int]]:
    for _ in range(3_000):
        if not engine.has_unfinished_requests:
            break
        engine.step()
        engine.check_invariants()
    assert not engine.has_unfinished_requests, "it does not come to an end"
    assert engine.scheduler.preemption.swap is None or engine.scheduler.preemption.swap.num_bytes == 0
    return [token_ids(request) for request in requests]


@cache
def alone(prompt: Prompt, num_tokens: int, family: str = "llama") -> list[int]:
    engine = build_engine(model(family), blocks=(256, 256))
    request = engine.add_request(prompt, replace(GREEDY, max_tokens=num_tokens))
    return run(engine, [request])[0]


@pytest.mark.parametrize(
    ("family", "choice", "prefix_caching"),
    [
        ("llama", "recompute", True),
        ("llama", "swap", True),
        ("llama", "swap", False),
        ("deepseek_v3", "swap", False),
        ("gemma2", "swap", True),
    ],
)
def test_answers_that_gave_way_are_the_same(family, choice, prefix_caching):
    engine = small(choice, family=family, prefix_caching=prefix_caching)
    prompts = [ask(number, (number,)) for number in range(4)]
    requests = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    assert run(engine, requests) == [alone(prompt, 30, family) for prompt in prompts]
    counts = engine.scheduler.preemption.counts
    assert counts[choice] > 0
    assert choice == "swap" or counts["swap"] == 0


def test_what_comes_back_has_the_same_bits():
    engine = small("swap", prefix_caching=False)
    requests = [engine.add_request(ask(number), replace(GREEDY, max_tokens=30)) for number in range(4)]
    swap, storage = engine.scheduler.preemption.swap, engine.runner.storages["request"]
    saved, num_checked = {}, 0
    save, write = swap.save, swap.write

    def watched_save(sequence):
        span = sequence.allocation.last
        before = storage.read_chunk(span.table.block_ids, span.computed)
        if is_saved := save(sequence):
            saved[sequence] = before
        return is_saved

    def watched_write(restores):
        nonlocal num_checked
        write(restores)
        for sequence in [sequence for sequence in engine.scheduler.running if sequence in saved]:
            before, span = saved.pop(sequence), sequence.allocation.last
            after = storage.read_chunk(span.table.block_ids, len(before[0][0]))
            for (keys, values), (keys_after, values_after) in zip(before, after, strict=True):
                assert torch.equal(keys, keys_after) and torch.equal(values, values_after)
            num_checked += 1

    swap.save, swap.write = watched_save, watched_write
    run(engine, requests)
    assert num_checked > 0 and not saved
    assert swap.moved_bytes["in"] == swap.moved_bytes["out"] > 0, "without a prefix cache, all of it comes back"


def test_what_comes_back_is_not_computed_again():
    worked = {}
    for choice in ("recompute", "swap"):
        engine = small(choice, prefix_caching=False)
        requests = [engine.add_request(ask(number), replace(GREEDY, max_tokens=30)) for number in range(4)]
        sequences = [engine._requests.sequences_of(request)[0] for request in requests]
        run(engine, requests)
        worked[choice] = sum(sequence.num_worked for sequence in sequences)
    assert worked["swap"] < worked["recompute"]


def test_a_full_swap_space_computes_again():
    per_token = model().bytes_per_token()
    engine = small("swap", swap_space=per_token * 6)
    prompts = [ask(number) for number in range(4)]
    requests = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    assert run(engine, requests) == [alone(prompt, 30) for prompt in prompts]
    assert engine.scheduler.preemption.counts["recompute"] > 0


def test_blocks_that_cannot_be_copied_are_computed_again(caplog):
    engine = small("swap")
    storage = engine.runner.storages["request"]

    def fails(*_):
        raise MemoryError("no memory")

    storage.read_chunk = fails
    prompts = [ask(number) for number in range(4)]
    requests = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    assert run(engine, requests) == [alone(prompt, 30) for prompt in prompts]
    assert engine.scheduler.preemption.counts["swap"] == 0
    assert "computed again" in caplog.text


def test_aborting_one_that_gave_way_frees_the_host():
    engine = small("swap")
    requests = [engine.add_request(ask(number), replace(GREEDY, max_tokens=40)) for number in range(4)]
    swap = engine.scheduler.preemption.swap
    while not swap.num_bytes:
        engine.step()
    for request in requests:
        if not request.is_finished:
            engine.abort(request.request_id)
    assert swap.num_bytes == 0
    engine.check_invariants()


def test_several_answers_to_one_prompt_survive_giving_way():
    params = replace(GREEDY, n=3, temperature=1.0, seed=5, max_tokens=24)
    large = build_engine(model(), blocks=(256, 256))
    expected = large.add_request(ask(1), params)
    run(large, [expected])
    engine = small("swap", blocks=(14, 40))
    request = engine.add_request(ask(1), params)
    run(engine, [request])
    assert [answer.token_ids for answer in request.answers] == [answer.token_ids for answer in expected.answers]
    assert engine.scheduler.preemption.counts["swap"] > 0


def test_a_text_with_a_rolling_window_that_gave_way_is_computed_again():
    params = replace(GREEDY, max_tokens=40, sink_tokens=2, window_tokens=8)
    prompts = [ask(number) for number in range(5)]
    large = build_engine(model(), blocks=(256, 256))
    expected = run(large, [large.add_request(prompt, params) for prompt in prompts])
    engine = small("swap", blocks=(16, 40))
    assert run(engine, [engine.add_request(prompt, params) for prompt in prompts]) == expected
    assert engine.scheduler.preemption.counts["recompute"] > 0 == engine.scheduler.preemption.counts["swap"]


def test_a_swapped_answer_survives_sleep():
    engine = small("swap")
    prompts = [ask(number) for number in range(4)]
    requests = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    while not engine.scheduler.preemption.swap.num_bytes:
        engine.step()
    engine.sleep(2)
    while engine.has_work:
        engine.step()
    engine.wake()
    assert run(engine, requests) == [alone(prompt, 30) for prompt in prompts]


@settings(max_examples=15, deadline=None)
@given(
    choice=st.sampled_from(["recompute", "swap", "auto"]),
    blocks=st.integers(16, 26),
    budget=st.sampled_from([7, 24, 256]),
    asked=st.lists(
        st.tuples(
            st.integers(0, 3),  # question
            st.sets(st.integers(0, 3), min_size=1, max_size=2),  # documents
            st.integers(1, 24),  # tokens
            st.integers(-2, 2),  # priority
            st.integers(0, 6),  # steps before the next one comes
        ),
        min_size=2,
        max_size=6,
    ),
    prefix_caching=st.booleans(),
)
def test_whoever_gives_way_to_whom_answers_stay_the_same(choice, blocks, budget, asked, prefix_caching):
    engine = small(choice, blocks=(blocks, 40), max_batched_tokens=budget, prefix_caching=prefix_caching)
    requests, expected = [], []
    for question, documents, num_tokens, priority, num_steps in asked:
        prompt = ask(question, tuple(sorted(documents)))
        params = replace(GREEDY, max_tokens=num_tokens)
        requests.append(engine.add_request(prompt, params, priority=10 * priority))
        expected.append(alone(prompt, num_tokens))
        for _ in range(num_steps):
            engine.step()
            engine.check_invariants()
    assert run(engine, requests) == expected
    engine.kv_cache.reset()
    assert engine.kv_cache.request_pool.num_used == 0 and engine.kv_cache.chunk_pool.num_used == 0


@pytest.mark.parametrize(("forwards_take", "kind"), [(0.0, "recompute"), (1.0, "swap")])
def test_what_was_measured_to_be_cheaper_is_done(forwards_take, kind):
    """Copies take no time on this clock."""
    now = 0.0
    engine = small("auto", clock=lambda: now)
    forward = engine.runner.run

    def timed(*arguments):
        nonlocal now
        now += forwards_take
        return forward(*arguments)

    engine.runner.run = timed
    prompts = [ask(number) for number in range(4)]
    requests = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts]
    assert run(engine, requests) == [alone(prompt, 30) for prompt in prompts]
    counts = engine.scheduler.preemption.counts
    assert counts[kind] == sum(counts.values()) > 0


def test_nobody_knows_yet_so_computing_again_is_believed_to_be_faster():
    cost = SwapCost()
    assert not cost.decide(100, 10_000)
    cost.note_step(100, 100, seconds=1.0)
    assert cost.decide(100, 10_000), "now the first copy is a measurement"


def test_the_cheaper_way_is_taken_by_what_was_measured():
    cost = SwapCost()
    cost.note_step(100, 100, seconds=1.0)  # 10 ms per token
    cost.note_out(1_000, 0.001)  # 1 µs per byte, and as much back
    assert cost.decide(10, 40_000), "80 ms to move, 100 ms to compute"
    assert not cost.decide(10, 60_000)
    cost.note_in(1_000, 0.0)
    assert cost.decide(10, 60_000), "the way back costs nothing"


def test_a_refusal_is_not_for_ever():
    cost = SwapCost()
    cost.note_step(100, 100, seconds=0.001)
    cost.note_out(1, 1.0)
    answers = [cost.decide(10, 10) for _ in range(100)]
    assert answers.count(True) >= 1, "the first copy of a process is slow, so it is measured anew"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "drop"}, "choose 'auto' or 'recompute' or 'swap'"),
        ({"preemption": "swap", "swap_space": 0}, "needs memory of the host"),
        ({"preemption": "swap", "swap_space": None}, "needs memory of the host"),
        ({"swap_space": "much"}, "not a size"),
        ({"swap_space": -1}, "got -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(InvalidConfig, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("space", [None, 0, "0"])
def test_no_swap_space_means_no_swap(space):
    assert EngineConfig(swap_space=space).swap_bytes == 0
    engine = build_engine(model(), engine_options={"swap_space": space})
    assert engine.scheduler.preemption.swap is None
