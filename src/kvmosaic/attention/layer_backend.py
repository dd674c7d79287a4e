"""Layer backend: a backend that takes all calls of a layer at once, if the layer suits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from kvmosaic.attention.reads import PoolName, ReadPlan
from kvmosaic.rope import RotationTables

Pools = Mapping[PoolName | None, tuple[Tensor, Tensor]]
"""Keys [slots, G, D] and values [slots, G, Dv] of every pool; None: those of the step's own rows."""


class PlanReader(Protocol):
    """Reads one plan, layer after layer."""

    def attend(
        self,
        query: Tensor,
        pools: Pools,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """All calls of the plan, turned and merged.

        Args:
            query: [T, H, D], rotated at its own positions.
            pools: what the calls name.
            scaling: factor on the scores.
            softcap: scores become softcap * tanh(score / softcap).
            tables: turn the R stacked queries; None: nothing is moved.

        Returns:
            outputs [T, H, Dv] and log-sum-exp [T, H]; None if this layer does not suit the backend.
        """


@runtime_checkable
class LayerBackend(Protocol):
    """What a backend may have besides `AttentionBackend.attend`."""

    def plan_reader(self, plan: ReadPlan) -> PlanReader:
        """A reader for the layers that share this plan, for the length of one step."""
