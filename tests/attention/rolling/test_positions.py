"""Keys keep the rotation of their place in the stream; the query is turned. The twin rotates every key anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic import BlockKVCache, KVPiece, composed_attention
from kvmosaic.attention import sink_distance
from kvmosaic.rope import Rotation, rotate

DIM, HEADS, KV_HEADS = 8, 4, 2
ROTATION = Rotation("half", 0, DIM, 1, tuple(100.0 ** (-2 * i / DIM) for i in range(DIM // 2)), DIM)


def at(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return rotate(x, ROTATION.tables(positions, dtype=x.dtype))


@settings(max_examples=examples(60), deadline=None)
@given(
    sink_size=st.integers(1, 5),
    window_size=st.integers(1, 12),
    chunk_size=st.integers(1, 4),
    num_chunks=st.integers(1, 30),
    first=st.sampled_from([0, 10**5]),
    seed=st.integers(0, 2**31),
)
def test_turned_query_equals_keys_rotated_inside_the_window(
    sink_size: int, window_size: int, chunk_size: int, num_chunks: int, first: int, seed: int
) -> None:
    """`first` stands for a stream that has long been running: only differences of positions count."""
    torch.manual_seed(seed)
    chunk_size = min(chunk_size, window_size)
    num_tokens, total_size = num_chunks * chunk_size, sink_size + window_size
    plain_k, plain_v = torch.randn(2, num_tokens, KV_HEADS, DIM, dtype=torch.float64)
    plain_query = torch.randn(chunk_size, HEADS, DIM, dtype=torch.float64)
    places = first + torch.arange(num_tokens)
    shape = (total_size, KV_HEADS, DIM)
    cache = BlockKVCache(shape, shape, 0, chunk_size, window_size, sink_size, device="cpu", dtype=torch.float64)
    keys = at(plain_k, places)
    for index in range(num_chunks):
        cache.before_update(index)
        new = slice(index * chunk_size, (index + 1) * chunk_size)
        cache.update(keys[new], plain_v[new])
        cache.after_update(index)
    k, v, query = cache.cached_k(), cache.cached_v(), at(plain_query, places[-chunk_size:])
    pieces = [KVPiece(k, v, causal=True)]
    if cache.sink_distance:
        pieces = [
            KVPiece(k[:sink_size], v[:sink_size], cache.sink_distance),
            KVPiece(k[sink_size:], v[sink_size:], causal=True),
        ]
    streamed = composed_attention(query, pieces, rotation=ROTATION)

    kept = [*range(min(sink_size, num_tokens)), *range(sink_size, num_tokens)[-window_size:]]
    inside = torch.arange(len(kept))
    assert inside[-1] == num_tokens - 1 - cache.sink_distance < total_size
    dense = composed_attention(
        at(plain_query, inside[-chunk_size:]), [KVPiece(at(plain_k[kept], inside), plain_v[kept], causal=True)]
    )
    torch.testing.assert_close(streamed, dense, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "distance"), [(0, 0), (1028, 0), (1029, 1), (2000, 972), (10**15, 10**15 - 1028)]
)
def test_sinks_are_moved_by_what_is_gone(num_tokens: int, distance: int) -> None:
    assert sink_distance(num_tokens, 4, 1024) == distance


def test_without_the_distance_the_sinks_are_far_away() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, KV_HEADS, DIM, dtype=torch.float64) for n in (1, 4, 4))
    near = composed_attention(query, [KVPiece(key, value, sink_distance(2000, 4, 1024))], rotation=ROTATION)
    far = composed_attention(query, [KVPiece(key, value)], rotation=ROTATION)
    assert (near - far).abs().max() > 1e-2
