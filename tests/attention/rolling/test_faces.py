"""What a rolling cache says about itself, and a cache around one chunk."""

from __future__ import annotations

import pytest
import torch

from kvmosaic import BlockKVCache


def cache_of(sink_size: int, window_size: int, chunk_size: int, *, ordered: bool = True) -> BlockKVCache:
    shape = (sink_size + window_size, 1)
    return BlockKVCache(
        k_shape=shape,
        v_shape=shape,
        seq_dim=0,
        chunk_size=chunk_size,
        window_size=window_size,
        sink_size=sink_size,
        device="cpu",
        ordered=ordered,
    )


def write(cache: BlockKVCache, index: int) -> list[int]:
    """Writes the tokens of chunk `index` under their numbers in the stream; gives what is seen."""
    tokens = torch.arange(index * cache.chunk_size, (index + 1) * cache.chunk_size, dtype=cache.dtype)[:, None]
    cache.before_update(index)
    cache.update(tokens, -tokens)
    assert torch.equal(cache.cached_k(), -cache.cached_v())
    cache.after_update(index)
    return [int(token) for token in cache.cached_k().flatten()]


@pytest.mark.parametrize(
    ("sizes", "ordered", "seen"),
    [
        ((2, 6, 2), True, [[0, 1], [0, 1, 2, 3], [*range(6)], [*range(8)], [0, 1, *range(4, 10)]]),
        ((2, 6, 2), False, [[0, 1], [0, 1, 2, 3], [*range(6)], [*range(8)], [0, 1, 8, 9, 4, 5, 6, 7]]),
        ((3, 4, 5), True, [[*range(5)], [0, 1, 2, 6, 7, 8, 9], [0, 1, 2, 11, 12, 13, 14]]),
        ((1, 2, 4), True, [[0, 2, 3], [0, 6, 7]]),
        ((5, 2, 3), True, [[0, 1, 2], [*range(6)], [*range(5), 7, 8]]),
        ((0, 5, 2), True, [[0, 1], [*range(4)], [1, 2, 3, 4, 5], [3, 4, 5, 6, 7]]),
    ],
)
def test_a_stream_in_pictures(sizes: tuple[int, int, int], ordered: bool, seen: list[list[int]]) -> None:
    cache = cache_of(*sizes, ordered=ordered)
    assert [write(cache, index) for index in range(len(seen))] == seen


@pytest.mark.parametrize("ordered", [True, False])
def test_size_and_right_edge_are_those_of_the_chunk_under_way(ordered: bool) -> None:
    cache = cache_of(2, 6, 3, ordered=ordered)
    told = [(cache.size, cache.write_end, cache.is_steady_state())]
    for index in (0, 1, 1, 2, 2, 3, 4):
        cache.before_update(index)
        told.append((cache.size, cache.write_end, cache.is_steady_state()))
        cache.update(torch.zeros(3, 1), torch.zeros(3, 1))
        cache.after_update(index)
        assert told[-1][:2] == (cache.size, cache.write_end)
    full = [(8, 8, False), (8, 8, True), (8, 8, True), (8, 8, True)]
    ring = [(8, 3, False), (8, 3, True), (8, 6, True), (8, 3, True)]
    assert told == [(0, 0, False), (3, 3, False), (6, 6, False), (6, 6, False), *(full if ordered else ring)]
    cache.reset()
    assert (cache.size, cache.write_end, cache.is_steady_state()) == (0, 0, False)


def test_a_full_cache_without_a_step_under_way_is_steady() -> None:
    cache = cache_of(1, 4, 5)
    write(cache, 0)
    assert cache.is_steady_state()
    cache.before_update(0)
    assert not cache.is_steady_state(), "chunk 0 holds the sinks"
    cache.reset()
    assert not cache.is_steady_state()


def test_defaults_are_those_of_torch_and_the_dimension_is_counted_from_the_left() -> None:
    cache = BlockKVCache((2, 4, 8), (2, 4, 6), -2, 2, 4)
    assert cache.seq_dim == 1
    assert cache.dtype == torch.get_default_dtype()
    assert cache.device == cache.cached_k().device
    assert "k_shape=(2, 4, 8)" in repr(cache)


@pytest.mark.parametrize("seq_dim", [1, -3])
def test_a_chunk_is_wrapped_without_a_copy_and_can_be_overwritten_at_once(seq_dim: int) -> None:
    k, v, *others = torch.randn(6, 2, 5, 3, 4)
    cache = BlockKVCache.from_tensor(k, v, seq_dim)
    assert (cache.size, cache.chunk_size, cache.window_size, cache.sink_size) == (5, 5, 5, 0)
    assert cache.is_steady_state()
    assert cache.cached_k().data_ptr() == k.data_ptr()
    assert cache.cached_v().data_ptr() == v.data_ptr()
    cache.update(others[0], others[1])
    assert torch.equal(cache.cached_k(), others[0])
    assert torch.equal(cache.cached_v(), others[1])


@pytest.mark.parametrize("index", [0, 1])
def test_a_wrapped_chunk_goes_on_in_steps(index: int) -> None:
    k, v, new_k, new_v = torch.randn(4, 2, 5, 3)
    cache = BlockKVCache.from_tensor(k.requires_grad_(), v.transpose(0, 1).contiguous().transpose(0, 1), 1)
    for number in (index, index + 1):
        cache.before_update(number)
        cache.update(new_k, new_v)
        cache.after_update(number)
    assert torch.equal(cache.cached_k(), new_k)
    assert torch.equal(cache.cached_v(), new_v)
    cache.reset()
    assert cache.size == 0
