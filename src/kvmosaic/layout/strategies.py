"""Position strategies by name: where documents are computed, and where the prompt reads them.

To add one: write its class, and add it to `STRATEGIES`. No torch, no numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from kvmosaic.errors import InvalidConfig

__all__ = [
    "AUTO",
    "STRATEGIES",
    "PositionStrategy",
    "choose_strategy",
    "describe_strategies",
    "strategy_named",
    "strategy_names",
]


class PositionStrategy(ABC):
    """Positions of the documents of a prompt.

    A document is *computed* at a position that does not depend on the other documents of a prompt, and *read* at the
    position that the prompt gives it; the distance between the two rotates the query, never the key.

    A strategy is stateless: one instance serves all prompts.
    """

    name: ClassVar[str]
    """Its name in configuration, requests and reports."""
    summary: ClassVar[str]
    """What documents do, for help texts: they "overlap"."""
    overlaps: ClassVar[bool] = False
    """Whether documents share positions, so that their order is not in the positions."""
    takes_offsets: ClassVar[bool] = False
    """Whether the caller gives every document its position (`position_offset`), where it is computed and read."""

    @abstractmethod
    def moves(self, chunk_context: str) -> bool:
        """Whether documents computed in this context may be read at another position: the model must be movable."""

    @abstractmethod
    def position(self, start: int, cursor: int, shift: int) -> int:
        """Position at which the question reads a document's first token.

        Args:
            start: where the document was computed.
            cursor: end of the system text and of the documents before it, one after the other.
            shift: end of the system text, minus the end of what the document saw of it when it was computed.
        """

    def position_of_seen(self, start: int, end: int) -> int:
        """Position at which a later document reads this one, which it names in `sees`.

        Args:
            start: where this document was computed.
            end: end of what the later document sees before it.
        """
        return start


class Sequential(PositionStrategy):
    """Every document begins where the one before it ends."""

    name: ClassVar[str] = "sequential"
    summary: ClassVar[str] = "follow one another"

    def moves(self, chunk_context: str) -> bool:
        """All documents but the first."""
        return True

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Right after everything before it."""
        return cursor

    def position_of_seen(self, start: int, end: int) -> int:
        """One after the other for the reading document, too."""
        return end


class Shared(PositionStrategy):
    """Every document begins where the system text ends, where it was computed: nothing is moved."""

    name: ClassVar[str] = "shared"
    summary: ClassVar[str] = "overlap"
    overlaps: ClassVar[bool] = True

    def moves(self, chunk_context: str) -> bool:
        """Only documents that were computed without the system text, or after a part of it."""
        return chunk_context != "system"

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Right after the system text; the parts of a split document follow one another."""
        return start + shift


class Absolute(PositionStrategy):
    """Every document is computed and read at its `position_offset`."""

    name: ClassVar[str] = "absolute"
    summary: ClassVar[str] = "begin at their own offsets"
    takes_offsets: ClassVar[bool] = True

    def moves(self, chunk_context: str) -> bool:
        """Nothing is moved."""
        return False

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Where it was computed."""
        return start


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
        ours = {"virtual": Shared.name, "offset": Sequential.name}.get(str(name))
        hint = f" (here {name!r} is {ours!r})" if ours else ""
        raise InvalidConfig(f"position_strategy is {name!r:.80}; choose " + " or ".join(map(repr, STRATEGIES)) + hint)
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
