"""Dense attention: the obvious twin of step attention, one plain matrix per head over a whole prompt.

It turns the *keys* by every distance, writes the mask out, and knows nothing of blocks, pieces or merging, so that it
shares no step with the fast path it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvmosaic.attention.bias import DistanceBias
from kvmosaic.attention.reads import Mask
from kvmosaic.attention.step import LayerCall
from kvmosaic.errors import NotMovable
from kvmosaic.layout import DenseLayout
from kvmosaic.rope import Rotation, turn


class DenseLayer(Protocol):
    """What dense attention needs to know of a layer; `kvmosaic.model.LayerSpec` is one."""

    @property
    def rotation(self) -> Rotation | None:
        """The layer's rotation; None when its keys do not depend on positions."""

    @property
    def mask(self) -> Mask:
        """What the layer hides."""

    @property
    def bias(self) -> DistanceBias | None:
        """What the layer adds for distance, if it does."""

    @property
    def is_movable(self) -> bool:
        """Whether keys may be used at another position."""

    @property
    def immovable_reason(self) -> str:
        """Why not."""


class DenseAttention:
    """A receiver for one forward over all T tokens of a dense layout, at the layout's `positions`."""

    def __init__(self, dense_layout: DenseLayout, layers: Sequence[DenseLayer]) -> None:
        self._layers = layers
        self._positions = torch.from_numpy(dense_layout.positions)
        self._mask = torch.from_numpy(dense_layout.mask)
        self._distances = torch.from_numpy(dense_layout.distances)
        self._factors = torch.from_numpy(dense_layout.factors)
        self._biases = torch.from_numpy(dense_layout.biases)
        self._moves = sorted({int(distance) for distance in dense_layout.distances.flat} - {0})

    def __call__(self, call: LayerCall) -> Tensor:
        """Attention of one layer: queries [T, H, D] to outputs [T, H, Dv].

        Raises:
            NotMovable: the layout moves keys of a layer that does not allow it.
        """
        layer = self._layers[call.layer_index]
        precision = torch.promote_types(call.query.dtype, torch.float32)
        groups = call.query.shape[1] // call.key.shape[1]
        query = call.query.to(precision)
        key, value = (part.to(precision).repeat_interleave(groups, dim=1) for part in (call.key, call.value))
        scores = self._scores(layer, query, key) * call.scaling * self._factors.to(query)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores + self._biases.to(query)
        if layer.bias is not None:
            key_positions = self._positions[None, :] + self._distances
            scores = scores + layer.bias.between(self._positions, key_positions, precision).to(scores.device)
        scores = scores.masked_fill(~self._visible(layer.mask).to(scores.device), -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(precision)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, value).to(call.query.dtype)

    def _scores(self, layer: DenseLayer, query: Tensor, key: Tensor) -> Tensor:
        """[H, T, T]: every query against every key, the key moved as far as the layout says for this query."""
        scores = torch.einsum("qhd,khd->hqk", query, key)
        distances = self._distances.to(query.device)
        for distance in self._moves:
            if layer.rotation is None and layer.is_movable:
                break
            if layer.rotation is None:
                raise NotMovable(
                    f"keys are moved by {distance}, but {layer.immovable_reason}; use 'shared' or 'absolute'"
                )
            tables = layer.rotation.tables(torch.tensor([distance]), dtype=query.dtype, device=query.device)
            moved = torch.einsum("qhd,khd->hqk", query, turn(key, tables))
            scores = torch.where(distances == distance, moved, scores)
        return scores

    def _visible(self, mask: Mask) -> Tensor:
        """[T, T]: what the layout and the layer's own mask show, keys standing where the reader sees them."""
        if mask.kind == "full":
            return self._mask
        query = self._positions[:, None]
        key = self._positions[None, :] + self._distances
        if mask.kind == "window":
            return self._mask & (query - key < mask.size)
        return self._mask & (query.div(mask.size, rounding_mode="floor") == key.div(mask.size, rounding_mode="floor"))
