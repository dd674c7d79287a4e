"""Texts without end equal StreamingLLM written down, in every step, whatever the sizes, budgets and blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endless import composed_logits, streaming_logits
from support.engines import answer, build_engine, fragment, token_ids
from support.loaded import loaded_family, random_prompt

from kvmosaic.attention.native import LIBRARY, NativeBackend
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

FAMILIES = ("llama", "qwen3", "mistral", "gemma3", "deepseek_v3", "gpt_oss", "bloom")
"""Full attention, twice; windows; two rotations; latent attention; learned sinks; a bias by distance."""


def endless(sinks: int, window: int, max_tokens: int = 18, **more: object) -> SamplingParams:
    fields = {"temperature": 0, "ignore_eos": True, "sink_tokens": sinks, "window_tokens": window, **more}
    return SamplingParams(max_tokens=max_tokens, **fields)


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(
    num_prompt=st.sampled_from([1, 3, 8, 20, 50]),
    sinks=st.integers(0, 6),
    window=st.integers(1, 14),
    budget=st.sampled_from([3, 7, 256]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    fragmented=st.booleans(),
)
def test_every_step_gives_the_logits_of_keys_rotated_anew_at_their_places(
    family, num_prompt, sinks, window, budget, block_size, fragmented
):
    model = loaded_family(family)
    engine = build_engine(model, blocks=(150, 8), max_batched_tokens=budget, block_size=block_size)
    if fragmented:
        fragment(engine)
    prompt = random_ids(num_prompt, 100 * sinks + window)
    request, logits = answer(engine, Prompt.plain(prompt), endless(sinks, window))
    written = [*prompt, *token_ids(request)[:-1]]
    expected = streaming_logits(model, written, sinks, window)[num_prompt - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@settings(max_examples=5)
@given(
    seed=st.integers(0, 999),
    strategy=st.sampled_from(["shared", "sequential"]),
    sinks=st.integers(0, 5),
    window=st.integers(1, 9),
    num_question=st.sampled_from([1, 6, 30]),
    budget=st.sampled_from([5, 256]),
)
def test_system_prompt_and_documents_stay_in_sight(family, seed, strategy, sinks, window, num_question, budget):
    model = loaded_family(family)
    engine = build_engine(model, max_batched_tokens=budget, position_strategy=strategy)
    prompt = random_prompt(seed, question=num_question)
    layout = arrange(prompt, strategy)
    for _ in range(2):  # the second time the documents are found
        request, logits = answer(engine, prompt, endless(sinks, window, 16))
        segment = layout.last.segment
        grown = replace(segment, token_ids=(*layout.last.token_ids, *token_ids(request)[:-1]))
        longer = replace(layout, spans=(*layout.spans[:-1], replace(layout.last, segment=grown)))
        expected = composed_logits(model, longer, sinks, window)[-len(logits) :]
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


def test_a_window_that_holds_everything_changes_nothing() -> None:
    model = loaded_family("llama")
    prompt = random_prompt(5)
    plain, plain_logits = answer(build_engine(model), prompt, SamplingParams(temperature=0, max_tokens=20))
    rolling, logits = answer(build_engine(model), prompt, endless(4, 100, 20))
    torch.testing.assert_close(logits, plain_logits, atol=0, rtol=0)
    assert token_ids(rolling) == token_ids(plain)


@pytest.mark.parametrize("backend", ["torch", *(["native"] if LIBRARY.exists() else [])])
def test_float32_is_as_exact_far_behind_the_model_as_at_its_beginning(backend: str) -> None:
    """150 tokens in a model of 64 positions; the last 20 by the twin, in float64, from all that they can depend on."""
    model, exact = loaded_family("llama", torch.float32), loaded_family("llama")
    backends = NativeBackend() if backend == "native" else None
    engine = build_engine(model, backend=backends, blocks=(40, 4), engine_options={"max_model_len": 64})
    prompt, sinks, window = random_ids(10, 1), 4, 40
    request, logits = answer(engine, Prompt.plain(prompt), endless(sinks, window, 150))
    written = [*prompt, *token_ids(request)[:-1]]
    reach = 20 + len(exact.layers) * window
    expected = streaming_logits(exact, [*written[:sinks], *written[-reach:]], sinks, window)[-20:]
    torch.testing.assert_close(logits[-20:].double(), expected, atol=1e-4, rtol=0)
