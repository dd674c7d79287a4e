"""Composed prompts in a crowd: many at once, aborted, cut into steps, preempted. Answers stay, no block is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.vllm.asking import Ask, compose, difference, documents

from kvmosaic.vllm.contract import Composition

CLOSE = 1e-4
SYSTEM, *LIBRARY = documents(20, 37, 61, 32, 90, 45, 77, 128, 33, 50)


def at_rest(engine):
    """No request is left, and every block but the null block is free."""
    state = engine.call("settle")
    assert not state["referenced"] and not state["requests"], state
    assert state["free"] == state["num_blocks"] - 1, state


def crowd(seed, count):
    """Composed prompts over a few shared documents, with texts before and between them; a plain one now and then."""
    draw = random.Random(seed)
    asks = []
    for number in range(count):
        chosen = draw.sample(LIBRARY, draw.randint(1, 4))
        (question,) = documents(1000 + number, draw.randint(1, 30))
        strategy = draw.choice(["sequential", "shared"])
        texts = [draw.choice([[], [], LIBRARY[0][:9], [7, number]]) for _ in chosen] if number % 2 else ()
        ask = compose(SYSTEM, chosen, question, texts, position_strategy=strategy)
        ask = replace(ask, max_tokens=draw.randint(2, 6))
        asks.append(ask.plain if number % 7 == 6 else ask)
    return asks


def same(found, expected):
    """The same tokens, unless two were as good as each other, and the same log-probabilities."""
    return len(found.tokens) == len(expected.tokens) and difference(found, expected) < CLOSE


def test_a_crowd_with_cancels_says_what_each_says_alone(vllm_engine):
    alone = vllm_engine("llama")
    together = vllm_engine("llama", max_num_batched_tokens=512, num_gpu_blocks_override=400)
    asks = crowd(1, 32)
    draw = random.Random(2)
    at = [draw.randint(0, 12) for _ in asks]
    abort = [step + draw.randint(0, 5) if index % 4 == 3 else None for index, step in enumerate(at)]
    answers = together.play(asks, at, abort)
    at_rest(together)
    assert all(answer is not None for answer, step in zip(answers, abort, strict=True) if step is None)
    for ask, answer in zip(asks, answers, strict=True):
        if answer is not None:
            assert ask.composition is None or answer.is_composed, answer.report
            assert same(answer, alone.ask(ask))
    at_rest(alone)


def test_everyone_cancelled_at_every_moment_leaves_nothing_behind(vllm_engine):
    engine = vllm_engine("llama", max_num_batched_tokens=512, num_gpu_blocks_override=400)
    for moment in range(8):
        engine.call("reset_prefix_cache")
        asks = [replace(ask, max_tokens=20) for ask in crowd(30 + moment, 6)]
        answers = engine.play(asks, [0] * 6, [moment] * 6)
        at_rest(engine)
        assert answers == [None] * 6
    ask = crowd(40, 1)[0]
    assert same(engine.ask(ask), vllm_engine("llama").ask(ask))


def test_documents_longer_than_a_step(vllm_engine):
    """64 tokens a step: chunks, texts, system prompt and question each take several."""
    cut = vllm_engine("llama", max_num_batched_tokens=64)
    system, long, longer, question, rest, text = documents(50, 100, 150, 333, 90, 80, 170)
    for ask in (
        compose(system, [long, longer], question),
        compose(system, [longer, long], question, position_strategy="shared"),
        compose(system, [longer, long], question, chunk_context="none"),
        compose(system, [longer, long], question, [rest, text]),
    ):
        answer = cut.ask(ask)
        assert answer.is_composed, answer.report
        assert same(answer, vllm_engine("llama").ask(ask))
    at_rest(cut)


def test_preempted_prompts_say_the_same(vllm_engine):
    """Six answers of 250 tokens do not fit together: some lose their blocks, and start again."""
    small = vllm_engine("llama", num_gpu_blocks_override=40)
    small.call("count_preemptions")
    prompts = [compose(SYSTEM, [chunk], [9 + index], [[index]]) for index, chunk in enumerate(LIBRARY[:6])]
    asks = [replace(prompt, max_tokens=250) for prompt in prompts]
    answers = small.play(asks, [0] * 6, [None] * 6)
    assert small.call("preemptions") > 0, "nothing was preempted, so this test says nothing"
    at_rest(small)
    for ask, answer in zip(asks, answers, strict=True):
        assert same(answer, vllm_engine("llama").ask(ask))


def test_a_block_that_others_wrote_meanwhile_is_moved_only_when_it_is_written_again(vllm_engine):
    """While a composed prompt waits for its turn, its document's only block is taken, freed, and written again."""
    small = vllm_engine("llama", num_gpu_blocks_override=17, max_model_len=512, max_num_seqs=2)
    chunk, question, other, long, rest = documents(61, 20, 20, 20, 32 * 14 - 2, 3)
    padded = [*chunk, *[0] * 12]
    ask = replace(compose([], [chunk], question), max_tokens=5)
    answers = small.play(
        [
            Ask(tuple(padded), max_tokens=1),
            Ask(tuple(other), max_tokens=6),
            Ask(tuple(long), max_tokens=6),  # its answer takes the last block that is free, which is the document's
            Ask((*padded, *rest)),
            ask,
        ],
        [0, 2, 2, 3, 3],
        [None] * 5,
    )
    assert answers[-1] is not None and answers[-1].is_composed
    assert same(answers[-1], vllm_engine("llama").ask(ask))
    at_rest(small)


def test_prompts_that_fill_the_whole_cache_are_answered(vllm_engine):
    """The request alone fits, its chunks beside it do not: it is answered all the same, composed or not."""
    tiny = vllm_engine("llama", num_gpu_blocks_override=24, max_model_len=640)
    system, *chunks, question = documents(51, 40, 128, 128, 128, 128, 40)
    ask = compose(system, chunks, question)
    answer = tiny.play([ask], [0], [None])[0]
    assert answer is not None and len(answer.tokens) == ask.max_tokens
    expected = vllm_engine("llama").ask(ask if answer.is_composed else ask.plain)
    assert same(answer, expected)
    at_rest(tiny)


def test_a_reset_forgets_chunks_and_no_more(vllm_engine):
    engine = vllm_engine("llama")
    ask = compose(SYSTEM, LIBRARY[:3], [5, 6, 7])
    first = engine.ask(ask)
    assert engine.call("reset_prefix_cache")
    again = engine.ask(ask)
    assert same(first, again)
    at_rest(engine)


def test_several_answers_to_one_prompt(vllm_engine):
    engine = vllm_engine("llama")
    ask = replace(compose(SYSTEM, LIBRARY[3:6], [9] * 11), n=3, temperature=1.0, seed=5, max_tokens=6)
    answer, again = engine.ask(ask), engine.ask(ask)
    assert len(answer.token_ids) == 3 and len(set(map(tuple, answer.token_ids))) > 1
    assert answer.token_ids == again.token_ids
    greedy = engine.ask(replace(ask, n=1, temperature=0.0))
    for sampled in range(3):
        one = replace(answer, token_ids=[answer.token_ids[sampled]], logprobs=[answer.logprobs[sampled][:1]])
        first = replace(greedy, logprobs=[greedy.logprobs[0][:1]])
        one, first = (replace(each, token_ids=[each.token_ids[0][:1]]) for each in (one, first))
        assert difference(one, first) < CLOSE
    at_rest(engine)


@pytest.mark.parametrize(
    "before, then",
    [
        (Composition(5, (100, 50)), Composition(50, (55, 50))),  # the second chunk saw another system text
        (Composition(5, (50,)), Composition(5, (50, 60))),  # what was a question is a chunk
        (Composition(5, (50, 60)), Composition(5, (50,))),
        (Composition(5, (50, 60), position_strategy="shared"), Composition(5, (50,), position_strategy="shared")),
        (Composition(40, (20, 40), chunk_context="none"), Composition(60, (40,), chunk_context="none")),
        (Composition(40, (20, 40)), Composition(40, (40,), texts=(20,))),  # what was a chunk is a text
        (Composition(40, (20, 40), texts=(0, 30)), Composition(40, (20, 70))),
        (Composition(40, (20, 40), texts=(0, 30)), Composition(40, (50, 40))),
        (Composition(40, (20, 40), texts=(9, 30)), Composition(49, (20, 40), texts=(0, 30))),
    ],
)
def test_the_same_tokens_with_other_borders_share_nothing_approximate(vllm_engine, before, then):
    engine = vllm_engine("llama")
    (tokens,) = documents(60, 200)
    engine.call("reset_prefix_cache")
    alone = engine.ask(Ask(tuple(tokens), then))
    engine.call("reset_prefix_cache")
    engine.ask(Ask(tuple(tokens), before))
    answer = engine.ask(Ask(tuple(tokens), then))
    assert answer.is_composed, answer.report
    assert same(answer, alone)


def test_salts_share_nothing(vllm_engine):
    engine = vllm_engine("llama")
    system, *chunks, question = documents(52, 64, 96, 64, 20)
    ask = compose(system, chunks, question)
    mine = engine.ask(ask, cache_salt="mine")
    yours = engine.ask(ask, cache_salt="yours")
    assert {segment["reused_tokens"] for segment in yours.report["segments"]} == {0}, yours.report
    again = engine.ask(compose(system, chunks[::-1], question), cache_salt="mine")
    assert again.report["totals"]["composed_tokens"] > 0
    assert same(mine, yours)


def test_log_probabilities_of_the_prompt_are_a_reason_to_bypass(vllm_engine):
    engine = vllm_engine("llama")
    ask = compose(SYSTEM, LIBRARY[:2], [5, 6, 7])
    answer = engine.ask(ask, prompt_logprobs=1)
    assert "prompt_logprobs" in answer.report["bypass"]
    assert same(answer, vllm_engine("llama", plugin=False).ask(ask.plain, prompt_logprobs=1))


def test_a_latent_cache_without_prefix_caching_is_bypassed_with_the_reason(vllm_engine):
    """vLLM has no prefix caching for latent attention on CPUs without AMX."""
    engine = vllm_engine("deepseek", environment={})
    bare = vllm_engine("deepseek", environment={}, plugin=False)
    ask = compose(SYSTEM, LIBRARY[:2], [5, 6, 7])
    answer = engine.ask(ask)
    if engine.call("has_prefix_caching"):
        pytest.skip("this machine has AMX, and a latent cache with prefix caching")
    assert "prefix caching" in answer.report["bypass"]
    assert same(answer, bare.ask(ask.plain))


@pytest.mark.parametrize(
    "params",
    [
        {"chunks": [10]},
        {"system": 0, "chunks": [0, 5]},
        {"system": 5, "chunks": [10_000]},
        {"chunks": "many"},
        {"chunks": [5], "depth": 1},
        {"chunks": [5], "position_strategy": "absolute"},
        "documents",
        None,
    ],
)
def test_borders_that_make_no_sense_never_stop_the_engine(vllm_engine, params):
    engine = vllm_engine("llama")
    ask = Ask(tuple(LIBRARY[0]))
    said = engine.call("answer", asks=[{**ask.to_json(), "kv_transfer_params": {"kvmosaic": params}}])
    assert len(said[0]["token_ids"][0]) == ask.max_tokens
    assert same(engine.ask(ask), vllm_engine("llama", plugin=False).ask(ask))
