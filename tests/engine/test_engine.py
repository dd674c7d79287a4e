"""The engine: many requests at once, forks, waiting, preemption, aborts, and every block back in the end."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, RecordingRunner, answer, build_engine, token_ids
from support.examples import examples
from support.families import build

from kvmosaic.engine.sequence import Sequence
from kvmosaic.errors import (
    ChunkCacheFull,
    EngineError,
    EngineStopped,
    InvalidPrompt,
    InvalidSampling,
    PromptTooLong,
    QueueFull,
    RequestTooLarge,
    UnknownRequest,
)
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.rope import Rotation
from kvmosaic.sampling import SamplingParams


@cache
def llama(dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build("llama", dtype))


def documents(count: int, length: int = 11) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 128, (length + index,), generator=generator).tolist() for index in range(count)]


DOCUMENTS = documents(6)
SYSTEM = [1, 2, 3, 4, 5, 6]


def ask(*numbers: int, question: tuple[int, ...] = (7, 8, 9)) -> Prompt:
    return Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in numbers], question)


def run(engine, requests):
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    return [token_ids(request) for request in requests]


def assert_only_the_cache_holds_blocks(engine):
    """After all requests have ended, every block is free or held by the cache alone."""
    kv_cache = engine.kv_cache
    engine.check_invariants()
    for pool in (kv_cache.request_pool, kv_cache.chunk_pool):
        assert pool.num_shared == 0
    kv_cache.reset()
    assert kv_cache.request_pool.num_used == 0 and kv_cache.chunk_pool.num_used == 0


PROMPTS = [ask(0, 1), ask(1, 0, 2), Prompt.plain([3, 1, 4, 1, 5]), ask(2, question=(9,)), ask(5, 4, 3, 2, 1, 0)]


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
@pytest.mark.parametrize("budget", [7, 33, 512])
def test_requests_in_a_crowd_get_the_answers_they_get_alone(strategy, budget):
    alone = [answer(build_engine(llama(), position_strategy=strategy), prompt) for prompt in PROMPTS]
    engine = build_engine(llama(), position_strategy=strategy, max_batched_tokens=budget)
    crowd = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS * 2]
    assert run(engine, crowd) == [token_ids(request) for request, _ in alone] * 2
    assert_only_the_cache_holds_blocks(engine)


@pytest.mark.parametrize("budget", [16, 512])
def test_a_chunk_that_several_requests_miss_is_computed_once(budget):
    engine = build_engine(llama(), max_batched_tokens=budget)
    requests = [engine.add_request(ask(0, 1, 2, question=(index,)), GREEDY) for index in range(5)]
    run(engine, requests)
    computed = [segment for request in requests for segment in request.reuse.segments if segment.kind == "chunk"]
    assert sum(segment.computed_tokens for segment in computed) == sum(len(DOCUMENTS[i]) for i in (0, 1, 2))
    assert engine.kv_cache.statistics().cached_chunks == 3


def test_a_chunk_read_at_many_places_at_once_has_one_copy():
    engine = build_engine(llama(), position_strategy="sequential", blocks=(512, 64))
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)]
    requests = [engine.add_request(ask(*order), replace(GREEDY, max_tokens=8)) for order in orders]
    engine.step()
    engine.step()
    blocks_of_one_copy = sum(-(-len(DOCUMENTS[number]) // 4) for number in (0, 1, 2))
    pool = engine.kv_cache.chunk_pool
    assert pool.num_used == blocks_of_one_copy
    assert pool.num_references == blocks_of_one_copy * (1 + len(orders)), "the cache and four readers"
    storage = engine.runner.storages["chunk_cache"]
    used_bytes = pool.num_used * storage.bytes_per_block
    assert used_bytes == blocks_of_one_copy * 4 * llama().bytes_per_token()
    distances = [{s.name or i: s.distance for i, s in enumerate(r.reuse.segments)} for r in requests]
    assert len({tuple(places.values()) for places in distances}) > 1, "they stand at different places"
    before = [tensor.clone() for tensor in storage.run(0, 0, 256)]
    run(engine, requests)
    after = storage.run(0, 0, 256)
    used = [slot for chunk in engine.kv_cache.chunks() for slot in chunk.table.slots(0, chunk.num_tokens)]
    assert all(torch.equal(a[used], b[used]) for a, b in zip(after, before, strict=True)), "never written again"


def test_forked_answers_share_the_prompt_and_copy_only_their_last_block():
    engine = build_engine(llama())
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
    request = engine.add_request(ask(0, 1, question=tuple(range(10))), params)
    engine.step()
    pool = engine.kv_cache.request_pool
    assert pool.num_used == 2 + 3, "system and question, once"
    engine.step()
    assert pool.num_used == 2 + 2 + 4, "full question blocks are shared, the partly filled one was copied"
    run(engine, [request])
    answers = [output.token_ids for output in request.output().outputs]
    assert len(answers) == 4 and len(set(answers)) > 1
    singles = []
    for index in range(4):
        single = build_engine(llama())
        other, _ = answer(single, ask(0, 1, question=tuple(range(10))), replace(params, n=1, seed=3 + index))
        singles.append(other.output().outputs[0].token_ids)
    assert answers == singles
    assert_only_the_cache_holds_blocks(engine)


def test_running_out_of_blocks_preempts_and_still_gives_the_same_answers():
    params = replace(GREEDY, max_tokens=30)
    prompts = [ask(0, question=(index, 3, 5)) for index in range(4)]
    alone = [token_ids(answer(build_engine(llama()), prompt, params)[0]) for prompt in prompts]
    engine = build_engine(llama(), blocks=(20, 16))
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    assert run(engine, requests) == alone
    assert engine.scheduler.num_preemptions > 0
    assert_only_the_cache_holds_blocks(engine)


def test_an_answer_that_fills_the_pool_alone_ends_with_length():
    engine = build_engine(llama(), blocks=(8, 16))
    request, _ = answer(engine, Prompt.plain([1, 2, 3]), replace(GREEDY, max_tokens=100))
    output = request.output().outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 8 * 4 - 3 + 1
    assert_only_the_cache_holds_blocks(engine)


def test_chunks_of_waiting_requests_are_evicted_and_computed_again():
    engine = build_engine(llama(), blocks=(64, 8))
    alone = [token_ids(answer(build_engine(llama()), ask(number))[0]) for number in range(6)]
    for _ in range(2):
        requests = [engine.add_request(ask(number), GREEDY) for number in range(6)]
        assert run(engine, requests) == alone
    assert engine.kv_cache.statistics().evictions > 0


@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, 6)), min_size=1, max_size=8),
    st.integers(5, 40),
    st.sampled_from([(24, 24), (128, 128)]),
)
def test_aborts_at_any_time_give_every_block_back(plan, budget, blocks):
    engine = build_engine(llama(), blocks=blocks, max_batched_tokens=budget)
    requests = [(engine.add_request(PROMPTS[number], GREEDY), step) for number, step in plan]
    expected = {}
    for number, _ in plan:
        expected[number] = token_ids(answer(build_engine(llama()), PROMPTS[number])[0])
    count = 0
    while engine.has_unfinished_requests:
        for request, step in requests:
            if step == count and not request.is_finished:
                engine.abort(request.request_id)
                engine.check_invariants()
        engine.step()
        engine.check_invariants()
        count += 1
        assert count < 500
    for (request, _), (number, _) in zip(requests, plan, strict=True):
        output = request.output().outputs[0]
        if output.finish_reason != "abort":
            assert list(output.token_ids) == expected[number]
    assert_only_the_cache_holds_blocks(engine)


def test_aborting_the_owner_of_a_chunk_lets_the_waiting_request_compute_it():
    engine = build_engine(llama(), max_batched_tokens=4)
    owner = engine.add_request(ask(0), GREEDY)
    waiter = engine.add_request(ask(0, question=(1,)), GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort(owner.request_id)
    alone, _ = answer(build_engine(llama()), ask(0, question=(1,)))
    assert run(engine, [waiter]) == [token_ids(alone)]
    assert_only_the_cache_holds_blocks(engine)


class FailingRunner(RecordingRunner):
    """Fails so many times, in the middle of a forward."""

    failures = 0

    def run(self, spans):
        if self.failures:
            self.failures -= 1
            super().run(spans[:1])
            raise RuntimeError("the device is gone")
        return super().run(spans)


def test_a_failed_forward_leaves_nothing_to_be_found():
    engine = build_engine(llama(), runner=FailingRunner)
    requests = [engine.add_request(ask(0, 1), GREEDY), engine.add_request(Prompt.plain(list(range(12))), GREEDY)]
    engine.runner.failures = 3  # together, and each alone
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert all(request.is_finished and request.error is not None for request in requests)
    assert engine.kv_cache.statistics().cached_chunks == 0
    retry, _ = answer(engine, ask(0, 1))
    assert retry.reuse.reused_tokens == 0
    assert token_ids(retry) == token_ids(answer(build_engine(llama()), ask(0, 1))[0])
    assert_only_the_cache_holds_blocks(engine)


def test_requests_that_only_wait_outlive_a_failed_step():
    engine = build_engine(llama(), runner=FailingRunner, max_running=1)
    failed, waiting = engine.add_request(ask(0, 1), GREEDY), engine.add_request(ask(1), GREEDY)
    engine.runner.failures = 1
    with pytest.raises(RuntimeError):
        engine.step()
    assert isinstance(failed.error, EngineError) and waiting.error is None
    assert run(engine, [waiting]) == [token_ids(answer(build_engine(llama()), ask(1))[0])]
    assert_only_the_cache_holds_blocks(engine)


def test_a_request_that_cannot_be_planned_ends_and_lets_the_next_one_run(monkeypatch):
    engine = build_engine(llama())
    plan = engine.kv_cache.plan

    def plan_that_fails(layout, *args):
        if layout.last.token_ids == (9,):
            raise ValueError("a fault of ours")
        return plan(layout, *args)

    monkeypatch.setattr(engine.kv_cache, "plan", plan_that_fails)
    failed, waiting = engine.add_request(ask(0, question=(9,)), GREEDY), engine.add_request(ask(1), GREEDY)
    with pytest.raises(ValueError, match="a fault of ours"):
        engine.step()
    assert failed.is_finished and isinstance(failed.error, EngineError)
    assert run(engine, [waiting]) == [token_ids(answer(build_engine(llama()), ask(1))[0])]
    assert_only_the_cache_holds_blocks(engine)


def test_a_miss_says_why():
    engine = build_engine(llama(), blocks=(128, 6))
    first, system = answer(engine, ask(0))[0], list(range(40, 46))
    other = answer(engine, Prompt.from_tokens(system, [DOCUMENTS[0]], [5]))[0]
    answer(engine, ask(1))
    again = answer(engine, ask(0))[0]
    misses = [request.reuse.segments[1].miss for request in (first, other, again)]
    assert misses == ["never_seen", "other_system_text", "evicted"]


def test_a_warm_up_computes_chunks_without_an_answer():
    engine = build_engine(llama())
    warm = engine.add_warm_up(ask(0, 1))
    run(engine, [])
    assert warm.is_finished and warm.output().outputs == ()
    again = engine.add_warm_up(ask(1))
    run(engine, [])
    assert again.reuse.segments[-1].action == "reused"
    request, _ = answer(engine, ask(1, 0))
    assert [segment.action for segment in request.reuse.segments] == ["reused", "reused", "reused", "computed"]


def test_tenants_share_nothing():
    engine = build_engine(llama())
    answer(engine, ask(0))
    other, _ = answer(engine, replace(ask(0), salt="other tenant"))
    assert other.reuse.reused_tokens == 0


def test_higher_priority_runs_first():
    engine = build_engine(llama(), max_running=1)
    late = engine.add_request(ask(0), GREEDY)
    urgent = engine.add_request(ask(1), GREEDY, priority=5)
    finished = []
    while engine.has_unfinished_requests:
        finished += [request for request in engine.step() if request.is_finished]
    assert finished == [urgent, late]


@pytest.mark.parametrize(
    ("blocks", "prompt", "error"),
    [
        ((128, 4), ask(0, 1, 2), ChunkCacheFull),
        ((3, 128), ask(0, question=tuple(range(20))), RequestTooLarge),
    ],
)
def test_a_request_that_never_fits_fails_alone(blocks, prompt, error):
    engine = build_engine(llama(), blocks=blocks, oversized_prompts="error")
    good = engine.add_request(Prompt.plain([1, 2]), replace(GREEDY, max_tokens=3))
    bad = engine.add_request(prompt, GREEDY)
    run(engine, [])
    assert isinstance(bad.error, error) and good.error is None and len(token_ids(good)) == 3
    assert_only_the_cache_holds_blocks(engine)


def test_bad_calls_are_named():
    engine = build_engine(llama())
    with pytest.raises(UnknownRequest, match="'nobody'"):
        engine.abort("nobody")
    engine.add_request(ask(0), GREEDY, request_id="mine")
    with pytest.raises(InvalidPrompt, match="'mine' is under way"):
        engine.add_request(ask(0), GREEDY, request_id="mine")
    with pytest.raises(PromptTooLong):
        engine.add_request(Prompt.plain([1] * 100_000), GREEDY)
    with pytest.raises(InvalidPrompt, match="at least one document"):
        engine.add_warm_up(Prompt.plain([1]))
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped):
        engine.add_request(ask(0), GREEDY)
    assert_only_the_cache_holds_blocks(engine)


def test_one_request_more_than_may_wait_is_refused():
    engine = build_engine(llama())
    engine.config = replace(engine.config, max_waiting=2)
    requests = [engine.add_request(ask(number), GREEDY) for number in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.add_request(ask(2), GREEDY)
    with pytest.raises(QueueFull):
        engine.add_warm_up(ask(2))
    engine.abort(requests[0].request_id)
    requests[0] = engine.add_request(ask(2), GREEDY)
    assert run(engine, requests) == [token_ids(answer(build_engine(llama()), ask(n))[0]) for n in (2, 1)]


def test_a_tenant_that_uses_its_quota_does_not_hold_up_the_others():
    engine = build_engine(llama(), max_running=8)
    engine.kv_cache.set_quota("a", 5 * engine.kv_cache.bytes_per_block)
    of_a = [replace(ask(number), tenant="a") for number in (0, 1, 2)]
    params = replace(GREEDY, max_tokens=30)
    first, second, third = (engine.add_request(prompt, params) for prompt in of_a)
    other = engine.add_request(ask(0, 1, 2), GREEDY)
    while not other.is_finished:
        engine.step()
    assert not first.is_finished and second.first_scheduled_time is None
    alone = [token_ids(answer(build_engine(llama()), ask(number), params)[0]) for number in (0, 1, 2)]
    assert run(engine, [first, second, third]) == alone
    assert_only_the_cache_holds_blocks(engine)


def test_an_answer_ends_where_the_model_has_no_more_positions():
    model = LoadedModel.from_module(build("llama", torch.float32, max_position_embeddings=32))
    request, _ = answer(build_engine(model), Prompt.plain(list(range(28))), replace(GREEDY, max_tokens=50))
    output = request.output().outputs[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 4


def test_whatever_is_raised_in_a_step_leaves_nothing_to_be_found(monkeypatch):
    engine = build_engine(llama())
    right, _ = answer(build_engine(llama()), ask(0, 1))
    plan, calls = engine.kv_cache.plan, []

    def interrupted_plan(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plan(*args, **options)

    monkeypatch.setattr(engine.kv_cache, "plan", interrupted_plan)
    engine.add_request(ask(0, 1), GREEDY)
    engine.add_request(ask(2), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not engine.has_unfinished_requests
    retry, _ = answer(engine, ask(0, 1))
    assert retry.reuse.reused_tokens == 0 and token_ids(retry) == token_ids(right)
    assert_only_the_cache_holds_blocks(engine)


def test_an_allocation_that_fails_half_way_gives_everything_back(monkeypatch):
    engine = build_engine(llama())
    answer(engine, ask(0))
    before = (engine.kv_cache.request_pool.num_used, engine.kv_cache.chunk_pool.num_used)
    allocator = engine.kv_cache._allocator
    allocate = allocator._allocate_prefix

    def failing_allocate(plan, span, *rest):
        if span.index == len(plan.spans) - 1:
            raise KeyboardInterrupt
        return allocate(plan, span, *rest)

    monkeypatch.setattr(allocator, "_allocate_prefix", failing_allocate)
    engine.add_request(ask(0, 1, 2), GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    assert (engine.kv_cache.request_pool.num_used, engine.kv_cache.chunk_pool.num_used) == before
    again, _ = answer(engine, ask(0, 1, 2))
    assert token_ids(again) == token_ids(answer(build_engine(llama()), ask(0, 1, 2))[0])
    assert_only_the_cache_holds_blocks(engine)


@pytest.mark.parametrize("blocks", [2, 3, 4, 6])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_forks_that_fill_the_pool_end_one_by_one(blocks, n):
    engine = build_engine(llama(), blocks=(blocks, 8))
    request, _ = answer(engine, Prompt.plain([5] * 7), replace(GREEDY, n=n, max_tokens=12))
    outputs = request.output().outputs
    assert all(output.finish_reason == "length" for output in outputs)
    longest = max(outputs, key=lambda output: len(output.token_ids)).token_ids
    assert all(output.token_ids == longest[: len(output.token_ids)] for output in outputs)
    assert_only_the_cache_holds_blocks(engine)


def test_equal_prompts_side_by_side_are_not_cut_shorter_than_alone():
    params = replace(GREEDY, max_tokens=50)
    alone, _ = answer(build_engine(llama(), blocks=(8, 4)), Prompt.plain([5] * 7), params)
    engine = build_engine(llama(), blocks=(8, 4))
    requests = [engine.add_request(Prompt.plain([5] * 7), params) for _ in range(3)]
    assert run(engine, requests) == [token_ids(alone)] * 3


def test_stop_ids_outside_the_vocabulary_do_no_harm():
    engine = build_engine(llama())
    params = replace(GREEDY, min_tokens=2, stop_token_ids=[10**6])
    assert len(token_ids(answer(engine, Prompt.plain([1, 2]), params)[0])) == GREEDY.max_tokens


def test_wrong_parameters_queue_nothing():
    engine = build_engine(llama())
    with pytest.raises(InvalidSampling, match="got dict"):
        engine.add_request(ask(0), {"temperature": 0})
    with pytest.raises(InvalidSampling, match="all 128 token ids end the answer"):
        engine.add_request(ask(0), replace(GREEDY, min_tokens=1, stop_token_ids=range(128)))
    with pytest.raises(InvalidPrompt, match="request_id must be a text"):
        engine.add_request(ask(0), GREEDY, request_id=[1])
    assert not engine.has_unfinished_requests
    engine.close()


def test_a_step_of_an_answer_never_looks_at_the_whole_answer_again(monkeypatch):
    engine = build_engine(llama())
    request = engine.add_request(ask(0, 1), replace(GREEDY, max_tokens=40))
    engine.step()
    whole = Sequence.layout
    monkeypatch.setattr(Sequence, "layout", property(lambda sequence: pytest.fail("every token was gone through")))
    while engine.has_unfinished_requests:
        engine.step()
    monkeypatch.setattr(Sequence, "layout", whole)
    assert len(token_ids(request)) == 40


def test_an_answer_makes_its_rotation_tables_once(monkeypatch):
    made = []
    make = Rotation.tables
    monkeypatch.setattr(Rotation, "tables", lambda *given, **how: made.append(given) or make(*given, **how))
    engine = build_engine(llama(), position_strategy="sequential")
    answer(engine, ask(0, 1), replace(GREEDY, max_tokens=2))
    few = len(made)
    answer(engine, ask(0, 1), replace(GREEDY, max_tokens=12))
    assert few and len(made) <= few + 1  # the tables of the question, whose blocks may have been found


def test_a_prompt_whose_documents_never_fit_is_computed_as_an_ordinary_one():
    """The same tokens as the model's own forward of the joined prompt, and the cache as it was before."""
    engine = build_engine(llama(), blocks=(128, 4))
    prompt = ask(0, 1, 2)
    small = engine.add_request(ask(0), replace(GREEDY, max_tokens=3))
    large = engine.add_request(prompt, replace(GREEDY, max_tokens=6))
    engine.run([small, large])
    plain = build_engine(llama())
    alone = plain.add_request(prompt.joined(), replace(GREEDY, max_tokens=6))
    plain.run([alone])
    assert large.answers[0].token_ids == alone.answers[0].token_ids
    assert "more than the chunk cache has for them" in large.reuse.composition
    assert [segment.kind for segment in large.reuse.segments] == ["plain"]
    assert len(engine.kv_cache.chunks()) == 1, "the other prompt's document stays"
    engine.check_invariants()
