"""An attachment: a plan made true, with everything that one running sequence holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmosaic.cache.block_table import BlockTable
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.keys import Key, KeyChain
from kvmosaic.cache.plan import Action
from kvmosaic.cache.prefix_cache import PrefixEntry
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind


@dataclass(slots=True, eq=False)
class AttachedSpan:
    """One span of an attachment.

    Its table has room for all of its tokens; the first `num_computed` of them hold keys and values, or will after the
    step being assembled.
    """

    index: int
    kind: SegmentKind
    action: Action
    """As finally done, which may differ from the plan: something was evicted, or came to be cached, in between."""
    table: BlockTable
    """Where its tokens lie; a chunk's table belongs to the chunk and is shared by all who read it."""
    root: Key = field(repr=False)
    tokens: bytearray = field(repr=False)
    """Encoded token ids, answer included; empty for chunks."""
    chunk: Chunk | None = None
    is_owner: bool = False
    """Chunks: this span must compute it."""
    is_closed: bool = True
    """Nothing will be written behind its tokens."""
    computed: int = 0
    """Tokens computed, for spans that are not chunks; read `num_computed`."""
    entries: list[PrefixEntry] = field(default_factory=list, repr=False)
    """The prefix entries of its first blocks, all held."""
    registered: list[PrefixEntry] = field(default_factory=list, repr=False)
    """Of these, new ones by this span in the step `registered_step`."""
    registered_step: int = -1
    is_unregistrable: bool = False
    """A block could not be made known, so those after it cannot either."""

    @property
    def num_tokens(self) -> int:
        """Tokens, the answer included."""
        return self.table.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that hold keys and values, or will after the step being assembled."""
        return self.chunk.num_computed if self.chunk is not None else self.computed

    @property
    def is_ready(self) -> bool:
        """Whether all tokens are computed, or will be by the step being assembled."""
        return self.num_computed == self.num_tokens

    @property
    def last_key(self) -> Key:
        """The chained key up to the last known block."""
        return self.entries[-1].key if self.entries else self.root


@dataclass(slots=True, eq=False)
class Attachment:
    """Everything one sequence holds: one attached span per span of its layout, in order."""

    layout: Layout
    salt: str
    spans: list[AttachedSpan]
    chain: KeyChain = field(repr=False)
    is_released: bool = False
    is_forgotten: bool = False
    """A step failed with it: `release` is all that is left to do."""

    @property
    def last(self) -> AttachedSpan:
        """The span that grows with the answer."""
        return self.spans[-1]

    @property
    def is_stale(self) -> bool:
        """Whether something it reads was given up: release it and plan again.

        That is a chunk which was abandoned, or a prefix block whose step failed.
        """
        return self.is_forgotten or any(
            (span.chunk is not None and span.chunk.is_abandoned) or (span.entries and span.entries[-1].is_dropped)
            for span in self.spans
        )

    def held_chunks(self) -> list[Chunk]:
        """Its chunks, each once."""
        return list({span.chunk.key: span.chunk for span in self.spans if span.chunk is not None}.values())
