"""A stream without end in memory of fixed size: sinks, a rolling window, and positions that never leave it."""

import torch

from kvmosaic import BlockKVCache, Piece, composed_attention
from kvmosaic.rope import Rotation, rotate

HEADS, HEAD_DIM, CHUNK, SINKS, WINDOW = 2, 16, 8, 4, 64
frequencies = tuple(10_000.0 ** (-index / HEAD_DIM) for index in range(0, HEAD_DIM, 2))
rotation = Rotation("half", offset=0, rotary_dim=HEAD_DIM, sign=1, inv_freq=frequencies, head_dim=HEAD_DIM)
shape = (SINKS + WINDOW, HEADS, HEAD_DIM)
cache = BlockKVCache(
    k_shape=shape, v_shape=shape, seq_dim=0, chunk_size=CHUNK, window_size=WINDOW, sink_size=SINKS, device="cpu"
)

torch.manual_seed(0)
for index in range(1000):
    # queries, keys and values of one attention layer for the next tokens, rotated at their position in the stream
    positions = torch.arange(index * CHUNK, (index + 1) * CHUNK)
    query, key, value = torch.randn(3, CHUNK, HEADS, HEAD_DIM)
    tables = rotation.tables(positions)
    cache.before_update(index)
    cache.update(rotate(key, tables), value)
    seen = [Piece(cache.cached_k(), cache.cached_v(), causal=True)]
    if cache.sink_distance:  # the sinks are moved right before the window: the query is rotated, no key is
        keys, values = cache.cached_k(), cache.cached_v()
        seen = [
            Piece(keys[:SINKS], values[:SINKS], cache.sink_distance),
            Piece(keys[SINKS:], values[SINKS:], causal=True),
        ]
    output = composed_attention(rotate(query, tables), seen, rotation=rotation)
    cache.after_update(index)
    if index in (0, 7, 8, 9, 999):
        last = int(positions[-1])
        print(f"token {last:4}: {cache.size} tokens seen, the newest as if at position {last - cache.sink_distance}")
