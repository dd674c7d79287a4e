"""Watching: how much rows look at the keys of chunks, written out from the scores and their log-sum-exp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from kvmosaic.attention.reads import Mask, PoolName, RowGroup, RunRead
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation, rotate

_MOST_SCORES = 1 << 24
"""Written out at once, so that a long question over a long chunk does not take memory without bound."""


class WatchedCall(Protocol):
    """What watching needs of a layer's call; `kvmosaic.model.AttentionCall` is one."""

    layer_index: int
    query: Tensor
    """[T, H, D], normed and rotated."""
    scaling: float
    softcap: float | None
    sinks: Tensor | None


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
        lse: [T, H], log-sum-exp of all scores of a row, without sinks.
        layer: its rotation, and what it hides.
        storages: where keys are read.
    """
    assert group.watch is not None
    lse = lse[group.first_row : group.first_row + group.num_rows]
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse))
    for index, read in enumerate(group.reads):
        if read.pool != "chunk_cache":
            continue
        key, _ = storages[read.pool].run(call.layer_index, read.first_slot, read.num_tokens)
        most_rows = max(1, _MOST_SCORES // (call.query.shape[1] * read.num_tokens))
        parts = [
            _shares(group, read, range(first, min(first + most_rows, group.num_rows)), call, lse, layer, key)
            for first in range(0, group.num_rows, most_rows)
        ]
        group.watch.observe(call.layer_index, index, torch.stack(parts).sum(0))


def _shares(
    group: RowGroup, read: RunRead, rows: range, call: WatchedCall, lse: Tensor, layer: WatchedLayer, key: Tensor
) -> Tensor:
    """[S], what some rows of a group give to the keys of a read."""
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
