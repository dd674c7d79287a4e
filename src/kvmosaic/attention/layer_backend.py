"""Layer backend: a backend that runs all calls of a layer at once, if it supports the layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kvmosaic.attention.reads import PoolName, ReadPlan
from kvmosaic.rope import RotationTables

Pools = Mapping[PoolName | None, tuple[Float[Tensor, "_ G D"], Float[Tensor, "_ G Dv"]]]
"""Keys [slots, G, D] and values [slots, G, Dv] of every pool; None: those of the step's own rows."""


@runtime_checkable
class PlanReader(Protocol):
    """Reads one plan, layer after layer."""

    def attend(
        self,
        query: Float[Tensor, "T H D"],
        pools: Pools,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]] | None:
        """All calls of the plan, with rotated queries, merged.

        Args:
            query: [T, H, D], rotated at its own positions.
            pools: the pools that the calls name.
            scaling: factor on the scores.
            softcap: scores become softcap * tanh(score / softcap).
            tables: rotate the R stacked queries; None: nothing is moved.

        Returns:
            outputs [T, H, Dv] and log-sum-exp [T, H]; None if the backend does not support this layer.
        """


@runtime_checkable
class LayerBackend(Protocol):
    """Optional capability of an `AttentionBackend`."""

    def plan_reader(self, plan: ReadPlan) -> PlanReader:
        """Creates a reader for the layers that share this plan, for one step."""
