"""One layer's attention call in a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

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

    @property
    def rows(self) -> tuple[Float[Tensor, "T H D"], Float[Tensor, "T G D"], Float[Tensor, "T G Dv"]]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def latent(self) -> Any:
        """The projection of a latent attention layer (see `latent`), or None."""
        return self.module.__dict__.get(LATENT_ATTRIBUTE)
