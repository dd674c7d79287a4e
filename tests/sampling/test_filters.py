"""Every filter beside its twin in transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvmosaic.sampling import sampler

V = 40
seeds = st.integers(0, 2**31)
NO_IDS = torch.zeros(1, 0, dtype=torch.long)


def logits_of(seed, rows, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, V, generator=generator) * scale


def row_by_row(processors, logits):
    return torch.cat([processor(NO_IDS, logits[i : i + 1]) for i, processor in enumerate(processors)])


@given(seeds, st.lists(st.floats(0.01, 50), min_size=1, max_size=5))
def test_temperature_equals_transformers(seed, values):
    logits = logits_of(seed, len(values))
    twin = row_by_row([TemperatureLogitsWarper(value) for value in values], logits)
    torch.testing.assert_close(sampler.scale_temperature(logits, torch.tensor(values)), twin)


@given(seeds, st.lists(st.integers(1, V + 5), min_size=1, max_size=5))
def test_top_k_equals_transformers(seed, values):
    logits = logits_of(seed, len(values))
    twin = row_by_row([TopKLogitsWarper(value) for value in values], logits)
    assert torch.equal(sampler.keep_top_k(logits, torch.tensor(values)), twin)


@given(seeds, st.lists(st.floats(0.01, 1), min_size=1, max_size=5))
def test_top_p_equals_transformers(seed, values):
    logits = logits_of(seed, len(values))
    twin = row_by_row([TopPLogitsWarper(value) if value < 1 else lambda _, x: x for value in values], logits)
    assert torch.equal(sampler.keep_top_p(logits, torch.tensor(values, dtype=torch.float64)), twin)


@given(seeds, st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_min_p_equals_transformers(seed, values):
    logits = logits_of(seed, len(values))
    twin = row_by_row([MinPLogitsWarper(value) for value in values], logits)
    assert torch.equal(sampler.keep_min_p(logits, torch.tensor(values)), twin)


@given(seeds, st.lists(st.tuples(st.floats(0.1, 10), st.lists(st.integers(0, V - 1))), min_size=1, max_size=5))
def test_repetition_penalty_equals_transformers(seed, rows):
    logits = logits_of(seed, len(rows))
    seen = torch.zeros(len(rows), V, dtype=torch.bool)
    twins = []
    for index, (penalty, token_ids) in enumerate(rows):
        seen[index, torch.tensor(token_ids, dtype=torch.long)] = True
        processor = RepetitionPenaltyLogitsProcessor(penalty)
        twins.append(processor(torch.tensor([token_ids], dtype=torch.long), logits[index : index + 1]))
    penalties = torch.tensor([penalty for penalty, _ in rows])
    torch.testing.assert_close(sampler.penalize_repetition(logits, seen, penalties), torch.cat(twins))


def test_presence_and_frequency_penalties_count_the_answer():
    logits = torch.zeros(2, 4)
    counts = torch.tensor([[0.0, 1, 3, 0], [2, 0, 0, 0]])
    result = sampler.penalize_presence(logits, counts, torch.tensor([0.5, -1.0]), torch.tensor([0.25, 0.0]))
    assert result.tolist() == [[0, -0.75, -1.25, 0], [1, 0, 0, 0]]


@settings(max_examples=examples(100))
@given(seeds, st.integers(-1, V + 3), st.sampled_from([1e-9, 0.001, 0.5, 0.999, 1.0]), st.floats(0, 1))
def test_filters_never_remove_the_most_likely_token_nor_touch_their_input(seed, top_k, top_p, min_p):
    logits = logits_of(seed, 1, scale=20.0)
    before = logits.clone()
    for result in (
        sampler.keep_top_k(logits, torch.tensor([top_k])),
        sampler.keep_top_p(logits, torch.tensor([top_p])),
        sampler.keep_min_p(logits, torch.tensor([min_p])),
    ):
        assert int(result.argmax()) == int(logits.argmax())
        kept = result > sampler.NEVER
        assert torch.equal(result[kept], logits[kept])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("top_k", [0, -1])
def test_settings_that_are_off_keep_everything_beside_rows_where_they_are_on(top_k):
    logits = logits_of(1, 2)
    assert torch.equal(sampler.keep_top_k(logits, torch.tensor([top_k, 2]))[0], logits[0])
    assert torch.equal(sampler.keep_top_p(logits, torch.tensor([1.0, 0.1]))[0], logits[0])
    assert torch.equal(sampler.keep_min_p(logits, torch.tensor([0.0, 0.9]))[0], logits[0])


def test_equal_logits_at_the_border_of_top_k_all_stay():
    assert torch.isfinite(sampler.keep_top_k(torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([2]))).sum() == 3
