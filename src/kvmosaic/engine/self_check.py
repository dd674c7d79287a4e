"""Self-check: does this model, on this machine, give composed what it gives in one dense forward?

Two small random prompts, run by a small engine of their own:

    plain       against the model's own attention (transformers' eager code), which knows nothing of us
    composed    cold and warm, several documents moved, two answer tokens; against one dense masked forward without
                cache, moves or blocks

A wrong rotation, a wrong mask or a byte stored in the wrong place makes a difference of the size of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmosaic.attention import AttentionBackend
from kvmosaic.attention.dense import DenseAttention
from kvmosaic.cache import BlockCopy, Planner
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.engine import Engine
from kvmosaic.layout import ChunkContext, PositionStrategy, arrange, dense
from kvmosaic.model.batch import SpanRows
from kvmosaic.model.hook import ATTENTION_NAME
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import SamplingParams

_BLOCK_SIZE = 4
_NUM_ANSWER = 3
_MIN_POSITIONS = 50
_LIMITS = {torch.bfloat16: 0.2, torch.float16: 0.1, torch.float32: 1e-3, torch.float64: 1e-5}
"""Largest root mean square difference, in units of the standard deviation of the logits."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The result of a self-check."""

    plain_difference: float
    """Of an ordinary prompt from transformers' own attention, in standard deviations of the logits."""
    composed_difference: float
    """Of a composed prompt, cold or warm (the larger), from one dense forward, in the same unit."""
    limit: float
    """What is allowed for the model's dtype."""
    is_moved: bool
    """Whether the composed prompt had moved documents (not for models whose keys cannot be moved)."""
    error: str = ""
    """What went wrong, if the check could not be finished."""

    @property
    def passed(self) -> bool:
        """Whether both differences are within the limit."""
        is_close = self.plain_difference <= self.limit and self.composed_difference <= self.limit
        return is_close and not self.error

    @property
    def reason(self) -> str:
        """Why it failed, in words; empty when it passed."""
        if self.passed:
            return ""
        return self.error or (
            f"logits differ by {self.plain_difference:.2g} (plain) and {self.composed_difference:.2g} (composed) "
            f"standard deviations, allowed are {self.limit:g}"
        )


def run_self_check(model: LoadedModel, backend: AttentionBackend | None = None, *, seed: int = 0) -> SelfCheck:
    """Runs the check; takes a few forwards of about 50 tokens."""
    limit = _LIMITS.get(model.dtype, 0.2)
    if model.max_positions is not None and model.max_positions < _MIN_POSITIONS:
        error = f"the check needs {_MIN_POSITIONS} positions, this model has {model.max_positions}"
        return SelfCheck(torch.inf, torch.inf, limit, model.is_movable, error)
    try:
        plain = _plain_difference(model, backend, seed)
        composed = _composed_difference(model, backend, seed)
    except Exception as error:  # whatever fails here would fail in an answer
        return SelfCheck(torch.inf, torch.inf, limit, model.is_movable, f"{type(error).__name__}: {error}")
    return SelfCheck(plain, composed, limit, model.is_movable)


class _RecordingRunner(Runner):
    """A runner that keeps the logits of every step."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend | None) -> None:
        super().__init__(model, {"request": 64, "chunk_cache": 64}, _BLOCK_SIZE, backend)
        self.logits: list[Tensor] = []

    def run(self, spans: Sequence[SpanRows], copies: Sequence[BlockCopy] = ()) -> Tensor:
        logits = super().run(spans, copies)
        self.logits.append(logits)
        return logits


def _plain_difference(model: LoadedModel, backend: AttentionBackend | None, seed: int) -> float:
    token_ids = _random_tokens(model, 33, seed)
    engine, runner = _small_engine(model, backend, "shared", "system")
    answer = _answer(engine, Prompt.plain(token_ids))
    sequence = torch.tensor([[*token_ids, *answer[:-1]]], device=model.device)
    ours = torch.cat(runner.logits)
    module = model.module
    name = module.config._attn_implementation
    if name == ATTENTION_NAME:  # attention that was opened is its own again outside a scope
        module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            theirs = module(input_ids=sequence, use_cache=False).logits[0, -len(ours) :]
    finally:
        if name == ATTENTION_NAME:
            module.set_attn_implementation(name)
    return _difference(ours, theirs)


def _composed_difference(model: LoadedModel, backend: AttentionBackend | None, seed: int) -> float:
    # blind documents in sequence are moved the most, and still one dense forward says what they must give
    context: ChunkContext = "none" if model.is_movable else "system"
    strategy: PositionStrategy = "sequential" if model.is_movable else "shared"
    tokens = _random_tokens(model, 46, seed + 1)
    prompt = Prompt.from_tokens(tokens[:9], [tokens[9:16], tokens[16:29], tokens[29:34]], tokens[34:])
    engine, runner = _small_engine(model, backend, strategy, context)
    cold = _answer(engine, prompt)
    warm = _answer(engine, prompt)
    ours = torch.cat(runner.logits)
    cold_logits, warm_logits = ours[:_NUM_ANSWER], ours[-_NUM_ANSWER:]
    return max(
        _difference(logits, _dense_logits(model, prompt, answer, strategy, context))
        for logits, answer in ((cold_logits, cold), (warm_logits, warm))
    )


def _dense_logits(
    model: LoadedModel, prompt: Prompt, answer: Sequence[int], strategy: PositionStrategy, context: ChunkContext
) -> Tensor:
    """Logits of the answer's tokens by one dense forward, every token at the place where the question sees it."""
    question = prompt.segments[-1]
    longer = Segment(SegmentKind.QUESTION, (*(question.token_ids or ()), *answer[:-1]))
    written = dense(arrange(replace(prompt, segments=(*prompt.segments[:-1], longer)), strategy, context))
    assert written.is_one_forward
    flat = replace(written, positions=written.question_positions, distances=written.distances * 0)
    device = model.device
    rows = torch.arange(len(flat.token_ids) - len(answer), len(flat.token_ids), device=device)
    return model.forward(
        torch.from_numpy(flat.token_ids).to(device),
        torch.from_numpy(flat.positions).to(device),
        rows,
        DenseAttention(flat, model.layers),
    )


def _small_engine(
    model: LoadedModel, backend: AttentionBackend | None, strategy: PositionStrategy, context: ChunkContext
) -> tuple[Engine, _RecordingRunner]:
    config = ChunkCacheConfig(position_strategy=strategy, chunk_context=context, block_size=_BLOCK_SIZE)
    runner = _RecordingRunner(model, backend)
    planner = Planner(model.fingerprint, config, request_blocks=64, chunk_blocks=64)
    return Engine(runner, planner, config, EngineConfig(max_batched_tokens=512)), runner


def _answer(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    request = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=_NUM_ANSWER, ignore_eos=True))
    while engine.has_unfinished_requests:
        engine.step()
    if request.error is not None:
        raise request.error
    return request.output().outputs[0].token_ids


def _random_tokens(model: LoadedModel, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, model.vocab_size, (count,), generator=generator).tolist()
    return tokens


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square difference in standard deviations; infinite if anything is not a number."""
    theirs = theirs.to(torch.float64)
    difference = (ours.to(torch.float64) - theirs).square().mean().sqrt() / theirs.std().clamp_min(1e-12)
    return float(difference.nan_to_num(torch.inf))
