"""Snapshot of the engine for the dashboard: documents and blocks, read between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmosaic.cache import BlockId, BlockMap, Chunk
from kvmosaic.documents import label_in
from kvmosaic.engine import Engine
from kvmosaic.errors import UnknownChunk


@dataclass(frozen=True, slots=True)
class CachedText:
    """Chunks in the cache of one stored text."""

    num_tokens: int
    is_ready: bool
    """False while a chunk of it is being computed."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of the caches at one moment."""

    block_map: BlockMap | None
    """None unless requested."""
    held_blocks: Mapping[str, int]
    """By tenant: blocks of the request pool that its running requests hold, each counted once."""
    texts: Mapping[tuple[str, str], CachedText]
    """By tenant and label: texts that are cached or being computed."""


def take_snapshot(engine: Engine, wanted: Mapping[str, Sequence[str]], *, with_blocks: bool) -> EngineSnapshot:
    """Reads the caches; call it on the engine's thread.

    Args:
        engine: the engine to read.
        wanted: the labels of texts to look up, by tenant that has viewers.
        with_blocks: whether a viewer may see the blocks of all tenants.
    """
    found = _chunks_of(engine, wanted)
    return EngineSnapshot(
        block_map=engine.kv_cache.block_map() if with_blocks else None,
        held_blocks={tenant: len(block_ids) for tenant, block_ids in _held(engine, wanted).items()},
        texts={place: _cached(chunks) for place, chunks in found.items()},
    )


def _held(engine: Engine, tenants: Iterable[str]) -> dict[str, set[BlockId]]:
    held: dict[str, set[BlockId]] = {tenant: set() for tenant in tenants}
    for sequence in engine.scheduler.running:
        allocation = sequence.allocation
        if allocation is not None and allocation.tenant in held:
            for span in allocation.spans:
                if span.chunk is None:
                    held[allocation.tenant].update(span.table.block_ids)
    return held


def _chunks_of(engine: Engine, wanted: Mapping[str, Sequence[str]]) -> dict[tuple[str, str], list[Chunk]]:
    """Returns the chunks of texts that have any, by tenant and label, in one pass over all chunks."""
    kv_cache, found = engine.kv_cache, dict[tuple[str, str], list[Chunk]]()
    if engine.chunk_config.long_chunks == "split":
        asked = {tenant: frozenset(labels) for tenant, labels in wanted.items()}
        for chunk in kv_cache.chunks():
            if chunk.tenant in asked:
                for label in {label_in(name)[0] for name in chunk.names} & asked[chunk.tenant]:
                    found.setdefault((chunk.tenant, label), []).append(chunk)
        return found
    for tenant, label in ((tenant, label) for tenant, labels in wanted.items() for label in labels):
        try:
            found[tenant, label] = kv_cache.find_chunks(label, None, tenant)
        except UnknownChunk:
            continue
    return found


def _cached(chunks: Sequence[Chunk]) -> CachedText:
    """Counts the tokens of one copy; a text has one copy per system text."""
    first = chunks[0].root
    return CachedText(
        num_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.root == first),
        is_ready=all(chunk.is_ready for chunk in chunks if chunk.root == first),
    )
