"""The rolling cache against its obvious twin, which keeps everything, joins it and cuts."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic import BlockKVCache

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]


class Everything:
    """The twin: each chunk in its last version, joined; of that the first and the last tokens."""

    def __init__(self, sink_size: int, window_size: int, dim: int) -> None:
        self.sink_size, self.window_size, self.dim = sink_size, window_size, dim
        self.chunks: list[torch.Tensor] = []

    def write(self, index: int, chunk: torch.Tensor) -> None:
        self.chunks[index:] = [chunk.clone()]

    def seen(self) -> torch.Tensor:
        joined = torch.cat([chunk.view(torch.uint8) if chunk.element_size() == 1 else chunk for chunk in self.chunks])
        first, rest = joined[: self.sink_size], joined[self.sink_size :]
        kept = torch.cat([first, rest[-self.window_size :]]).movedim(0, self.dim)
        return kept.view(self.chunks[0].dtype)


class Twins:
    """Keys and values of a cache beside two lists of everything. Every token is a number of its own."""

    def __init__(self, cache: BlockKVCache) -> None:
        self.cache = cache
        self.k, self.v = (Everything(cache.sink_size, cache.window_size, cache.seq_dim) for _ in range(2))
        self.random = torch.Generator().manual_seed(0)

    def chunk(self, shape: tuple[int, ...]) -> torch.Tensor:
        shape = (*shape[: self.cache.seq_dim], self.cache.chunk_size, *shape[self.cache.seq_dim + 1 :])
        return torch.randint(-50, 50, shape, generator=self.random).to(self.cache.dtype)

    def write(self, index: int) -> None:
        k, v = self.chunk(self.cache.k_shape), self.chunk(self.cache.v_shape)
        self.k.write(index, k.movedim(self.cache.seq_dim, 0))
        self.v.write(index, v.movedim(self.cache.seq_dim, 0))
        self.cache.update(k, v)

    def forget(self) -> None:
        self.k.chunks.clear()
        self.v.chunks.clear()

    def check(self) -> None:
        for twin, seen in ((self.k, self.cache.cached_k()), (self.v, self.cache.cached_v())):
            expected = twin.seen()
            assert seen.shape == expected.shape
            assert self.cache.size == seen.shape[self.cache.seq_dim]
            assert torch.equal(bits(in_order(self.cache, seen)), bits(expected))


def pointers_of(cache: BlockKVCache) -> list[int]:
    return [seen.untyped_storage().data_ptr() for seen in (cache.cached_k(), cache.cached_v())]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def in_order(cache: BlockKVCache, seen: torch.Tensor) -> torch.Tensor:
    """What an unordered cache shows, oldest to newest."""
    if cache.ordered or cache.size < cache.sink_size + cache.window_size:
        return seen
    sinks, window = seen.split([cache.sink_size, cache.window_size], cache.seq_dim)
    return torch.cat([sinks, window.roll(cache.sink_size - cache.write_end, cache.seq_dim)], cache.seq_dim)


@st.composite
def caches(draw: st.DrawFn, ordered: bool | None = None) -> BlockKVCache:
    sink_size, window_size = draw(st.integers(0, 6)), draw(st.integers(1, 9))
    chunk_size = draw(st.integers(1, 12))
    rank = draw(st.integers(1, 5))
    dim = draw(st.integers(0, rank - 1))
    shape = draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    shape[dim] = sink_size + window_size
    values = list(shape)
    if dim != rank - 1:
        values[-1] = draw(st.integers(1, 4))
    return BlockKVCache(
        k_shape=tuple(shape),
        v_shape=tuple(values),
        seq_dim=dim - rank if draw(st.booleans()) else dim,
        chunk_size=chunk_size,
        window_size=window_size,
        sink_size=sink_size,
        device="cpu",
        dtype=draw(st.sampled_from(DTYPES)),
        ordered=draw(st.booleans()) if ordered is None else ordered,
    )


@settings(max_examples=examples(300), deadline=None)
@given(
    caches(),
    st.lists(st.sampled_from(["next", "next", "next", "again", "twice", "reset", "reset inside"]), max_size=25),
)
def test_cache_holds_what_its_twin_holds_after_any_steps(cache: BlockKVCache, steps: list[str]) -> None:
    twins, newest = Twins(cache), -1
    pointers = pointers_of(cache)
    for step in steps:
        if step == "reset":
            cache.reset()
            twins.forget()
            newest = -1
            assert cache.size == cache.write_end == 0
            continue
        index = newest if step == "again" and newest >= 0 else newest + 1
        cache.before_update(index)
        if step == "reset inside":
            twins.write(index)
            cache.reset()
            twins.forget()
            newest = -1
            continue
        if step == "twice":
            twins.write(index)
        twins.write(index)
        twins.check()
        cache.after_update(index)
        twins.check()
        newest = index
    assert pointers_of(cache) == pointers
    assert cache.size == min((newest + 1) * cache.chunk_size, cache.sink_size + cache.window_size)
