"""Recording engine: a small engine that keeps its steps, and which token each row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvmosaic.attention import AttentionBackend
from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine.engine import Engine
from kvmosaic.engine.engine_core import EngineCore
from kvmosaic.engine.request import Request
from kvmosaic.engine.step import ScheduledTokens
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import ChunkContext
from kvmosaic.model.hook import Receiver
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.runner import Batch, Runner, SpanRows
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

BLOCK_SIZE = 4
NUM_ANSWER = 2
"""Tokens of an answer: one from the prefill, one decoded."""
_NUM_BLOCKS = 96


@dataclass(slots=True)
class RecordedStep:
    """One forward: its work, and every layer's attention."""

    works: list[ScheduledTokens]
    positions: Tensor
    """[T], positions of its rows."""
    calls: list[tuple[AttentionCall, Tensor]] = field(default_factory=list)
    """Of every layer: attention call and output."""
    stored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of every layer: keys and values of the rows, read back from their slots after the step."""
    logits: Tensor | None = None
    """[R, V], of the works that need them."""

    def logits_of(self, request: Request) -> Tensor:
        """[R, V], of one request."""
        assert self.logits is not None, "the step has ended"
        owners = [work.sequence.request for work in self.works for _ in range(work.num_logits)]
        return self.logits[[index for index, owner in enumerate(owners) if owner is request]]


class RecordingRunner(Runner):
    """A runner that keeps the logits and the attention of every step."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend | None) -> None:
        super().__init__(model, {"request": _NUM_BLOCKS, "chunk_cache": _NUM_BLOCKS}, BLOCK_SIZE, backend)
        self.steps: list[RecordedStep] = []
        self.works: list[ScheduledTokens] = []
        """Work of the next step."""

    def run(self, spans: Sequence[SpanRows]) -> Tensor:
        """See `Runner.run`."""
        logits = super().run(spans)
        self.steps[-1].logits = logits
        self.steps[-1].stored = [self._stored(spans, layer.index) for layer in self.model.layers]
        return logits

    def _forward(self, batch: Batch, receiver: Receiver) -> Tensor:
        step = RecordedStep(self.works, batch.positions)
        self.steps.append(step)

        def record(call: AttentionCall) -> Tensor:
            output = receiver(call)
            step.calls.append((call, output))
            return output

        return super()._forward(batch, record)

    def _stored(self, spans: Sequence[SpanRows], layer_index: int) -> tuple[Tensor, Tensor]:
        """Keys [T, G, D] and values [T, G, Dv] of the step's rows, slot by slot."""
        parts = []
        for rows in spans:
            storage = self.storages[rows.pool]
            everything = storage.run(layer_index, 0, storage.num_blocks * storage.block_size)
            parts.append([part[torch.tensor(rows.slots, device=part.device)] for part in everything])
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values)


class RecordingCore(EngineCore):
    """A core that tells its runner what the rows of each step are."""

    runner: RecordingRunner

    def _run(self, works: Sequence[ScheduledTokens]) -> Tensor:
        self.runner.works = list(works)
        return super()._run(works)


class RecordingEngine(Engine):
    """A small engine with a recording runner."""

    runner: RecordingRunner
    core_type = RecordingCore

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend | None, strategy: str, context: ChunkContext
    ) -> None:
        config = ChunkCacheConfig(
            position_strategy=strategy, chunk_context=context, block_size=BLOCK_SIZE, repair="none"
        )
        kv_cache = KVCache(model.fingerprint, config, request_blocks=_NUM_BLOCKS, chunk_blocks=_NUM_BLOCKS)
        super().__init__(RecordingRunner(model, backend), kv_cache, config, EngineConfig(max_num_batched_tokens=512))

    def answer(self, prompts: Sequence[Prompt]) -> list[Request]:
        """Answers prompts in one batch, greedily, with `NUM_ANSWER` tokens each, by the base model without adapters.

        Raises:
            KVMosaicError: the error of a failed request.
        """
        params = SamplingParams(temperature=0, max_tokens=NUM_ANSWER, ignore_eos=True)
        return self.run([self.add_request(replace(prompt, adapter=""), params) for prompt in prompts])
