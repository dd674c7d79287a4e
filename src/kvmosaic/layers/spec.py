"""Layer specifications: what the engine must know about each attention layer of a model, and of one call of it.

    score of a query at q and a key at k  =  q . k * scaling  +  slope_h * (k - q)

Moving a run of keys by d adds slope_h * d to all of its scores. Its output stays the same and its log-sum-exp grows
by slope_h * d: no key or query is rotated (Press et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvmosaic.layers.geometry import LayerShape
from kvmosaic.rope import Rotation


@dataclass(frozen=True)
class DistanceBias:
    """The slopes of a layer's heads.

    Some models round slope * position to fewer bits before it is added. Then the bias between two tokens depends on
    their positions, and with it their activations: keys of such a layer cannot be moved.

    Equal biases compare and hash equal, so layers with equal biases share what is computed from them.
    """

    slopes: tuple[float, ...]
    """[H] added per position, in float64; positive: far keys count less."""
    rounding: torch.dtype | None = None
    """Dtype that positions and slope * position are rounded to, if it is not the dtype of the model."""
    factor: float = 1.0
    """Factor on the rounded number; slopes are without it."""

    def of_run(
        self,
        num_keys: int,
        key_positions: Int[Tensor, " R"],
        positions: Int[Tensor, " R"],
        dtype: torch.dtype,
    ) -> tuple[Float[Tensor, "H S"], Float[Tensor, "R H"]]:
        """The bias of R queries over one run of S keys, as a sum of two parts.

        Args:
            num_keys: S.
            key_positions: [R], position of the first key for each query.
            positions: [R], positions of the queries.
            dtype: dtype of the result.

        Returns:
            [H, S], from key to key: 0 for the last one, the same for all queries; and [R, H], of the last key.
        """
        steps = torch.arange(1 - num_keys, 1, device=positions.device)
        last = key_positions + (num_keys - 1)
        if self.rounding is None:
            slopes = torch.tensor(self.slopes, dtype=torch.float64, device=positions.device) * self.factor
            return (slopes[:, None] * steps).to(dtype), ((last - positions)[:, None] * slopes).to(dtype)
        within = self._rounded(last[0] + steps)
        return (within - within[-1:]).T.to(dtype), (self._rounded(last) - self._rounded(positions)).to(dtype)

    def between(
        self, positions: Int[Tensor, " T"], key_positions: Int[Tensor, "T S"], dtype: torch.dtype
    ) -> Float[Tensor, "H T S"]:
        """The bias written out: [H, T, S] of queries at `positions` [T] and keys at `key_positions` [T, S]."""
        if self.rounding is None:
            slopes = torch.tensor(self.slopes, dtype=torch.float64, device=positions.device) * self.factor
            return (slopes[:, None, None] * (key_positions - positions[:, None])).to(dtype)
        bias = self._rounded(key_positions) - self._rounded(positions)[:, None]
        return bias.permute(2, 0, 1).to(dtype)

    def _rounded(self, positions: Tensor) -> Tensor:
        """[..., H], the model's bias for a key at each position."""
        assert self.rounding is not None
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=positions.device)
        product = positions.to(self.rounding).to(torch.float64)[..., None] * slopes
        return product.to(self.rounding).to(torch.float64) * self.factor


LATENT_ATTRIBUTE = "kvmosaic_latent"
"""Attribute of a latent attention module with its projection (see `kvmosaic.model.latent`)."""


@dataclass(slots=True)
class AttentionCall:
    """One layer's attention over the T tokens of a flattened forward.

    query: [T, H, D], normed and rotated
    key: [T, G, D]
    value: [T, G, Dv]; in latent layers the first Dv numbers of the one key head (the same memory)
    sinks: [H], scores of a key that has no value, or None
    mask: while a model is probed, a predicate (batch, head, query index, key index) -> bool; otherwise None
    window: the model's sliding window, if it passes it as an argument
    unknown: while a model is probed, names of tensors that the model passes and this function does not know
    num_chosen: if not 0, an indexer's call: for each query so many keys are chosen, `value` is [T, 1, H], a weight for
        each of its queries, and the receiver returns the choice
    chosen: what the receiver has returned to the indexer of this layer; None: all keys are read
    """

    layer_index: int
    query: Float[Tensor, "T H D"]
    key: Float[Tensor, "T G D"]
    value: Float[Tensor, "T G Dv"]
    scaling: float
    softcap: float | None
    sinks: Float[Tensor, " H"] | None
    module: nn.Module
    mask: Any = None
    window: int | None = None
    unknown: tuple[str, ...] = ()
    num_chosen: int = 0
    chosen: Any = None

    @property
    def rows(self) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T G D"], Float[Tensor, "T G Dv"]]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def latent(self) -> Any:
        """The projection of a latent attention layer (see `latent`), or None."""
        return self.module.__dict__.get(LATENT_ATTRIBUTE)


@dataclass(frozen=True, slots=True)
class LayerSpec(LayerShape):
    """One attention call per forward: its heads, its rotation, its mask and the source of its keys."""

    rotation: Rotation | None = None
    """None: no positions (NoPE), or positions that cannot be moved."""
    is_movable: bool = True
    """Whether keys may be read at another position than the one they were computed at."""
    immovable_reason: str = ""
    bias: DistanceBias | None = None
    """Bias added to scores by distance (ALiBi)."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that this layer keeps per token; 0 when it reads another layer's keys."""
        return self.kept_per_token * dtype.itemsize
