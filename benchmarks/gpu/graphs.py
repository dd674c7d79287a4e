"""`BlockKVCache` captured in a CUDA graph, and compiled, against the same steps of an eager twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.stage import Stage
from kvmosaic import BlockKVCache


@dataclass(frozen=True, slots=True)
class Stream:
    """Shape of keys with `tokens` in one dimension, and the sizes of the cache."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    sink: int
    window: int
    chunk: int

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of so many tokens."""
        return (*self.before, tokens, *self.after)

    def cache(self, stage: Stage, *, ordered: bool) -> BlockKVCache:
        """An empty cache."""
        shape = self.shape(self.sink + self.window)
        sizes = (len(self.before), self.chunk, self.window, self.sink)
        return BlockKVCache(shape, shape, *sizes, device=stage.device, dtype=torch.bfloat16, ordered=ordered)


STREAMS = (
    Stream("speech [B, H, T, D]", (1, 8), (64,), 4, 3_000, 50),
    Stream("video [B, T, H, D]", (1,), (24, 128), 1_536, 16_384, 1_536),
    Stream("one row [T, D]", (), (128,), 4, 1_024, 8),
    Stream("layers [L, B, H, T, D]", (4, 2, 8), (64,), 16, 2_048, 64),
)
SMALL = (Stream("[B, H, T, D]", (1, 2), (8,), 2, 12, 4), Stream("[T, D]", (), (8,), 0, 9, 2))


def seen(cache: BlockKVCache) -> Tensor:
    """A figure that depends on every byte that is visible."""
    return torch.stack([part.float().square().sum() for part in (cache.cached_k(), cache.cached_v())])


def measure(stage: Stage) -> None:
    """Captured steps, then compiled ones."""
    for stream in SMALL if stage.is_dry else STREAMS:
        for ordered in (True, False):
            name = "in order" if ordered else "ring"
            with stage.part("captured", stream=stream.name, window=name) as row:
                row |= captured(stage, stream, ordered=ordered)
            with stage.part("compiled", stream=stream.name, window=name) as row:
                row |= compiled(stage, stream, ordered=ordered)


def filled(stage: Stage, stream: Stream, *, ordered: bool) -> tuple[BlockKVCache, BlockKVCache, int]:
    """A cache and its twin, both full, and the number of the next chunk."""
    caches = stream.cache(stage, ordered=ordered), stream.cache(stage, ordered=ordered)
    number = 0
    while not caches[0].is_steady_state():
        chunk = chunk_of(stage, stream, number)
        for cache in caches:
            step(cache, number, partial(cache.update, *chunk))
        number += 1
    return *caches, number


def chunk_of(stage: Stage, stream: Stream, number: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a chunk."""
    torch.manual_seed(number)
    k, v = torch.randn(2, *stream.shape(stream.chunk), device=stage.device).to(torch.bfloat16)
    return k, v


def step(cache: BlockKVCache, number: int, update: Callable[[], object]) -> None:
    """One step of a cache."""
    cache.before_update(number)
    update()
    cache.after_update(number)


def captured(stage: Stage, stream: Stream, *, ordered: bool) -> dict[str, float | int]:
    """Replays a captured step many times, and compares all memory after each with the twin's."""
    cache, twin, number = filled(stage, stream, ordered=ordered)
    k, v = (part.clone() for part in chunk_of(stage, stream, number))

    def work() -> Tensor:
        cache.update(k, v)
        return seen(cache)

    cache.before_update(number)
    found = work()
    if stage.device.type == "cuda":
        stream_aside = torch.cuda.Stream()
        stream_aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream_aside):
            work()
        torch.cuda.current_stream().wait_stream(stream_aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = work()
        replay = graph.replay
    else:

        def replay() -> None:
            found.copy_(work())

    cache.after_update(number)
    step(twin, number, partial(twin.update, k, v))
    num_steps = 5 if stage.is_dry else 40
    for following in range(number + 1, number + 1 + num_steps):
        new = chunk_of(stage, stream, following)
        k.copy_(new[0])
        v.copy_(new[1])
        step(cache, following, replay)
        step(twin, following, partial(twin.update, *new))
        for mine, theirs in ((cache.cached_k(), twin.cached_k()), (cache.cached_v(), twin.cached_v())):
            if not torch.equal(mine, theirs):
                raise AssertionError(f"step {following - number} of {num_steps} differs from the eager twin")
        torch.testing.assert_close(found, seen(twin), rtol=1e-5, atol=0)
    cache.before_update(cache._newest + 1)
    times = {"eager_seconds": stage.seconds(work, calls=10), "replay_seconds": stage.seconds(replay, calls=10)}
    return {"steps": num_steps, **times}


def compiled(stage: Stage, stream: Stream, *, ordered: bool) -> dict[str, float | int]:
    """One graph for all steps of a full cache; says why torch used no CUDA graph, if it did not."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    cache, twin, number = filled(stage, stream, ordered=ordered)

    def work(k: Tensor, v: Tensor) -> Tensor:
        cache.update(k, v)
        return seen(cache)

    options = {"backend": "eager"} if stage.is_dry else {"mode": "reduce-overhead"}
    fast = torch.compile(work, fullgraph=True, **options)
    num_steps = 3 if stage.is_dry else 12
    for following in range(number, number + num_steps):
        chunk = chunk_of(stage, stream, following)
        cache.before_update(following)
        found = fast(*chunk).clone()
        cache.after_update(following)
        step(twin, following, partial(twin.update, *chunk))
        torch.testing.assert_close(found, seen(twin), rtol=1e-5, atol=0)
    cache.before_update(cache._newest + 1)
    chunk = chunk_of(stage, stream, number)
    return {
        "graphs": int(counters["stats"]["unique_graphs"]),
        "cudagraph_skips": int(counters["inductor"]["cudagraph_skips"]),
        "eager_seconds": stage.seconds(lambda: work(*chunk), calls=10),
        "compiled_seconds": stage.seconds(lambda: fast(*chunk), calls=10),
    }
