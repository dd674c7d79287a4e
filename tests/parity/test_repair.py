"""What repair promises: the engine == one dense forward in which repaired tokens are tokens of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.parity import engine_of_a_run, prompts, settings_of_a_run, tolerance_of

from kvmosaic.attention import AttentionBackend, TorchBackend
from kvmosaic.attention.native import LIBRARY, NativeBackend
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

FAMILIES = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
"""Full attention; windows with two rotations; latent attention; windows with sinks."""
POLICIES = ("first(3)", "deviation(0.3)", "query(0.3)", "combined(0.4)", "query(1)")
BACKENDS: list[AttentionBackend] = [TorchBackend(), *([NativeBackend()] if LIBRARY.exists() else [])]


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


def greedy(repair: str | None, **options: object) -> SamplingParams:
    return replace(GREEDY, repair=repair, **options)  # type: ignore[arg-type]


def check_repair(model, prompt, repair, strategy, context, block_size, budget, fragmented, backend=None):
    """Cold, warm and dense give the same logits, and a request without repair still gets its own."""
    engine = engine_of_a_run(model, strategy, context, block_size, budget, fragmented, backend, blocks=(900, 700))
    for _ in range(2):
        request, logits = answer(engine, prompt, greedy(repair))
        expected = dense_logits(model, request.layout, token_ids(request))
        torch.testing.assert_close(
            logits.to(expected.dtype), expected, atol=tolerance_of(expected, model.dtype), rtol=0
        )
    plain, logits = answer(engine, prompt)
    expected = dense_logits(model, arrange(prompt, strategy, context), token_ids(plain))
    torch.testing.assert_close(logits.to(expected.dtype), expected, atol=tolerance_of(expected, model.dtype), rtol=0)


class EveryOther:
    """Leaves a cached token between any two repaired ones."""

    signals: frozenset[str] = frozenset()

    def choose(self, chunks):
        return [range(1, chunk.num_open, 2) for chunk in chunks]

    def __str__(self):
        return "every other"


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_repaired_tokens_of_a_scattered_document_see_what_is_before_them(strategy):
    prompt = Prompt.from_tokens([5, 6, 7], [list(range(20, 34)), list(range(40, 61))], [3, 4])
    check_repair(loaded("llama"), prompt, EveryOther(), strategy, "system", 2, 64, True)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(prompt=prompts(), repair=st.sampled_from(POLICIES), **settings_of_a_run)
def test_repaired_answers_equal_the_dense_forward_in_float64(
    family, prompt, repair, strategy, context, block_size, budget, fragmented
):
    check_repair(loaded(family), prompt, repair, strategy, context, block_size, budget, fragmented)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
@settings(max_examples=10)
@given(prompt=prompts(), repair=st.sampled_from(POLICIES), **settings_of_a_run)
def test_repaired_answers_equal_the_dense_forward_in_float32(
    backend, prompt, repair, strategy, context, block_size, budget, fragmented
):
    check_repair(
        loaded("llama", torch.float32), prompt, repair, strategy, context, block_size, budget, fragmented, backend
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8)
@given(prompt=prompts())
def test_all_tokens_repaired_equal_ordinary_causal_reading(family, prompt):
    """Nothing of an open chunk is read: another way to the same logits, and a test of places and masks."""
    model = loaded(family)
    engine = build_engine(model, position_strategy="sequential")
    for repair in ("first(1000)", "full"):
        _, logits = answer(engine, prompt, greedy(repair))
        _, expected = answer(build_engine(model), prompt.joined())
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


def test_full_repair_gives_256_tokens_of_causal_generation():
    plain = build("llama", torch.float32, max_position_embeddings=1024)
    model = LoadedModel.from_module(build("llama", torch.float32, max_position_embeddings=1024))
    prompt = Prompt.from_tokens(list(range(3, 20)), [list(range(20, 80)), list(range(60, 127))], [5, 6, 7, 8, 9])
    engine = build_engine(model, blocks=(300, 100), position_strategy="sequential")
    answer(engine, prompt)  # its chunks are cached, and not used
    request, _ = answer(engine, prompt, greedy("full", max_tokens=256))
    ids = torch.tensor([prompt.joined().segments[0].token_ids])
    expected = plain.generate(ids, max_new_tokens=256, min_new_tokens=256, do_sample=False)[0, ids.shape[1] :]
    assert token_ids(request) == expected.tolist()
    assert request.reuse.composition == "exact"
    assert request.reuse.repair is not None and request.reuse.repair.repaired_tokens == 127


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_no_repair_is_the_isolated_promise_bit_for_bit(strategy):
    model = loaded("llama", torch.float32)
    prompt = Prompt.from_tokens(list(range(3, 9)), [list(range(20, 50)), list(range(60, 80))], [5, 6, 7])
    engine = build_engine(model, position_strategy=strategy)
    request, logits = answer(engine, prompt)
    same, same_logits = answer(build_engine(model, position_strategy=strategy), prompt, greedy("none"))
    assert torch.equal(logits, same_logits) and token_ids(request) == token_ids(same)
    assert same.reuse.repair is None
