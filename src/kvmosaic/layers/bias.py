"""Distance bias (ALiBi): an addition to attention scores that depends on the distance of key and query.

    score of a query at q and a key at k  =  q . k * scaling  +  slope_h * (k - q)

Moving a run of keys by d adds slope_h * d to all of its scores. Its output stays the same and its log-sum-exp grows
by slope_h * d: no key or query is rotated (Press et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


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
