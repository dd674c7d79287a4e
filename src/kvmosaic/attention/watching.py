"""Watching: how much rows look at the keys of chunks, written out from the scores and their log-sum-exp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvmosaic.attention.reads import Mask, PoolName, RowGroup
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation, turn


class WatchedCall(Protocol):
    """What watching needs of a layer's call; `kvmosaic.model.AttentionCall` is one."""

    layer_index: int
    query: Tensor
    """[T, H, D], normed and rotated."""
    scaling: float
    softcap: float | None


class WatchedLayer(Protocol):
    """What watching needs of a layer."""

    @property
    def rotation(self) -> Rotation | None:
        """The layer's rotation; None if it has none."""

    @property
    def mask(self) -> Mask:
        """What the layer hides."""


def watch_group(
    group: RowGroup,
    call: WatchedCall,
    lse: Tensor,
    layer: WatchedLayer,
    storages: Mapping[PoolName, BlockStorage],
) -> None:
    """Tells a group's watch what share of attention every key of a chunk gets from its rows, in one layer.

    Args:
        group: rows that see all keys of what they read from chunks.
        call: the layer's.
        lse: [T, H], log-sum-exp of all scores of a row.
        layer: its rotation, and what it hides.
        storages: where keys are read.
    """
    assert group.watch is not None
    rows = slice(group.first_row, group.first_row + group.num_rows)
    for read in group.reads:
        if read.pool != "chunk_cache":
            continue
        query = call.query[rows]
        precision = torch.promote_types(query.dtype, torch.float32)
        rotation = layer.rotation
        if read.distance and rotation is not None:
            distances = torch.full((group.num_rows,), -read.distance, device=query.device)
            query = turn(query, rotation.tables(distances, dtype=precision, device=query.device))
        key, _ = storages[read.pool].run(call.layer_index, read.first_slot, read.num_tokens)
        split = query.to(precision).reshape(group.num_rows, key.shape[1], -1, key.shape[2])
        scores = torch.einsum("rgjd,sgd->rgjs", split, key.to(precision)).flatten(1, 2) * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        shares = torch.exp(scores - lse[rows, :, None])
        if layer.mask.kind != "full":
            lowest = torch.tensor([group.lowest_seen(layer.mask, row) for row in range(group.num_rows)])
            keys = torch.arange(read.position, read.position + read.num_tokens)
            shares = shares * (keys[None, :] >= lowest[:, None]).to(shares)[:, None]
        group.watch.see(call.layer_index, read, shares.mean(1).sum(0))
