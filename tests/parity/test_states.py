"""Models with states: cold == warm == one dense forward in which what a span sees is run again, without maps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, evict_all, set_tier, token_ids
from support.families import HYBRIDS, build
from support.float64 import Float64
from support.loaded import loaded_hybrid, random_prompt
from support.parity import check_cold_and_warm, engine_of_a_run, prompts, settings_of_a_run
from support.tiers import TroubledTier

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import SamplingParams

KINDS = ("minimax", "qwen3_next", "jamba", "lfm2")
"""A number per head, a matrix per head, a number per channel, nothing but the tail of a convolution."""
COMPANIONS = st.lists(st.lists(st.integers(3, 99), min_size=1, max_size=9).map(tuple), max_size=3).map(tuple)


def each(names: tuple[str, ...]) -> list[object]:
    return [name if name == "minimax" else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
@settings(max_examples=10)
@given(prompt=prompts(), **settings_of_a_run)
def test_random_prompts_equal_the_dense_forward_cold_and_warm(family, prompt, **run):
    check_cold_and_warm(loaded_hybrid(family), prompt, **run)


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_texts_companions_and_documents_that_see_others_equal_the_dense_forward(strategy):
    tokens = iter(range(3, 128))
    counts = {"system": 5, "chunk": 6, "text": 3, "other": 4, "last": 7, "question": 3}
    parts = {name: tuple(next(tokens) for _ in range(count)) for name, count in counts.items()}
    parts["other"] = (*parts["chunk"][:4], *parts["other"])  # they begin with the same block
    segments = (
        Segment(SegmentKind.SYSTEM, parts["system"]),
        Segment(SegmentKind.CHUNK, parts["chunk"]),
        Segment(SegmentKind.TEXT, parts["text"]),
        Segment(SegmentKind.CHUNK, parts["other"]),
        Segment(SegmentKind.CHUNK, parts["last"], sees=(1,)),
        Segment(SegmentKind.QUESTION, parts["question"]),
    )
    for companions, context in (((), "system"), (((100, 101), (102,)), "companions")):
        prompt = Prompt(segments, companions=companions)
        check_cold_and_warm(loaded_hybrid("minimax"), prompt, strategy, context, 4, 5, False)


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
@settings(max_examples=6)
@given(prompt=prompts(), companions=COMPANIONS, run=st.fixed_dictionaries(settings_of_a_run))
def test_random_prompts_with_companions_equal_the_dense_forward(family, prompt, companions, run):
    check_cold_and_warm(
        loaded_hybrid(family), replace(prompt, companions=companions), **run | {"context": "companions"}
    )


def check_first_tokens(model, prompt, count, **run):
    """Repaired, cold and warm, and then without repair, what the dense forward gives."""
    engine = engine_of_a_run(model, **run, blocks=(900, 700), repaired_tokens=count)
    for repair in (f"first({count})", f"first({count})", "none"):
        request, logits = answer(engine, prompt, replace(GREEDY, repair=repair))
        expected = dense_logits(model, request.layout, token_ids(request))
        torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
    engine.check_invariants()


def test_first_tokens_of_documents_follow_the_state_of_what_is_before_them():
    prompt = Prompt.from_tokens([5, 6, 7], [[*range(20, 29)], [*range(40, 43)], [*range(50, 59)]], [3, 4])
    run = {"strategy": "sequential", "context": "system", "block_size": 4, "budget": 7, "fragmented": False}
    check_first_tokens(loaded_hybrid("minimax"), prompt, 4, **run)


@pytest.mark.slow
def test_a_document_sees_one_without_what_that_one_saw():
    chunks = [
        ((77, 37, 46, 76), ()),
        (tuple(range(20, 31)), (0,)),
        ((47, 98), ()),
        ((77, 37), (2,)),
        ((90, 29), (1, 3)),
    ]
    segments = [Segment(SegmentKind.CHUNK, tokens, sees=sees) for tokens, sees in chunks]
    segments.insert(2, Segment(SegmentKind.TEXT, (6, 6)))
    run = {"strategy": "shared", "context": "system", "block_size": 4, "budget": 5, "fragmented": False}
    prompt = Prompt((*segments, Segment(SegmentKind.QUESTION, (100, 101))))
    for family in KINDS:
        check_first_tokens(loaded_hybrid(family), prompt, 1, **run)


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
@settings(max_examples=12)
@given(prompt=prompts(), count=st.sampled_from([1, 3, 8]), run=st.fixed_dictionaries(settings_of_a_run))
def test_random_prompts_with_repaired_first_tokens_equal_the_dense_forward(family, prompt, count, run):
    check_first_tokens(loaded_hybrid(family), prompt, count, **run)


@pytest.mark.slow
@settings(max_examples=12)
@given(family=st.sampled_from(KINDS), prompt=prompts(texts="nowhere"))
def test_all_tokens_repaired_equal_ordinary_reading(family, prompt):
    engine = build_engine(loaded_hybrid(family), position_strategy="sequential", repaired_tokens=1000)
    _, logits = answer(engine, prompt, replace(GREEDY, repair="first(1000)"))
    _, expected = answer(build_engine(loaded_hybrid(family)), prompt.joined())
    torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)


@pytest.mark.slow
def test_what_is_never_repaired_comes_back_from_a_tier_and_from_sleep():
    for family in KINDS:
        model, tier, params = loaded_hybrid(family), TroubledTier(), replace(GREEDY, repair="first(3)")
        for turn in range(2):  # the second engine is another process
            engine = build_engine(model, repaired_tokens=3)
            offloader = set_tier(engine, tier)
            request, logits = answer(engine, asked([], [70, 71]), params)
            expected = dense_logits(model, request.layout, token_ids(request))
            assert (logits - expected).abs().max() <= 1e-9
            assert all(bool(each.tier) == bool(turn) for each in request.reuse.segments[1:-1])
            assert offloader.tiered_store.flush(60)
            engine.sleep()
            engine.wake()
            answer(engine, asked([], [72]), params)
            again, logits = answer(engine, asked([], [70, 71, 73]), params)
            assert (logits - dense_logits(model, again.layout, token_ids(again))).abs().max() <= 1e-9


def test_a_later_turn_finds_repaired_tokens_with_their_state():
    engine, params = build_engine(loaded_hybrid("minimax"), repaired_tokens=3), replace(GREEDY, repair="first(3)")
    first, _ = answer(engine, asked([], [70, 71, 72]), params)
    history = [70, 71, 72, *token_ids(first), 80, 81]
    second, logits = answer(engine, asked([], history), params)
    assert second.reuse.repair.computed_tokens == 0 and num_computed(second) == 3
    assert (logits - dense_logits(engine.runner.model, second.layout, token_ids(second))).abs().max() <= 1e-9


def asked(tokens: list[int], question: list[int]) -> Prompt:
    parts = random_prompt().segments
    return Prompt.from_tokens(
        list(parts[0].token_ids or ()), [list(part.token_ids or ()) for part in parts[1:-1]], [*tokens, *question]
    )


def num_computed(request: Request) -> int:
    return sum(segment.num_tokens - segment.reused_tokens for segment in request.reuse.segments)


@pytest.mark.parametrize("family", each(KINDS))
@pytest.mark.parametrize("block_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_a_later_turn_computes_the_new_tokens_only(family, block_size):
    engine = build_engine(loaded_hybrid(family), block_size=block_size)
    history = [70, 71, 72, 73, 74, 75, 76]
    first, _ = answer(engine, asked([], history), GREEDY)
    for new in ([50, 51], [52, 53, 54]):
        history += [*token_ids(first), *new]
        first, logits = answer(engine, asked([], history), GREEDY)
        assert num_computed(first) == 1 + len(new), "the token sampled last, and the new ones"
        expected = dense_logits(engine.runner.model, first.layout, token_ids(first))
        assert (logits - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("family", each(KINDS))
def test_a_turn_that_is_written_in_other_tokens_is_computed_from_the_last_border_before_them(family):
    engine = build_engine(loaded_hybrid(family), block_size=4)
    history = list(range(60, 74))
    answer(engine, asked([], history), GREEDY)
    second, logits = answer(engine, asked(history, [100, 101, 102]), GREEDY)
    assert num_computed(second) == 3 + len(history) % 4
    expected = dense_logits(engine.runner.model, second.layout, token_ids(second))
    assert (logits - expected).abs().max() <= 1e-9


@pytest.mark.parametrize("family", each(tuple(HYBRIDS)))
def test_plain_prompts_give_the_tokens_of_transformers_generate(family):
    with Float64():
        model = LoadedModel.from_module(build(family))
    lengths, count = (1, 5, 23, 40), 12
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=count, min_tokens=count)
    engine = build_engine(model, max_batched_tokens=16)
    before = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    expected = [
        model.module.generate(
            text[None],
            attention_mask=torch.ones(1, len(text), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
        )[0, len(text) :].tolist()
        for text in texts
    ]
    model.module.set_attn_implementation(before)
    for _ in range(2):
        requests = [engine.add_request(Prompt.plain(text.tolist()), params) for text in texts]
        assert [token_ids(request) for request in engine.run(requests)] == expected, "together, in parts, cached"


@pytest.mark.parametrize("family", each(KINDS))
def test_answers_that_fork_and_are_preempted_are_those_of_a_quiet_engine(family):
    model, params = loaded_hybrid(family), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2)
    questions = [asked([], [90 + number, 91]) for number in range(4)]

    def answers(engine: Engine) -> list[list[int]]:
        requests = engine.run([engine.add_request(question, params) for question in questions])
        engine.check_invariants()
        return [list(each.token_ids) for request in requests for each in request.output().outputs]

    quiet = build_engine(model)
    expected = [tokens for question in questions for tokens in _alone(quiet, question, params)]
    crowded = build_engine(model, blocks=(17, 40), max_batched_tokens=16)
    assert answers(crowded) == expected
    assert sum(crowded.scheduler.preemption.counts.values()) > 0
    assert crowded.scheduler.preemption.swap is None, "a state is not swapped"


def _alone(engine: Engine, question: Prompt, params: SamplingParams) -> list[list[int]]:
    (request,) = engine.run([engine.add_request(question, params)])
    return [list(each.token_ids) for each in request.output().outputs]


def test_states_that_were_taken_away_are_computed_again():
    model = loaded_hybrid("minimax")
    engine, history = build_engine(model), [70, 71, 72, 73, 74]
    engine.kv_cache._prefix.states.max_states = 1
    for number in range(3):
        answer(engine, asked([], [*history, 90 + number]), GREEDY)
    assert len(engine.kv_cache._prefix.states) == 1
    request, logits = answer(engine, asked([], [*history, 90]), GREEDY)
    assert num_computed(request) > 1
    expected = dense_logits(model, request.layout, token_ids(request))
    assert (logits - expected).abs().max() <= 1e-9


def test_a_step_that_fails_leaves_no_state_behind():
    model = loaded_hybrid("minimax")
    engine, prompt, other = build_engine(model), asked([], [70, 71, 72, 73, 74]), asked([], [80, 81])
    run = engine.runner.run

    def fail(spans):
        logits = run(spans)
        if any(74 in span.token_ids for span in spans):
            raise RuntimeError("after the forward")
        return logits

    engine.runner.run = fail
    requests = [engine.add_request(each, GREEDY) for each in (other, prompt)]
    while engine.has_unfinished_requests:
        engine.step()
    assert [request.error is None for request in requests] == [True, False]
    assert all(entry.state.value is not None for entry in engine.kv_cache._prefix.states)
    engine.check_invariants()
    engine.runner.run = run
    request, logits = answer(engine, prompt, GREEDY)
    expected = dense_logits(model, request.layout, token_ids(request))
    assert (logits - expected).abs().max() <= 1e-9


@pytest.mark.slow
def test_rows_follow_what_documents_keep_of_their_rest_in_the_same_step():
    engine, params = build_engine(loaded_hybrid("minimax"), repaired_tokens=4), replace(GREEDY, repair="first(4)")
    chunks = [(range(20, 29), ()), (range(40, 49), ()), (range(60, 69), (1,))]
    segments = [Segment(SegmentKind.CHUNK, tuple(tokens), sees=sees) for tokens, sees in chunks]
    for question in ((3, 4), (3, 5, 9)):
        last = Segment(SegmentKind.QUESTION, question)
        prompt = Prompt((Segment(SegmentKind.SYSTEM, (5, 6, 7)), *segments, last))
        request, logits = answer(engine, prompt, params)
        assert (logits - dense_logits(engine.runner.model, request.layout, token_ids(request))).abs().max() <= 1e-9
        evict_all(engine)  # repaired tokens stay cached


def test_where_there_is_no_room_for_a_copied_block_a_span_continues_from_an_earlier_state():
    engine, params = build_engine(loaded_hybrid("minimax"), blocks=(3, 8)), replace(GREEDY, max_tokens=1)
    history = list(range(20, 30))
    answer(engine, Prompt.plain(history), params)
    request, logits = answer(engine, Prompt.plain([*history, 40]), params)
    assert (logits - dense_logits(engine.runner.model, request.layout, token_ids(request))).abs().max() <= 1e-9


@pytest.mark.slow
def test_a_request_that_read_a_state_of_a_failed_one_is_computed_again():
    engine, history = build_engine(loaded_hybrid("minimax")), list(range(20, 28))
    answer(engine, Prompt.plain([*history, 30]), GREEDY)
    states = engine.kv_cache._prefix.states
    for entry in list(states):
        states.take(entry)
    run = engine.runner.run

    def fail(spans):
        if any(74 in span.token_ids for span in spans):
            raise RuntimeError("before the forward")
        return run(spans)

    engine.runner.run = fail
    requests = [engine.add_request(Prompt.plain([*history, *rest]), GREEDY) for rest in ((74, 75), (80, 81))]
    while engine.has_unfinished_requests:
        engine.step()
    assert [request.error is None for request in requests] == [False, True]
    engine.check_invariants()


def test_states_survive_sleep():
    model = loaded_hybrid("minimax")
    engine, prompt = build_engine(model), asked([], [70, 71, 72, 73, 74])
    before, _ = answer(engine, prompt, GREEDY)
    engine.sleep()
    engine.wake()
    after, _ = answer(engine, prompt, GREEDY)
    assert token_ids(after) == token_ids(before) and num_computed(after) == 1


@pytest.mark.parametrize("family", each(tuple(HYBRIDS)))
def test_documents_come_back_from_a_tier_with_what_they_do_to_a_state(family):
    model, tier = loaded_hybrid(family), TroubledTier()
    engine = build_engine(model)
    offloader = set_tier(engine, tier)
    cold, expected = answer(engine, asked([], [70, 71, 72]), GREEDY)
    assert offloader.tiered_store.flush(60)
    evict_all(engine)
    later = asked([], [73, 74])
    request, logits = answer(engine, later, GREEDY)
    assert tier.count("get") and all(each.computed_tokens == 0 for each in request.reuse.segments[1:-1])
    assert (logits - dense_logits(model, request.layout, token_ids(request))).abs().max() <= 1e-9
    assert (expected - dense_logits(model, cold.layout, token_ids(cold))).abs().max() <= 1e-9
    other = build_engine(model)  # another process
    set_tier(other, tier)
    _, again = answer(other, later, GREEDY)
    assert (again - logits).abs().max() <= 1e-9
    engine.sleep()
    engine.wake()
    _, awake = answer(engine, later, GREEDY)
    assert (awake - logits).abs().max() <= 1e-9


@pytest.mark.slow
def test_tiers_of_the_settings_keep_states_too(tmp_path):
    tiers = TierConfig(chunk_tier=(f"file://{tmp_path / 'tier'}",), chunk_loading="always")
    config, prompt, places = EngineConfig(request_cache_size="4MiB"), asked([], [70, 71, 72]), []
    for repair in ({}, {}, {"repair": "none"}, {"repair": "first(4)"}):
        caches = ChunkCacheConfig(chunk_cache_size="4MiB", chunk_context="companions", **repair)
        with LLM(loaded_hybrid("minimax"), chunk_cache_config=caches, engine_config=config, tier_config=tiers) as llm:
            (output,) = llm.generate(prompt, GREEDY)
            used, segments = output.reuse.repair, output.reuse.segments[1:-1]
            places.append((used and used.policy, {segment.tier for segment in segments}, output.outputs[0].token_ids))
    (_, _, tokens), (_, _, again), *_ = places
    assert [place[:2] for place in places] == [
        ("first(8)", {None}),
        ("first(8)", {"object"}),
        (None, {None}),
        ("first(4)", {None}),
    ]
    assert tokens == again


@pytest.mark.parametrize("family", ["minimax", "lfm2"])
def test_states_are_stored_exactly_where_keys_are_rounded(family):
    model, tier = LoadedModel.from_module(build(family, torch.bfloat16)), TroubledTier()
    engine = build_engine(model)
    offloader = set_tier(engine, tier, codec="int8")
    prompt = asked([], [70, 71, 72])
    answer(engine, prompt, GREEDY)
    kept = {each.key: engine.runner.read_state(each.saved_state) for each in engine.kv_cache.chunks()}
    assert offloader.tiered_store.flush(60)
    evict_all(engine)
    request, _ = answer(engine, prompt, GREEDY)
    assert all(each.computed_tokens == 0 for each in request.reuse.segments[1:-1])
    for each in engine.kv_cache.chunks():
        for part, before in zip(engine.runner.read_state(each.saved_state), kept[each.key], strict=True):
            assert torch.equal(part, before)


def test_what_a_document_keeps_beside_its_tokens_is_what_is_counted():
    model = loaded_hybrid("minimax")
    engine = build_engine(model, max_batched_tokens=5)  # documents are computed in parts
    answer(engine, asked([], [70]), GREEDY)
    for chunk in engine.kv_cache.chunks():
        parts = [
            (*kept.state.tails.values(), kept.state.memory, kept.gain, kept.offset) for kept in chunk.saved_state.value
        ]
        assert sum(part.nbytes for each in parts for part in each if part is not None) == model.map_bytes
