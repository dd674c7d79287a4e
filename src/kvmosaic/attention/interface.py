"""What is asked of attention: rows of a step and the keys that they read, as plain data without tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from kvmosaic.cache.block_table import SavedState, StateProgress
from kvmosaic.layers.geometry import MaskSpec
from kvmosaic.layout import Visibility

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

PoolName = Literal["request", "chunk_cache"]
BackendName = Literal["torch", "native", "triton"]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend and the reason for it."""

    backend: Any
    """An `AttentionBackend`; None: the engine has its own attention."""
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@runtime_checkable
class AttentionObserver(Protocol):
    """Observer of the attention that rows give to the keys they read."""

    def wants_layer(self, layer_index: int) -> bool:
        """Whether to observe this layer."""

    def observe(self, layer_index: int, read_index: int, shares: Float[Tensor, " S"]) -> None:
        """Receives the attention shares [S] of the keys of one read in one layer.

        Summed over rows, averaged over heads.
        """


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of stored keys that a group of rows sees."""

    pool: PoolName
    first_slot: int
    num_tokens: int
    position: int
    """Position of the first key for the reader: the position it was computed at, plus `distance`."""
    distance: int = 0
    follows: bool = False
    """For row i of a group, position and distance are i larger: the run stays equally far from every row."""
    positions: tuple[int, ...] = ()
    """Position of each key for the reader, if they are not consecutive."""
    visibility: Visibility | None = None
    """What a repair hides of it; None: all rows see all of it."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What is special about rows of a repair, or of a text with a rolling window."""

    window: int = 0
    """If not 0: in all layers, a row sees only so many positions of reads that do not follow it, its own included."""
    positions: tuple[int, ...] = ()
    """Position of each row, if they are not consecutive."""
    watch: AttentionObserver | None = None
    """Observer of the attention of these rows."""


ORDINARY_ROWS = RowRules()


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Consecutive rows of one span that a step computes.

    A single row may list its own slot among its reads (`reads_itself`); several rows read each other causally.
    """

    first_row: int
    num_rows: int
    position: int
    reads: tuple[Piece, ...]
    reads_itself: bool = False
    rules: RowRules = ORDINARY_ROWS

    def lowest_seen(self, mask: MaskSpec, row: int) -> int:
        """Position of the earliest key that row number `row` of the group sees in reads that do not follow it."""
        rules = self.rules
        position = rules.positions[row] if rules.positions else self.position + row
        lowest = mask.lowest_seen(position)
        return max(lowest, position - rules.window + 1) if rules.window else lowest


@dataclass(frozen=True, slots=True)
class RowStates:
    """States of consecutive tokens of a span, for layers that carry one from token to token."""

    progress: StateProgress
    seen: tuple[SavedState, ...] = ()
    """Those of the spans that they see, in prompt order, unless the state before them has all of it."""


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Consecutive tokens of one span, to be computed in a step.

    token_ids: the tokens
    position: position of the first one
    pool, slots: where their keys and values are written, one slot per token
    reads: the stored keys that all of them see: earlier spans, and earlier tokens of their own span
    reads_itself: a single token whose own slot is already among the reads
    num_logits: number of tokens at the end that need logits
    rules: what is special about rows of a repair, or of a text with a rolling window
    adapter: digest of the low-rank adapter that computes them; empty: none
    state: for models with states, what they continue from, and where their states go
    """

    token_ids: Sequence[int]
    position: int
    pool: PoolName
    slots: Sequence[int]
    reads: tuple[Piece, ...]
    reads_itself: bool = False
    num_logits: int = 0
    rules: RowRules = ORDINARY_ROWS
    adapter: str = ""
    state: RowStates | None = None
