"""Position strategies by name. To add one: write its file, and add it to `STRATEGIES`. No torch, no numpy."""

from __future__ import annotations

from typing import Final

from kvmosaic.errors import InvalidConfig
from kvmosaic.layout.strategies.absolute import Absolute
from kvmosaic.layout.strategies.sequential import Sequential
from kvmosaic.layout.strategies.shared import Shared
from kvmosaic.layout.strategies.strategy import PositionStrategy

__all__ = [
    "AUTO",
    "STRATEGIES",
    "PositionStrategy",
    "choose_strategy",
    "describe_strategies",
    "strategy_named",
    "strategy_names",
]

STRATEGIES: Final[dict[str, PositionStrategy]] = {
    strategy.name: strategy for strategy in (Sequential(), Shared(), Absolute())
}
AUTO: Final = "auto"
"""Chooses a strategy for each prompt; see `choose_strategy`."""


def strategy_names(*, auto: bool = False, offsets: bool = True) -> tuple[str, ...]:
    """The names to choose from: with "auto"; without strategies that need a `position_offset` per document."""
    fixed = (name for name, strategy in STRATEGIES.items() if offsets or not strategy.takes_offsets)
    return (AUTO, *fixed) if auto else tuple(fixed)


def strategy_named(name: str) -> PositionStrategy:
    """The strategy with this name.

    Raises:
        InvalidConfig: an unknown name.
    """
    if not isinstance(name, str) or name not in STRATEGIES:
        raise InvalidConfig(f"position_strategy is {name!r:.80}; choose " + " or ".join(map(repr, STRATEGIES)))
    return STRATEGIES[name]


def describe_strategies(*, offsets: bool = True) -> str:
    """The strategies in words: "follow one another (sequential), overlap (shared)"."""
    return ", ".join(f"{STRATEGIES[name].summary} ({name})" for name in strategy_names(offsets=offsets))


def choose_strategy(num_positions: int, max_positions: int | None, *, is_movable: bool = True) -> str:
    """The strategy chosen by `auto`: `sequential` where the prompt fits, otherwise `shared`.

    An ordinary model is trained on documents one after the other; where they overlap it mixes them up. The choice
    depends on the prompt and the model alone, so that cached and computed prompts stay the same.

    Args:
        num_positions: sequential positions of the prompt and the first token of its answer.
        max_positions: positions that the model was trained for, or that are allowed; None: no limit.
        is_movable: whether the model's keys may be used at another position.
    """
    is_fitting = max_positions is None or num_positions <= max_positions
    return Sequential.name if is_movable and is_fitting else Shared.name
