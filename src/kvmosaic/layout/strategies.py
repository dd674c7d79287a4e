"""Position strategies by name, and the rolling window: where texts are computed, and where the prompt reads them.

To add one: write its class, and add it to `STRATEGIES`. No torch, no numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """Attention sinks that are never evicted, and a window of the newest tokens.

    It applies to the last span of a layout (question and answer, or the plain prompt and its answer), whose tokens have
    indexes 0, 1, 2, … With S sinks and a window of W tokens, token t sees

        everything      all that the span sees: system prompt, documents
        sinks           tokens 0 … S - 1
        window          the newest W tokens, itself included: t - W + 1 … t

    at contiguous positions, as if only these existed (StreamingLLM, https://arxiv.org/abs/2309.17453):

        text            s s s s . . . . . . . . . w w w w w w        token t is the last one
        seen at         0 1 2 3                   4 5 6 7 8 9        position in the cache, from the span's start on

    So the first S + W tokens are an ordinary causal prompt. From then on the window moves by one token per token, and
    everything before it keeps its distance from the newest token.

    Keys are cached once, rotated for the position where they were computed. It must not grow with the text, so
    it wraps around: it counts from S to S + W - 1, then starts at S again. The tokens between two starts are a *lap*.
    A window reaches back into the previous lap at most, whose keys then count as W positions earlier.
    """

    sink_tokens: int
    window_tokens: int
    num_layers: int = 1
    """Layers of the model: each lets a token reach one window further back."""

    def __post_init__(self) -> None:
        assert self.sink_tokens >= 0 and self.window_tokens >= 1 and self.num_layers >= 1

    @property
    def num_positions(self) -> int:
        """S + W: the length of an ordinary prompt, and the exclusive upper bound of positions."""
        return self.sink_tokens + self.window_tokens

    def position_of(self, token: int) -> int:
        """The position of a token when it is computed, relative to the span's start."""
        if token < self.num_positions:
            return token
        return self.sink_tokens + (token - self.sink_tokens) % self.window_tokens

    def shift(self, token: int) -> int:
        """Distance by which the sinks, and all spans before, are moved for a token; 0 for the first S + W tokens."""
        return self.position_of(token) - min(token, self.num_positions - 1)

    def lap_start(self, token: int) -> int:
        """The first token of a token's lap: from there on, position and index grow together."""
        if token < self.num_positions:
            return 0
        return token - (token - self.sink_tokens) % self.window_tokens

    def lap_end(self, token: int) -> int:
        """The first token of the next lap."""
        if token < self.num_positions:
            return self.num_positions
        return self.lap_start(token) + self.window_tokens

    def oldest(self, token: int) -> int:
        """The oldest non-sink token that a token sees."""
        return max(self.sink_tokens, token - self.window_tokens + 1)

    def replay_from(self, num_tokens: int) -> int:
        """The first token after the sinks that must be computed to continue a text of `num_tokens` tokens.

        A layer mixes in tokens of the last window only, so L layers reach back (L - 1)(W - 1) tokens from the oldest
        needed key, independent of the text's length. Tokens between the sinks and that token make no difference. S, if
        nothing can be skipped.
        """
        reach = self.window_tokens + (self.num_layers - 1) * (self.window_tokens - 1)
        first = num_tokens - reach
        return first if first >= self.num_positions else self.sink_tokens

    def head_tokens(self, num_tokens: int) -> int:
        """Number of tokens that are computed first, as an ordinary prompt; the others follow in parts."""
        if self.replay_from(num_tokens) > self.sink_tokens:
            return max(self.sink_tokens, 1)
        return min(num_tokens, self.num_positions)
