"""Chunks as entries: what of a chunk is written down, and what an entry must say to become this chunk again."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import cast

from kvmosaic.cache import Chunk, SpanPlan
from kvmosaic.config import TierConfig
from kvmosaic.engine.chunk_source import ChunkSource
from kvmosaic.errors import InvalidConfig
from kvmosaic.memory import (
    BlockStorage,
    DtypeName,
    EntryBound,
    EntryExpectation,
    EntryHeader,
    choose_codec,
    decode_entry,
    encode_entry,
    geometry_of,
)
from kvmosaic.tiers import Entry


class ChunkEntries:
    """Makes entries of the chunks of one model, and chunks of entries."""

    def __init__(self, fingerprint: str, storage: BlockStorage, config: TierConfig) -> None:
        """Describes what `storage` holds.

        Raises:
            InvalidConfig: the codec does not allow the model's dtype, or zstandard is not installed.
        """
        choose_codec(config.codec, storage.dtype)
        if config.compression == "zstd" and find_spec("zstandard") is None:
            raise InvalidConfig("compression is 'zstd' and zstandard is not installed; pip install 'kvmosaic[tiers]'")
        self._fingerprint = fingerprint
        self._layers = geometry_of(storage.layers)
        self._dtype = cast(DtypeName, str(storage.dtype).removeprefix("torch."))
        self._bound = EntryBound(self._layers, self._dtype)
        self._config = config

    @property
    def lossy_codec(self) -> str:
        """The codec, if it changes numbers."""
        return "" if self._config.codec == "none" else self._config.codec

    def max_bytes(self, num_tokens: int) -> int:
        """Most bytes that an entry of so many tokens has; what is larger is not read."""
        return self._bound.max_bytes(num_tokens)

    def encode(self, chunk: Chunk) -> Callable[[ChunkSource], Entry | None]:
        """What makes an entry of the tensors of a chunk, on any thread, later; None if it was deleted meanwhile."""
        header = EntryHeader(
            fingerprint=self._fingerprint,
            key=chunk.key,
            root=chunk.root,
            start=chunk.start,
            tokens=chunk.tokens,
            layers=self._layers,
            dtype=self._dtype,
            codec=self._config.codec,
            compression=self._config.compression,
            names=tuple(chunk.names),
            tenant=chunk.tenant,
            compute_seconds=chunk.compute_ms / 1e3,
            created=time.time(),
        )

        def encode(source: ChunkSource) -> Entry | None:
            layers = source.tensors()
            return None if layers is None else encode_entry(header, layers, self._config.secret)

        return encode

    def accept(
        self, span: SpanPlan, start: int, tell: Callable[[int, float], None] = lambda *_: None
    ) -> Callable[[Entry], ChunkSource]:
        """What verifies an entry for a planned chunk and decodes it, on any thread.

        It tells how many tokens the chunk has, and in how many seconds it was computed where that was done.

        It raises InvalidEntry for one that is damaged or of another model, other tokens, another context or place.
        """
        expected = EntryExpectation(
            fingerprint=self._fingerprint,
            key=span.key,
            root=span.root,
            start=start,
            tokens=span.tokens,
            layers=self._layers,
            dtype=self._dtype,
            codec=self._config.codec,
        )

        def accept(entry: Entry) -> ChunkSource:
            decoded = decode_entry(entry, expected, self._config.secret)
            tell(span.num_tokens, decoded.header.compute_seconds)
            return ChunkSource(lambda: decoded.layers)

        return accept
