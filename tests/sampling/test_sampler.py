import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import SamplingParams, SamplingState, sample
from kvmosaic.sampling.sampler import SampledToken

V = 50


def steps(number, rows=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, rows, V, generator=generator) * 3


def state(prompt=(), index=0, ending_ids=(), **settings):
    params = SamplingParams(**settings)
    return SamplingState(params, prompt, vocab_size=V, index=index, ending_ids=ending_ids)


def ids(tokens):
    return [token.token_id for token in tokens]


def run(logits, *states):
    """Token ids per row, over several steps of logits [steps, rows, V]."""
    return list(zip(*(ids(sample(step, states)) for step in logits), strict=True))


def test_greedy_takes_the_largest_logit():
    logits = steps(1, 4)[0]
    assert ids(sample(logits, [state(temperature=0) for _ in range(4)])) == logits.argmax(-1).tolist()
    assert ids(sample(logits.bfloat16(), [state(temperature=0)] * 4)) == logits.bfloat16().argmax(-1).tolist()
    assert sample(logits[:0], []) == []


def test_greedy_rows_are_the_same_beside_random_ones():
    logits = steps(1, 3)[0]
    mixed = sample(logits, [state(temperature=0), state(), state(temperature=0)])
    assert [mixed[0].token_id, mixed[2].token_id] == logits[[0, 2]].argmax(-1).tolist()


BIASES = st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=4)
PARAMS = st.fixed_dictionaries(
    {
        "logit_bias": BIASES,
        "temperature": st.sampled_from([0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([1.0, 0.7]),
        "min_p": st.sampled_from([0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0, 0.5]),
        "frequency_penalty": st.sampled_from([0, 0.2]),
        "min_tokens": st.sampled_from([0, 3]),
        "logprobs": st.sampled_from([None, 0, 3]),
    }
)


@settings(max_examples=examples(40))
@given(PARAMS, st.lists(PARAMS, max_size=4), st.integers(0, 1000))
def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(params, others, seed):
    logits = steps(6, 1 + len(others), seed)
    row = len(others) // 2
    alone = run(logits[:, row : row + 1], state([1, 2], seed=seed, ending_ids=[3], **params))[0]
    rows = [state([4], seed=seed + 1, **other) for other in others]
    rows.insert(row, state([1, 2], seed=seed, ending_ids=[3], **params))
    assert run(logits, *rows)[row] == alone


@settings(max_examples=examples(40))
@given(PARAMS, BIASES, st.integers(0, 1000))
def test_a_bias_is_the_same_as_larger_logits(params, bias, seed):
    logits = steps(4, 1, seed).double()
    larger = logits.clone()
    for token_id, value in bias.items():
        larger[..., token_id] += value
    settings = {**params, "seed": seed, "ending_ids": [3], "logprobs": None}
    biased, twin = state([1], **{**settings, "logit_bias": bias}), state([1], **{**settings, "logit_bias": None})
    assert run(logits, biased) == run(larger, twin)


def test_a_bias_of_a_token_that_the_model_lacks_is_refused():
    with pytest.raises(InvalidSampling, match="logit_bias has the token id 50; this model has the ids 0 to 49"):
        state(logit_bias={V: 1})


def test_answers_of_one_request_draw_with_seeds_that_count_up():
    logits = steps(8).expand(8, 3, V)
    first, second, other = run(logits, state(seed=5), state(seed=5, index=1), state(seed=6))
    assert first != second
    assert second == other
    assert run(steps(3), state(seed=2**63 - 1, index=1)) == run(steps(3), state(seed=-(2**63)))


def test_without_a_seed_draws_differ():
    logits = torch.zeros(30, 1, V)
    assert run(logits, state()) != run(logits, state())


@settings(max_examples=examples(30))
@given(st.integers(0, 1000), st.sampled_from([0.5, 1.5]), st.integers(2, 20), st.floats(0.3, 0.99), st.floats(0, 0.3))
def test_draws_follow_the_distribution_that_transformers_filters_leave(seed, temperature, top_k, top_p, min_p):
    logits = steps(1, 1, seed)[0]
    prompt = [1, 2, 3]
    twin = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(temperature),
            MinPLogitsWarper(min_p),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
    )
    probabilities = torch.softmax(twin(torch.tensor([prompt]), logits), dim=-1)[0]
    number = 300
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": 1.2}
    states = [state(prompt, seed=1000 * seed + i, **params) for i in range(number)]
    counts = torch.bincount(torch.tensor(ids(sample(logits.expand(number, V), states))), minlength=V)
    assert bool((counts[probabilities == 0] == 0).all())
    error = (probabilities * (1 - probabilities) / number).sqrt()
    assert bool(((counts / number - probabilities).abs() <= 6 * error + 0.02).all())


def test_penalties_see_the_answer_grow():
    logits = torch.zeros(4, 1, V)
    logits[:, :, 7], logits[:, :, 8] = 1.0, 0.9
    assert run(logits, state(temperature=0, frequency_penalty=0.2)) == [(7, 8, 7, 8)]
    assert run(logits, state(temperature=0, presence_penalty=0.5)) == [(7, 8, 7, 7)]
    assert run(logits, state([7], temperature=0, repetition_penalty=2.0)) == [(8, 7, 7, 7)]
    assert run(logits, state([7], temperature=0, presence_penalty=0.5)) == [(7, 8, 7, 7)]


def test_ending_tokens_are_not_drawn_before_min_tokens():
    logits = torch.zeros(4, 1, V)
    logits[:, :, 3], logits[:, :, 4] = 5.0, 4.0
    assert run(logits, state(temperature=0, min_tokens=2, ending_ids=[3])) == [(4, 4, 3, 3)]
    drawn = run(logits, state(seed=1, min_tokens=3, ending_ids=[3, 4]))[0]
    assert {3, 4}.isdisjoint(drawn[:3])


def test_logprobs_are_those_of_the_untouched_logits():
    logits = steps(1, 3)[0]
    reference = torch.log_softmax(logits, dim=-1)
    likely = {int(logits[0].argmax()): 5.0}
    states = [state(temperature=0.1, top_k=1, logprobs=3, logit_bias=likely), state(), state(logprobs=0, seed=1)]
    first, second, third = sample(logits, states)
    assert first.token_id == int(logits[0].argmax())
    assert first.rank == 1
    assert first.logprob == pytest.approx(float(reference[0].max()))
    best = reference[0].topk(3)
    assert [token_id for token_id, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist())
    assert second == SampledToken(second.token_id)
    assert third.top == ()
    assert third.logprob == pytest.approx(float(reference[2, third.token_id]))
    assert third.rank == int((reference[2] > reference[2, third.token_id]).sum()) + 1


def test_more_logprobs_than_the_vocabulary_has_are_all_of_it():
    (token,) = sample(steps(1)[0], [state(logprobs=200)])
    assert len(token.top) == V


def test_logits_are_left_as_they_were():
    logits = steps(1, 2)[0]
    before = logits.clone()
    sample(
        logits,
        [
            state(min_tokens=2, ending_ids=[1], repetition_penalty=2.0),
            state(temperature=0, min_tokens=2, ending_ids=[1]),
        ],
    )
    assert torch.equal(logits, before)


@settings(max_examples=examples(50))
@given(st.integers(0, 10_000))
def test_the_largest_draw_still_takes_a_token_that_is_possible(seed):
    logits = steps(1, 1, seed)[0]
    logits[0, V // 2 :] = float("-inf")
    highest = state(seed=1)
    highest.draw = lambda: 1.0  # one step above what can be drawn, as rounding may make it
    assert ids(sample(logits, [highest]))[0] < V // 2


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((1, V), float("-inf"))
    logits[0, [0, 20, V - 1]] = torch.tensor([0.0, 0.0, -40.0])
    states = [state(seed=seed) for seed in range(200)]
    assert set(ids(sample(logits.expand(200, V), states))) <= {0, 20, V - 1}
