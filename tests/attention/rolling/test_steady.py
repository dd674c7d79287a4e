"""A full cache: the same addresses in every step, nothing allocated, one graph for all steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from kvmosaic import BlockKVCache
from kvmosaic.attention.rolling.cache import copy_blocks

SIZES = [(0, 8, 4), (3, 14, 4), (3, 5, 8), (2, 5, 7), (4, 9, 1)]
"""Sinks, window, chunk."""


def cache_of(sizes: tuple[int, int, int], *, ordered: bool = True) -> BlockKVCache:
    sink_size, window_size, chunk_size = sizes
    shape = (2, sink_size + window_size, 3, 4)
    return BlockKVCache(shape, shape, 1, chunk_size, window_size, sink_size, device="cpu", ordered=ordered)


def chunks(cache: BlockKVCache, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 2, cache.chunk_size, 3, 4, generator=random)
    return k, v


def step(cache: BlockKVCache, index: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache.before_update(index)
    cache.update(k, v)
    seen = cache.cached_k() * 1, cache.cached_v() * 1
    cache.after_update(index)
    return seen


def fill(*caches: BlockKVCache) -> int:
    """Fills caches of the same sizes alike; gives the number of the next chunk."""
    index = 0
    while not caches[0].is_steady_state():
        for cache in caches:
            step(cache, index, *chunks(cache, index))
        index += 1
    return index


class Calls(TorchDispatchMode):
    """Every operation with its arguments and what it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """What a captured graph does: the same writes to the same places."""
        for func, args, kwargs, _ in self.calls:
            if func._schema.is_mutable:
                func(*args, **kwargs)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_whole_step_is_one_graph_for_all_steps(ordered: bool, fresh_compiler: None) -> None:
    cache, twin = (cache_of((3, 14, 4), ordered=ordered) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    graphs = []
    for index in range(fill(cache, twin), 30):
        k, v = chunks(cache, index)
        torch.testing.assert_close(compiled(cache, index, k, v), step(twin, index, k, v), rtol=0, atol=0)
        graphs.append(counter.frame_count)
    assert graphs[0] == 1
    assert graphs[-1] == graphs[1] <= 2, "once for the first number, once for any number"
    torch.testing.assert_close(compiled(cache, 29, v, k), step(twin, 29, v, k), rtol=0, atol=0)


@pytest.mark.parametrize("ordered", [True, False])
def test_write_and_read_are_one_graph_wherever_the_cache_is_kept(ordered: bool, fresh_compiler: None) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = cache_of((3, 14, 4), ordered=ordered)

        def forward(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.cache.update(k, v)
            return self.cache.cached_k() * 1, self.cache.cached_v() * 1

    layer, twin = Layer(), cache_of((3, 14, 4), ordered=ordered)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for index in range(fill(layer.cache, twin), 20):
        for k, v in (chunks(twin, index), chunks(twin, 100 + index)):
            layer.cache.before_update(index)
            torch.testing.assert_close(compiled(k, v), step(twin, index, k, v), rtol=0, atol=0)
            layer.cache.after_update(index)
    assert counter.frame_count == 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ordered", [True, False])
def test_writes_recorded_in_one_step_are_right_in_all_later_ones(sizes: tuple[int, int, int], ordered: bool) -> None:
    cache, twin = (cache_of(sizes, ordered=ordered) for _ in range(2))
    first = fill(cache, twin)
    static_k, static_v = chunks(cache, 0)
    cache.before_update(first)
    with Calls() as graph:
        cache.update(static_k, static_v)
        seen_k, seen_v = cache.cached_k(), cache.cached_v()
    cache.after_update(first)
    for index in (first, first + 1, first + 1, *range(first + 2, first + 40)):
        k, v = chunks(cache, index)
        static_k.copy_(k)
        static_v.copy_(v)
        cache.before_update(index)
        assert cache.is_steady_state()
        graph.replay()
        cache.after_update(index)
        torch.testing.assert_close((seen_k, seen_v), step(twin, index, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ordered", [True, False])
def test_a_step_allocates_nothing(sizes: tuple[int, int, int], ordered: bool) -> None:
    cache = cache_of(sizes, ordered=ordered)
    given = [chunks(cache, index) for index in range(20)]
    own = {tensor.untyped_storage().data_ptr() for tensor in (cache._k, cache._v, *sum(given, ()))}
    own |= {cache._slots.untyped_storage().data_ptr()} if cache._slots is not None else set()
    with Calls() as made:
        for index, (k, v) in enumerate(given):
            cache.before_update(index)
            cache.update(k, v)
            cache.cached_k(), cache.cached_v()
            cache.after_update(index)
    results = [result for *_, result in made.calls if isinstance(result, torch.Tensor)]
    assert len(results) > 20
    assert {result.untyped_storage().data_ptr() for result in results} == own


@pytest.mark.parametrize("sizes", SIZES)
def test_an_ordered_window_moves_each_token_once_and_a_ring_none(sizes: tuple[int, int, int]) -> None:
    for ordered in (True, False):
        cache = cache_of(sizes, ordered=ordered)
        index = fill(cache)
        with Calls() as made:
            step(cache, index, *chunks(cache, index))
        moves = [args for func, args, _, _ in made.calls if func is torch.ops.kvmosaic.shift_left.default]
        num_kept = max(0, cache.window_size - cache.chunk_size)
        expected = [num_kept] * 2 if ordered and num_kept else []
        assert [stop - start - by for _, _, start, stop, by in moves] == expected
        written = [
            args[0] for func, args, _, _ in made.calls if func._schema.name in ("aten::copy_", "aten::index_copy_")
        ]
        assert len(written) == 2, "the new tokens, and nothing a second time"


def test_blocks_that_move_are_copied_once_without_other_memory() -> None:
    storage = torch.arange(40.0).reshape(2, 20)
    with Calls() as made:
        copy_blocks(storage, 1, 3, 19, 5)
    assert storage[0].tolist() == [*range(3), *range(8, 19), *range(14, 20)]
    copied = [args[0].numel() for func, args, _, _ in made.calls if func._schema.name == "aten::copy_"]
    assert copied == [10, 10, 2]
    results = {result.untyped_storage().data_ptr() for *_, result in made.calls}
    assert results == {storage.untyped_storage().data_ptr()}


def test_a_chunk_with_a_gradient_leaves_none_in_the_cache() -> None:
    for ordered in (True, False):
        cache = cache_of((2, 6, 3), ordered=ordered)
        for index in range(6):
            k, v = chunks(cache, index)
            step(cache, index, k.requires_grad_() * 2, v.requires_grad_())
        assert not cache.cached_k().requires_grad
        assert not cache.cached_v().requires_grad


@pytest.mark.parametrize("ordered", [True, False])
def test_a_gradient_that_needs_keys_which_have_left_is_refused(ordered: bool) -> None:
    cache = cache_of((2, 6, 3), ordered=ordered)
    index = fill(cache)
    query = torch.ones(2, 8, 3, 4, requires_grad=True)
    score = (query * cache.cached_k()).sum()
    cache.before_update(index)
    if ordered:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            score.backward()
    else:
        score.backward()


def test_a_cache_made_in_inference_mode_can_be_used_outside_and_inside() -> None:
    with torch.inference_mode():
        cache = cache_of((2, 6, 3))
        step(cache, 0, *chunks(cache, 0))
    for index in range(1, 5):
        step(cache, index, *chunks(cache, index))
    with torch.inference_mode():
        seen, _ = step(cache, 5, *chunks(cache, 5))
    assert torch.equal(seen[:, -3:], chunks(cache, 5)[0])
