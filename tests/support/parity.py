"""The promise, as a check: dense == composed cold == composed warm, for prompts and settings of any kind."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

from kvmosaic.engine import Engine
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from support.engines import answer, build_engine, dense_logits, fragment, token_ids

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest logit difference, for logits up to 32. In bfloat16, with 8 bits, it is 2% of the largest logit."""


def tolerance_of(logits: torch.Tensor, dtype: torch.dtype) -> float:
    largest = float(logits.abs().max())
    return TOLERANCES[dtype] * max(1.0, largest / 32) if dtype in TOLERANCES else 0.02 * largest


@st.composite
def prompts(draw, vocab_size=128, texts="anywhere"):
    """Random prompts; with texts "anywhere" between the segments, only "between" documents, or "nowhere"."""
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    lengths = draw(st.lists(st.integers(1, 30), max_size=5))
    num_system, num_question = draw(st.integers(0, 20)), draw(st.integers(1, 12))

    def tokens(count: int) -> list[int]:
        return torch.randint(0, vocab_size, (count,), generator=generator).tolist()

    prompt = Prompt.from_tokens(
        tokens(num_system) if num_system else None, [tokens(count) for count in lengths], tokens(num_question)
    )
    segments = list(prompt.segments)
    first = (1 if num_system else 0) + (1 if texts == "between" and lengths else 0)
    for place in draw(st.lists(st.integers(first, len(segments) - 1), max_size=0 if texts == "nowhere" else 3)):
        segments.insert(place, Segment(SegmentKind.TEXT, tuple(tokens(draw(st.integers(1, 8))))))
    return replace(prompt, segments=tuple(segments))


settings_of_a_run = {
    "strategy": st.sampled_from(["shared", "sequential"]),
    "context": st.sampled_from(["system", "none"]),
    "block_size": st.sampled_from([1, 3, 4, 16]),
    "budget": st.sampled_from([5, 17, 256]),
    "fragmented": st.booleans(),
}


def engine_of_a_run(
    model, strategy, context, block_size, budget, fragmented, backend=None, blocks=(700, 700), **options
) -> Engine:
    """An engine as `settings_of_a_run` say."""
    engine = build_engine(
        model,
        blocks=blocks,
        max_batched_tokens=budget,
        block_size=block_size,
        position_strategy=strategy,
        chunk_context=context,
        backend=backend,
        **options,
    )
    if fragmented:
        fragment(engine)
    return engine


def check_cold_and_warm(model, prompt, strategy, context, block_size, budget, fragmented, backend=None):
    """Dense, cold and warm give the same logits; returns the largest difference and its limit."""
    engine = engine_of_a_run(model, strategy, context, block_size, budget, fragmented, backend)
    cold, cold_logits = answer(engine, prompt)
    warm, warm_logits = answer(engine, prompt)
    generated = token_ids(cold)
    expected = dense_logits(model, arrange(prompt, strategy, context), generated)
    tolerance = tolerance_of(expected, model.dtype)
    torch.testing.assert_close(cold_logits.to(expected.dtype), expected, atol=tolerance, rtol=0)
    torch.testing.assert_close(warm_logits[0], cold_logits[0], atol=tolerance, rtol=0)
    if token_ids(warm) == generated:
        torch.testing.assert_close(warm_logits, cold_logits, atol=tolerance, rtol=0)
    assert model.dtype is torch.bfloat16 or token_ids(warm) == generated
    assert all(segment.reused_tokens == segment.num_tokens for segment in warm.reuse.segments[:-1])
    return generated
