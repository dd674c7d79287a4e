"""Dense attention: the slow reference of step attention, one plain matrix per head over a whole prompt.

It rotates the *keys* by every distance, writes the mask out, and has no blocks, pieces or merging, so that it
shares no code with the fast path it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.layout import DenseLayout
from kvmosaic.rope import rotate


class DenseAttention:
    """A receiver for one forward over all T tokens of a dense layout, at the layout's `positions`."""

    def __init__(self, dense_layout: DenseLayout, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        self._positions = torch.from_numpy(dense_layout.positions)
        self._mask = torch.from_numpy(dense_layout.mask)
        self._distances = torch.from_numpy(dense_layout.distances)
        self._moves = sorted({int(distance) for distance in dense_layout.distances.flat} - {0})

    def __call__(self, call: AttentionCall) -> Float[Tensor, "T H Dv"]:
        """Attention of one layer: queries [T, H, D] to outputs [T, H, Dv]; for an indexer, [T, T] bool, its choice.

        Raises:
            NotMovable: the layout moves keys of a layer that does not allow it.
        """
        if call.num_chosen:
            return self.choose(self.index_scores(call, call.query, call.key, call.value), call.num_chosen)
        return self.attend(call, call.query, call.key, call.value).to(call.query.dtype)

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "R H D"],
        key: Float[Tensor, "T G D"],
        value: Float[Tensor, "T G Dv"],
        rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "R H Dv"]:
        """Attention of some of the tokens.

        Args:
            call: the layer's constants; `chosen` is [R, T] bool.
            query: [R, H, D].
            key: [T, G, D], of all tokens.
            value: [T, G, Dv].
            rows: [R], numbers of the tokens whose queries are given; None: all T.

        Returns:
            [R, H, Dv], in float32 or wider.
        """
        layer = self._layers[call.layer_index]
        chosen = slice(None) if rows is None else torch.tensor(rows)
        distances, positions = self._distances[chosen], self._positions[chosen]
        precision = torch.promote_types(query.dtype, torch.float32)
        groups = query.shape[1] // key.shape[1]
        query = query.to(precision)
        key, value = (part.to(precision).repeat_interleave(groups, dim=1) for part in (key, value))
        scores = self._scores(layer, query, key, distances) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        key_positions = self._positions[None, :] + distances
        if layer.bias is not None:
            scores = scores + layer.bias.between(positions, key_positions, precision).to(scores.device)
        visible = self._mask[chosen] & _shown(layer.mask, positions[:, None], key_positions)
        if call.chosen is not None:
            visible = visible & call.chosen.to(visible.device)
        scores = scores.masked_fill(~visible.to(scores.device), -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(precision)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, value)

    def index_scores(
        self,
        call: AttentionCall,
        query: Float[Tensor, "R H D"],
        key: Float[Tensor, "T 1 D"],
        weights: Float[Tensor, "R 1 H"],
        rows: Sequence[int] | None = None,
    ) -> Float[Tensor, "R T"]:
        """Scores of an indexer for all or some rows (see `attend`); -inf where a key is not seen."""
        layer, chosen = self._layers[call.layer_index], slice(None) if rows is None else torch.tensor(rows)
        precision = torch.promote_types(query.dtype, torch.float32)
        query, key, weights = (part.to(precision) for part in (query, key, weights))
        scores = self._scores(layer, query, key.expand(-1, query.shape[1], -1), self._distances[chosen]).clamp_min(0)
        summed = (scores * weights[:, 0].T[:, :, None]).sum(0)
        return summed.masked_fill(~self._mask[chosen].to(summed.device), -torch.inf)

    @staticmethod
    def choose(scores: Float[Tensor, "R T"], count: int) -> Bool[Tensor, "R T"]:
        """The best keys of each row; of equal ones the first."""
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True) & (scores > -torch.inf)

    def _scores(self, layer: LayerSpec, query: Tensor, key: Tensor, distances: Tensor) -> Tensor:
        """[H, R, T]: every query against every key, the key moved by the layout's distance for this query."""
        scores = torch.einsum("qhd,khd->hqk", query, key)
        distances = distances.to(query.device)
        for distance in self._moves:
            if layer.rotation is None and layer.is_movable:
                break
            if layer.rotation is None:
                raise NotMovable(
                    f"keys are moved by {distance}, but {layer.immovable_reason}; use 'shared' or 'absolute'"
                )
            tables = layer.rotation.tables(torch.tensor([distance]), dtype=query.dtype, device=query.device)
            moved = torch.einsum("qhd,khd->hqk", query, rotate(key, tables))
            scores = torch.where(distances == distance, moved, scores)
        return scores


def _shown(mask: MaskSpec, query: Tensor, key: Tensor) -> Tensor:
    """The keys visible through a layer's own mask, at the positions where the reader sees them."""
    if mask.kind == "window":
        return query - key < mask.size
    if mask.kind == "chunked":
        return query.div(mask.size, rounding_mode="floor") == key.div(mask.size, rounding_mode="floor")
    return torch.ones((), dtype=torch.bool)
