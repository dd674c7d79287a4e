"""Variants: ways to answer from cached documents, by position strategy, chunk context and repair policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from kvmosaic.errors import InvalidConfig
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import strategy_names
from kvmosaic.repair import FullRepair, repair_policy

CONTEXTS: tuple[ChunkContext, ...] = get_args(ChunkContext)
MAX_POLICIES = 100


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant."""

    strategy: str = "sequential"
    context: ChunkContext = "system"
    repair: str = "none"
    """The text of a policy, such as "query(0.15)"."""
    adapter: str = ""
    """Name of the adapter that computes it; empty: the base model."""
    is_turned: bool = False
    """Whether the first document comes last: what a divergence is worth that another order has, too."""

    @property
    def is_full(self) -> bool:
        """Whether it is full attention, the reference of all others."""
        return self == FULL

    @property
    def label(self) -> str:
        """Its policy, and its adapter if it has one: "none + NAME"."""
        label = f"{self.repair}, first document last" if self.is_turned else self.repair
        return f"{label} + {self.adapter}" if self.adapter else label

    def __str__(self) -> str:
        return "full attention" if self.is_full else f"{self.strategy}, {self.context}, {self.label}"


FULL = Variant("sequential", "system", str(FullRepair()))
"""Ordinary causal attention over the whole prompt, without reuse."""
OTHER_ORDER = replace(FULL, is_turned=True)
"""The same with the first document last, the yardstick of all others."""


def variants(
    repairs: Sequence[str],
    strategies: Sequence[str] | None = None,
    contexts: Sequence[str] = CONTEXTS,
    adapters: Sequence[str] = (),
) -> tuple[Variant, ...]:
    """Returns full attention, then every meaningful combination, each once: of the base model, then of each adapter.

    Raises:
        InvalidConfig: an unknown strategy or context, none of one of them, or too many policies.
        InvalidRepair: a policy that does not exist.
    """
    known_strategies = strategy_names(offsets=False)
    strategies = known_strategies if strategies is None else strategies
    for name, given, known in (("strategy", strategies, known_strategies), ("context", contexts, CONTEXTS)):
        for value in given:
            if value not in known:
                raise InvalidConfig(f"the {name} {value!r:.80} is none of {', '.join(known)}")
    if not repairs or not strategies or not contexts:
        raise InvalidConfig(
            "give at least one policy, one strategy and one context; leave an option out for its default"
        )
    if len(repairs) > MAX_POLICIES:
        raise InvalidConfig(f"{len(repairs)} policies are too many for one table; give at most {MAX_POLICIES}")
    texts = [str(repair_policy(repair)) for repair in repairs]
    combined = [
        Variant(strategy, context, repair, adapter)  # type: ignore[arg-type]  # checked above
        for adapter in ("", *adapters)
        for strategy in strategies
        for context in contexts
        for repair in texts
        if repair != FULL.repair
    ]
    return tuple(dict.fromkeys([FULL, *combined]))
