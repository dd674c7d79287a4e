"""Scores of given continuations: in parts, in company, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest
import torch
from support.async_engines import assert_only_the_cache_holds_blocks
from support.engines import GREEDY, answer, build_engine, token_ids
from support.loaded import chatting_llama, loaded_family
from support.watching import Spy

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, Prompt, SamplingParams
from kvmosaic.engine.likelihood import MAX_LOGIT_ROWS
from kvmosaic.errors import InvalidPrompt, InvalidRepair, PromptTooLong

SYSTEM, QUESTION = [3, 4, 5], [90, 91, 92]
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]
PROMPT = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
CONTINUATION = [7, 60, 61, 8, 95, 3, 20, 21, 22, 23, 24]


def llama():
    return loaded_family("llama")


def run(engine):
    steps = 0
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
        steps += 1
    return steps


def score(engine, prompt=PROMPT, continuation=CONTINUATION, **options):
    request = engine.add_score(prompt, continuation, **options)
    run(engine)
    if request.error is not None:
        raise request.error
    return request.score()


def alone(prompt=PROMPT, continuation=CONTINUATION, **options):
    return score(build_engine(llama()), prompt, continuation, **options)


def assert_alike(one, other):
    assert one.token_ids == other.token_ids and one.greedy_token_ids == other.greedy_token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-10)


def test_loss_is_the_mean_in_nats_and_agreement_the_share_of_greedy_tokens():
    request, logits = answer(build_engine(llama()), PROMPT)
    own = token_ids(request)
    found = alone(continuation=own)
    chosen = [float(row[token]) for row, token in zip(logits.log_softmax(-1), own, strict=True)]
    assert found.loss == pytest.approx(-fmean(chosen)) and found.agreement == 1.0
    other = (own[1] + 1) % 100
    assert alone(continuation=[own[0], other, *own[2:]]).agreement < 1.0


@pytest.mark.parametrize("repair", [None, "first(2)", "query(0.3)", "full"])
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_a_continuation_longer_than_a_step_has_the_same_scores(repair, budget):
    engine = build_engine(llama(), max_batched_tokens=budget)
    assert_alike(score(engine, repair=repair), alone(repair=repair))


def test_the_logits_of_a_long_continuation_come_in_several_steps():
    long = [3 + number % 90 for number in range(3 * MAX_LOGIT_ROWS)]
    engine = build_engine(llama())
    request = engine.add_score(PROMPT, long)
    assert run(engine) >= 3 and max(len(rows) for rows in engine.runner.logits) == MAX_LOGIT_ROWS
    assert len(request.score().logprobs) == len(long)
    assert_alike(request.score(), score(build_engine(llama(), max_batched_tokens=7), continuation=long))


@pytest.mark.parametrize("repair", [None, "query(0.3)", "full"])
def test_answers_and_scores_run_side_by_side(repair):
    engine = build_engine(llama())
    expected, _ = answer(build_engine(llama()), PROMPT, replace(GREEDY, repair=repair))
    asked = [engine.add_request(PROMPT, replace(GREEDY, repair=repair, n=2)) for _ in range(2)]
    scores = [engine.add_score(PROMPT, CONTINUATION[:count], repair=repair) for count in (1, 5, 11)]
    asked.append(engine.add_request(PROMPT, replace(GREEDY, repair=repair)))
    run(engine)
    assert all(token_ids(request) == token_ids(expected) for request in asked)
    for request, count in zip(scores, (1, 5, 11), strict=True):
        assert_alike(request.score(), alone(continuation=CONTINUATION[:count], repair=repair))
    assert_only_the_cache_holds_blocks(engine)


def test_a_score_that_gives_its_blocks_away_half_way_is_right_all_the_same():
    prompts = [Prompt.plain([number + 3, 4, 5]) for number in range(4)]
    long = [3 + number % 90 for number in range(60)]
    engine = build_engine(llama(), blocks=(20, 16), max_batched_tokens=6)
    asked = [engine.add_request(prompt, replace(GREEDY, max_tokens=30)) for prompt in prompts[:3]]
    request = engine.add_score(prompts[3], long)
    run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert all(each.error is None for each in asked)
    assert_alike(request.score(), alone(prompts[3], long))


def test_a_prompt_that_was_answered_before_is_not_computed_again():
    engine = build_engine(llama())
    answer(engine, PROMPT)
    found = score(engine)
    reused = {segment.kind: segment.reused_tokens for segment in found.reuse.segments}
    assert reused["system"] == 3 and reused["chunk"] == 15
    (full,) = score(engine, repair="full").reuse.segments
    (again,) = score(engine, repair="full").reuse.segments
    assert full.reused_tokens == len(SYSTEM) and again.reused_tokens == PROMPT.num_tokens - 1  # its logits are wanted


def test_the_policy_sees_the_question_and_not_the_continuation():
    seen = []

    class Listening(Spy):
        def choose(self, chunks):
            seen.append([tuple(chunk.attention) for chunk in chunks])
            return [[0], [1], [2]]

    spy = Listening(frozenset({"attention"}))
    answer(build_engine(llama()), PROMPT, replace(GREEDY, repair=spy))
    alone(repair=spy)
    alone(repair=spy, continuation=[50])
    assert seen[0] == seen[1] == seen[2]


def test_plain_prompts_have_scores_too():
    joined = Prompt.plain([token for segment in PROMPT.segments for token in segment.token_ids])
    assert_alike(alone(joined), alone(repair="full"))


@pytest.mark.parametrize(
    ("continuation", "what"),
    [
        ([], "at least one token"),
        ([5, 10**6], "token 1000000; the model's are 0 to"),
        ([5, -1], "token -1"),
        ([True], "token True"),
        (["a"], "token 'a'"),
    ],
    ids=repr,
)
def test_what_is_no_continuation_is_refused(continuation, what):
    engine = build_engine(llama())
    with pytest.raises(InvalidPrompt, match=what):
        engine.add_score(PROMPT, continuation)
    assert not engine.has_unfinished_requests


def test_prompt_and_continuation_must_fit_together():
    engine = build_engine(llama(), engine_options={"max_model_len": 48})
    with pytest.raises(PromptTooLong, match="answer 50 tokens"):
        engine.add_score(PROMPT, [5] * 50)
    assert not engine.has_unfinished_requests


def test_a_policy_that_fails_ends_its_score_and_no_other():
    engine = build_engine(llama())
    wrong = engine.add_score(PROMPT, CONTINUATION, repair=Spy(choice=[[99], [], []]))
    right = engine.add_score(PROMPT, CONTINUATION)
    run(engine)
    assert isinstance(wrong.error, InvalidRepair)
    assert_alike(right.score(), alone())


# The Python face


@pytest.fixture
def llm():
    config = ChunkCacheConfig(chunk_cache_size="1MiB")
    with LLM(
        chatting_llama(), chunk_cache_config=config, engine_config=EngineConfig(request_cache_size="4MiB")
    ) as face:
        yield face


def test_an_answer_is_scored_as_text_or_as_tokens(llm):
    prompt = Prompt.from_documents(["The ferry goes to Oak Island.", "The mill grinds oats."], "Where?", system="Hm.")
    text = "to Oak Island"
    ids = llm.encoder.continuation(text)
    one, other = llm.score([prompt, prompt], [text, ids])
    assert one.token_ids == ids and one.logprobs == pytest.approx(other.logprobs, abs=1e-5) and one.loss > 0
    (apart,) = llm.score(prompt, ids, repair="first(2)", position_strategy="shared")
    assert apart.reuse.repair.policy == "first(2)"


def test_scores_are_the_logprobs_of_an_answer(llm):
    prompt = Prompt.from_documents(["The ferry goes to Oak Island."], "Where?")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    (output,) = llm.generate(prompt, params)
    (found,) = llm.score(prompt, output.outputs[0].token_ids)
    expected = [
        entry[token].logprob
        for entry, token in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True)
    ]
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)
    assert found.agreement == 1.0


@pytest.mark.parametrize(
    ("continuations", "what"),
    [
        (["a", "b"], "2 continuations for 1 prompts"),
        ([""], "at least one character"),
        ([[]], "at least one token"),
        ([5.5], "token ids"),
    ],
    ids=repr,
)
def test_continuations_that_cannot_be_scored_are_refused(llm, continuations, what):
    with pytest.raises(InvalidPrompt, match=what):
        llm.score([Prompt.plain([5, 6, 7])], continuations)
    assert not llm.engine.has_unfinished_requests
