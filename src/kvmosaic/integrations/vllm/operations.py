"""What the scheduler tells every worker to do before a step's forward."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Move:
    """A run of tokens whose keys and values are copied inside the paged cache, and whose keys are turned.

        source_blocks    │ . . . c c │ c c c c c │ c . . . . │    source_start = 3, num_tokens = 9
        target_blocks    │ r r r r c │ c c c c c │ c c c . . │    target_start = 4

    Token i of the run lies in slot `source_start + i` of its source blocks, was computed at `position + i`, and goes to
    slot `target_start + i` of the target blocks, where it stands at `position + distance + i`.
    """

    source_blocks: tuple[int, ...]
    source_start: int
    target_blocks: tuple[int, ...]
    target_start: int
    num_tokens: int
    position: int
    distance: int


@dataclass(frozen=True, slots=True)
class Repair:
    """A run of tokens computed again, seeing everything before it in its request: token `start + i` is `token_ids[i]`.

    `blocks` hold the request's tokens 0, 1, … up to the end of the run at least. The run stands at `position`.
    """

    blocks: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class Shift:
    """Tokens that this step writes into these blocks stand `distance` positions earlier than their index says."""

    blocks: tuple[int, ...]
    distance: int


@dataclass(slots=True)
class Operations:
    """One step's work: moves first (they read what earlier steps wrote), then repairs, then the forward with shifts."""

    moves: list[Move] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    shifts: list[Shift] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.moves or self.repairs or self.shifts)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What one worker found out about its share of the model, told to the scheduler once at the start."""

    trouble: str = ""
    """Why chunks cannot be moved on this worker; empty: they can."""
    can_repair: bool = False
    can_shift: bool = False
    fingerprint: str = ""
    """The identity of this worker's weights; empty: unknown."""
