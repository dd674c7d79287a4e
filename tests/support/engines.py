"""Small engines over small models, with the logits of every step kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.attention import AttentionBackend
from kvmosaic.attention.dense import DenseAttention
from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.engine.self_check.composed import DenseStates
from kvmosaic.entries import CodecName
from kvmosaic.layout import Layout, dense
from kvmosaic.model import LoadedModel
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from kvmosaic.tiers import Tier, TieredStore
from support.hybrid import RepairedStates
from support.tiers import HandClock

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class RecordingRunner(Runner):
    """A runner that keeps the logits of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[Tensor] = []

    def run(self, spans: Any) -> Tensor:
        logits = super().run(spans)
        self.logits.append(logits)
        return logits


def build_engine(
    model: LoadedModel,
    *,
    blocks: tuple[int, int] = (128, 128),
    max_batched_tokens: int = 256,
    max_running: int = 64,
    backend: AttentionBackend | None = None,
    runner: type[Runner] = RecordingRunner,
    prefix_caching: bool = True,
    engine_options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    repaired_tokens: int = 0,
    **chunk_options: Any,
) -> Engine:
    """An engine with small pools."""
    options = {"block_size": 4, "position_strategy": "shared", "repair": "none", **chunk_options}
    config = ChunkCacheConfig(**options)
    request_blocks, chunk_blocks = blocks
    kv_cache = KVCache(
        model.fingerprint,
        config,
        request_blocks=request_blocks,
        chunk_blocks=chunk_blocks,
        prefix_caching=prefix_caching,
        max_states=request_blocks if model.state_layers else 0,
        repaired_tokens=repaired_tokens,
        clock=clock,
    )
    sizes = {"request": request_blocks, "chunk_cache": chunk_blocks}
    engine_config = EngineConfig(
        max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_running, **(engine_options or {})
    )
    return Engine(runner(model, sizes, config.block_size, backend), kv_cache, config, engine_config, clock=clock)


def set_tier(engine: Engine, tier: Tier, codec: CodecName = "none") -> ChunkOffloader:
    """Gives an unused engine a tier, from which it loads whatever is there."""
    model, runner = engine.runner.model, engine.runner
    shapes = model.map_shapes * (1 + bool(engine.kv_cache.repaired_tokens))
    offloader = ChunkOffloader(
        engine.kv_cache,
        runner.storages["chunk_cache"],
        TieredStore([tier], max_pending_bytes=2**22, loading="always", clock=HandClock()),
        ChunkEntries(model.fingerprint, runner.storages["chunk_cache"], TierConfig(chunk_codec=codec), shapes),
        max_staged_bytes=2**22,
        states=runner if model.map_bytes else None,
        clock=HandClock(),
    )
    offloader._compute.estimate = float
    return set_offloader(engine, offloader)


def evict_all(engine: Engine) -> None:
    """Evicts every document that is not in use."""
    while engine.kv_cache._chunks.evict_one() is not None:
        pass


def set_offloader(engine: Engine, offloader: ChunkOffloader) -> ChunkOffloader:
    """Builds an unused engine anew, in place, with tiers."""
    Engine.__init__(
        engine,
        engine.runner,
        engine.kv_cache,
        engine.chunk_config,
        engine.config,
        offloader=offloader,
        clock=engine.clock,
    )
    return offloader


def fragment(engine: Engine, seed: int = 0) -> None:
    """Scatters what is free in both pools: every third block and a fifth of the others, in random order."""
    chance = random.Random(seed)
    for pool in (engine.kv_cache.request_pool, engine.kv_cache.chunk_pool):
        taken = list(pool.allocate(pool.num_free))
        freed = [block for block in taken if block % 3 == 1 or chance.random() < 0.2]
        chance.shuffle(freed)
        pool.release(freed)


def answer(engine: Engine, prompt: Prompt, params: SamplingParams = GREEDY, **options: Any) -> tuple[Request, Tensor]:
    """Runs one prompt alone: the request, and the logits [steps, V] its tokens were chosen from."""
    runner = engine.runner
    assert isinstance(runner, RecordingRunner)
    runner.logits.clear()
    request = engine.add_request(prompt, params, **options)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    if request.error is not None:
        raise request.error
    return request, torch.cat([logits for logits in runner.logits if len(logits)])


def token_ids(request: Request) -> list[int]:
    """The tokens of the first answer."""
    return list(request.output().outputs[0].token_ids)


def dense_logits(model: LoadedModel, layout: Layout, generated: Sequence[int]) -> Tensor:
    """The twin: one dense forward over prompt and answer, keys re-rotated, no cache; logits [steps, V]."""
    last = layout.last
    ids = (*last.token_ids, *generated[:-1])
    longer = replace(last, segment=replace(last.segment, token_ids=ids))
    layout = replace(layout, spans=(*layout.spans[:-1], longer))
    written = dense(layout)
    count = len(written.token_ids)
    states = DenseStates([layout]) if layout.repair is None else RepairedStates(layout)
    return model.forward(
        torch.from_numpy(written.token_ids).to(model.device),
        torch.from_numpy(written.positions).to(model.device),
        torch.arange(count - len(generated), count, device=model.device),
        DenseAttention(written, model.layers),
        states if model.state_layers else None,
    )
