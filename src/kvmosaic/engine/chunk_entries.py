"""Chunk entries: serialization of chunks for the tiers, as late as possible, and validation on the way back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from kvmosaic.cache import Chunk, SpanPlan
from kvmosaic.config import TierConfig
from kvmosaic.entries import (
    DtypeName,
    EntryBound,
    EntryExpectation,
    EntryHeader,
    choose_codec,
    decode_entry,
    encode_entry,
)
from kvmosaic.entries.entry import DTYPES
from kvmosaic.entries.header import StateShape
from kvmosaic.layers import geometry_of, stored_layers
from kvmosaic.tiers import Entry

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import SlotStorage
    from kvmosaic.memory import ChunkTensors


class ChunkSource:
    """Tensors of a chunk: read from its blocks while these are its own, from a copy afterwards.

        complete ──▶ in its blocks ──┬── the writer reads it ──▶ copied, on the writer's thread
                                     ├── its blocks are about to be freed ──▶ copied first, on the engine's thread
                                     └── it is deleted ──▶ dropped

    Blocks of a complete chunk are never written again, so any thread may read them. Before they are freed, the engine
    calls `tensors` or `drop`, which wait for a copy in progress.
    """

    def __init__(self, read: Callable[[], ChunkTensors]) -> None:
        """Calls `read` once, on the first thread that asks for the tensors."""
        self._read: Callable[[], ChunkTensors] | None = read
        self._tensors: ChunkTensors | None = None
        self._lock = threading.Lock()

    def tensors(self) -> ChunkTensors | None:
        """The tensors, copied on the first call; None if the chunk was dropped before."""
        with self._lock:
            if self._read is not None:
                self._tensors = self._read()
                self._read = None
            return self._tensors

    def drop(self) -> None:
        """Releases the tensors: the chunk was deleted."""
        with self._lock:
            self._read = self._tensors = None


class ChunkEntries:
    """Serializes the chunks of one model into entries, and decodes entries into chunks."""

    def __init__(
        self, fingerprint: str, storage: SlotStorage, config: TierConfig, states: Sequence[StateShape] = ()
    ) -> None:
        """Describes the layout of `storage`, and the tensors that a document's states have beside.

        Raises:
            InvalidConfig: the codec does not allow the model's dtype.
        """
        self._fingerprint = fingerprint
        self._layers = geometry_of(storage.layers)
        self._dtype = cast(DtypeName, str(storage.dtype).removeprefix("torch."))
        choose_codec(config.chunk_codec, DTYPES[self._dtype])
        self._states = tuple(states)
        self._bound = EntryBound(self._layers, self._dtype, self._states)
        self.state_bytes = self._bound.state_bytes
        """Of what is kept of a document's states."""
        self.num_layers = len(stored_layers(self._layers))
        """Layers that store something: their tensors are before those of states."""
        self._config = config

    @property
    def lossy_codec(self) -> str:
        """The codec, if it is lossy."""
        return "" if self._config.chunk_codec == "none" else self._config.chunk_codec

    def max_bytes(self, num_tokens: int) -> int:
        """Max size of an entry with `num_tokens` tokens; larger ones are not read."""
        return self._bound.max_bytes(num_tokens)

    def encode(self, chunk: Chunk) -> Callable[[ChunkSource], Entry | None]:
        """Returns a function that serializes a chunk, later and on any thread; it gives None for a deleted chunk."""
        header = EntryHeader(
            fingerprint=self._fingerprint,
            key=chunk.key,
            root=chunk.root,
            start=chunk.start,
            tokens=chunk.tokens,
            layers=self._layers,
            dtype=self._dtype,
            codec=self._config.chunk_codec,
            states=self._states,
            names=tuple(chunk.names),
            tenant=chunk.tenant,
            compute_seconds=chunk.compute_ms / 1e3,
            created=time.time(),
        )

        def encode(source: ChunkSource) -> Entry | None:
            layers = source.tensors()
            return None if layers is None else encode_entry(header, layers, self._config.chunk_secret)

        return encode

    def accept(
        self, span: SpanPlan, start: int, tell: Callable[[int, float], None] = lambda *_: None
    ) -> Callable[[Entry], ChunkSource]:
        """Returns a function that validates and decodes an entry for a planned chunk, on any thread.

        It returns the number of tokens of the chunk and the seconds that computing it took originally.

        It raises InvalidEntry for an entry that is corrupt or of another model, other tokens, context or position.
        """
        expected = EntryExpectation(
            fingerprint=self._fingerprint,
            key=span.key,
            root=span.root,
            start=start,
            tokens=span.tokens,
            layers=self._layers,
            dtype=self._dtype,
            codec=self._config.chunk_codec,
            states=self._states,
        )

        def accept(entry: Entry) -> ChunkSource:
            decoded = decode_entry(entry, expected, self._config.chunk_secret)
            tell(span.num_tokens, decoded.header.compute_seconds)
            return ChunkSource(lambda: decoded.layers)

        return accept
