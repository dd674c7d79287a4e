"""Composed prompts on real weights: the tokens and logits of an oracle written with transformers alone."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from support.engines import answer, build_engine, token_ids
from support.real.oracle import Asked, Oracle
from support.real.prompts import DOCUMENTS, QUESTIONS, parts
from torch import Tensor

from kvmosaic.attention import choose_backend
from kvmosaic.errors import NativeUnavailable
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

COUNT = 40
NEAR = 2e-3
"""Largest difference of logits, which reach 30, in float32."""
WAYS = list(product(("shared", "sequential"), ("system", "none")))
ORDER = (2, 0, 1)
"""Of the documents, so that the answer's stands neither first nor last."""


def asked(tokenizer, strategy: str, context: str) -> Asked:
    system, chunks, question = parts(tokenizer, QUESTIONS[0], [DOCUMENTS[index] for index in ORDER])
    return Asked(system, chunks, question, strategy, context)


def runs(model: LoadedModel, question: Asked, backend: str, count: int) -> list[tuple[list[int], Tensor]]:
    """Tokens and logits of the engine: cold, then warm."""
    try:
        chosen = choose_backend(backend, model.dtype, model.device).backend
    except NativeUnavailable as error:
        pytest.skip(str(error))
    engine = build_engine(
        model,
        blocks=(40, 40),
        block_size=16,
        max_batched_tokens=1024,
        backend=chosen,
        position_strategy=question.strategy,
        chunk_context=question.context,
        repair="none",
    )
    prompt = Prompt.from_tokens(question.system, question.chunks, question.question)
    found = []
    for _ in range(2):
        request, logits = answer(engine, prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        found.append((token_ids(request), logits.float()))
    assert all(segment.reused_tokens == segment.num_tokens for segment in request.reuse.segments[:-1])
    return found


def rms(difference: Tensor) -> float:
    return float(difference.float().square().mean().sqrt())


@pytest.fixture(scope="module")
def truth(loaded, twin):
    """`truth(strategy, context)`: the oracle in float32, its tokens and its logits."""

    @cache
    def make(strategy: str, context: str):
        oracle = Oracle(twin(), asked(loaded.tokenizer, strategy, context))
        return oracle, *oracle.greedy(COUNT)

    return make


def test_the_oracle_agrees_with_one_dense_forward(truth) -> None:
    oracle, tokens, logits = truth("shared", "system")
    torch.testing.assert_close(oracle.dense(tokens), logits, atol=NEAR, rtol=0)
    torch.testing.assert_close(oracle.forced(tokens), logits, atol=NEAR, rtol=0)


def test_the_ways_to_compose_differ(truth) -> None:
    """Otherwise the tests below could not tell them apart."""
    first = {way: truth(*way)[2][0] for way in WAYS}
    for one, other in product(WAYS, WAYS):
        assert (one == other) == bool((first[one] - first[other]).abs().max() < 50 * NEAR)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("strategy", "context"), WAYS)
def test_tokens_and_logits_are_those_of_the_oracle(loaded, truth, strategy: str, context: str, backend: str) -> None:
    oracle, tokens, logits = truth(strategy, context)
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 2 * NEAR, "this prompt has a tie: take another one"
    for found, theirs in runs(loaded, oracle.asked, backend, COUNT):
        assert found == tokens
        torch.testing.assert_close(theirs, logits, atol=NEAR, rtol=0)


@pytest.fixture(scope="module")
def narrow(loaded, twin) -> LoadedModel:
    """The same weights in bfloat16, packed and fused as on a CPU that computes in it."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(deepcopy(loaded.config), dtype=torch.bfloat16)
    module.load_state_dict(loaded.module.state_dict())
    return LoadedModel.from_module(module, loaded.tokenizer, prepack="auto")


@pytest.fixture(scope="module")
def noise(truth, twin):
    """`noise(strategy, context, tokens)`: how far transformers' own bfloat16 is from float32, in the worse of two ways
    to compute attention; and the logits in float32."""

    @cache
    def make(strategy: str, context: str, tokens: tuple[int, ...]) -> tuple[float, Tensor]:
        oracle = truth(strategy, context)[0]
        exact = oracle.forced(tokens)
        theirs = [Oracle(twin(torch.bfloat16, way), oracle.asked).forced(tokens) for way in ("eager", "sdpa")]
        return max(rms(logits - exact) for logits in theirs), exact

    return make


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize(("strategy", "context"), WAYS)
def test_bfloat16_is_as_near_as_two_valid_computations_of_the_oracle(
    narrow, truth, noise, strategy: str, context: str, backend: str
) -> None:
    """Against float32, no further than transformers' own bfloat16 in the worse of its two ways, and half as much."""
    oracle = truth(strategy, context)[0]
    for found, logits in runs(narrow, oracle.asked, backend, COUNT):
        allowed, exact = noise(strategy, context, tuple(found))
        assert 0 < rms(logits - exact) < 1.5 * allowed
