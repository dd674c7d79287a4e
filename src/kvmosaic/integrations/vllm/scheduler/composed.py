"""One composed request while it waits and runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvmosaic.integrations.vllm.contract import Composition
from kvmosaic.integrations.vllm.operations import Move, Repair
from kvmosaic.integrations.vllm.scheduler.pieces import ChunkPrompt, Piece
from kvmosaic.integrations.vllm.scheduler.tiering import LoadedChunk
from kvmosaic.integrations.vllm.scheduler.trouble import Bypass


@dataclass(slots=True)
class SeenBlocks:
    """Blocks of a piece that were found cached, and the last step that was scheduled before they were."""

    blocks: tuple[Any, ...]
    step: int
    num_steps: int
    """How many steps were scheduled when they were found. One that writes them later makes this worthless."""


@dataclass(slots=True)
class ComposedRequest:
    """What is known of a request: its pieces, what was seen of them, and what the next step does for it.

    A block counts as cached from the moment on in which the step that computes it is *scheduled*. Moves run before
    that step's forward, so a piece can be moved only if its blocks were seen before the step was begun: `sightings`.
    """

    request: Any
    composition: Composition
    ordinary_hasher: Any
    bypass: Bypass | None = None
    """Why it is answered as an ordinary prompt; None: it is composed."""
    prompts: tuple[ChunkPrompt, ...] = ()
    hashes: tuple[tuple[Any, ...], ...] = ()
    """Of each chunk prompt, its blocks'."""
    pieces: tuple[Piece, ...] = ()
    sightings: dict[int, SeenBlocks] = field(default_factory=dict)
    """By number of the piece."""
    prefix: SeenBlocks | None = None
    """Of what vLLM's prefix cache has of the request itself."""
    asked: dict[int, int] = field(default_factory=dict)
    """How often each chunk prompt was asked to be computed for this request."""
    loaded: dict[int, LoadedChunk] = field(default_factory=dict)
    """Of the chunk prompts it waited for, those that came from a tier."""
    planned: list[tuple[Piece, tuple[Any, ...]]] = field(default_factory=list)
    """What to move if the request is admitted in this step: parts of pieces, and the blocks that hold them."""
    moves: list[Move] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    num_cached: int = 0
    """The first tokens of the prompt that vLLM's prefix cache had when the request came; of a bypass, at its turn."""
    is_told: bool = False
    """Whether its report was given away already."""

    @property
    def position_shift(self) -> int:
        """How many positions earlier than its index a token of the question or the answer stands."""
        return 0 if self.bypass else self.composition.end - self.composition.question_position
