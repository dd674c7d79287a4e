"""Attention observation: the shares of attention on the keys of chunks, from the scores and their log-sum-exp."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from kvmosaic.attention.reads import Piece, PoolName, RowGroup
from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import rotate

_MAX_SCORES = 1 << 24
"""Max scores written out at once, which bounds the memory of a long question over a long chunk."""


def watch_group(
    group: RowGroup,
    call: AttentionCall,
    lse: Float[Tensor, "T H"],
    layer: LayerSpec,
    storages: Mapping[PoolName, BlockStorage],
) -> None:
    """Reports to a group's observer the share of attention on every key of a chunk, in one layer.

    Args:
        group: rows that see all keys of their reads from chunks.
        call: the layer's call.
        lse: [T, H], log-sum-exp of all scores of a row, without sinks.
        layer: its rotation and mask.
        storages: storage of the keys.
    """
    watch = group.rules.watch
    assert watch is not None
    lse = lse[group.first_row : group.first_row + group.num_rows]
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse))
    for index, read in enumerate(group.reads):
        if read.pool != "chunk_cache":
            continue
        key, _ = storages[read.pool].run(call.layer_index, read.first_slot, read.num_tokens)
        max_rows = max(1, _MAX_SCORES // (call.query.shape[1] * read.num_tokens))
        parts = [
            _shares(group, read, range(first, min(first + max_rows, group.num_rows)), call, lse, layer, key)
            for first in range(0, group.num_rows, max_rows)
        ]
        watch.observe(call.layer_index, index, torch.stack(parts).sum(0))


def _shares(
    group: RowGroup, read: Piece, rows: range, call: AttentionCall, lse: Tensor, layer: LayerSpec, key: Tensor
) -> Tensor:
    """[S], the attention of some rows of a group on the keys of a read."""
    query = call.query[group.first_row + rows.start : group.first_row + rows.stop]
    precision = torch.promote_types(query.dtype, torch.float32)
    if read.distance and layer.rotation is not None:
        distances = torch.full((len(rows),), -read.distance, device=query.device)
        query = rotate(query, layer.rotation.tables(distances, dtype=precision, device=query.device))
    split = query.to(precision).reshape(len(rows), key.shape[1], -1, key.shape[2])
    scores = torch.einsum("rgjd,sgd->rgjs", split, key.to(precision)).flatten(1, 2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    shares = torch.exp(scores - lse[rows.start : rows.stop, :, None])
    if layer.mask.kind != "full":
        lowest = torch.tensor([group.lowest_seen(layer.mask, row) for row in rows])
        keys = torch.arange(read.position, read.position + read.num_tokens)
        shown = (keys[None, :] >= lowest[:, None]).to(shares.device)
        shares = shares.masked_fill(~shown[:, None], 0.0)
    return shares.mean(1).sum(0)
