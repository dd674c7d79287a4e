"""A glance at the engine: everything the dashboard shows of the caches, read between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmosaic.cache import BlockMap, Chunk, ChunkCacheStats, TenantUsage
from kvmosaic.engine import Engine
from kvmosaic.errors import UnknownChunk
from kvmosaic.server.documents.names import label_in


@dataclass(frozen=True, slots=True)
class CachedText:
    """What the cache holds of one stored text."""

    num_tokens: int
    is_ready: bool
    """False while a part of it is being computed."""


@dataclass(frozen=True, slots=True)
class PoolGlance:
    """How full a block pool is."""

    name: str
    num_blocks: int
    num_used: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Glance:
    """One moment of the caches."""

    statistics: ChunkCacheStats
    pools: tuple[PoolGlance, ...]
    block_map: BlockMap | None
    """None unless it was asked for."""
    usage: Mapping[str, TenantUsage]
    """By tenant."""
    texts: Mapping[tuple[str, str], CachedText]
    """By tenant and label, those that are cached or being computed."""


def look(engine: Engine, wanted: Mapping[str, Sequence[str]], *, with_blocks: bool) -> Glance:
    """Reads the caches; to be called on the engine's thread.

    Args:
        engine: whose caches.
        wanted: for each tenant, the labels of the texts to look for.
        with_blocks: whether somebody may see the blocks of all tenants.
    """
    planner = engine.planner
    pools = [
        PoolGlance(pool.name, pool.num_blocks, pool.num_used, planner.bytes_per_block)
        for pool in (planner.chunk_pool, planner.request_pool)
    ]
    return Glance(
        statistics=planner.statistics(),
        pools=tuple(pools),
        block_map=planner.block_map() if with_blocks else None,
        usage={tenant: planner.tenant_usage(tenant) for tenant in wanted},
        texts={
            (tenant, label): _cached(chunks)
            for tenant, labels in wanted.items()
            for label, chunks in _chunks_of(engine, tenant, labels).items()
        },
    )


def _chunks_of(engine: Engine, tenant: str, labels: Sequence[str]) -> dict[str, list[Chunk]]:
    """The chunks of texts that have any, by label."""
    planner, found = engine.planner, dict[str, list[Chunk]]()
    if engine.chunk_config.long_chunks == "split":
        asked = set(labels)
        for chunk in planner.chunks():
            if chunk.tenant == tenant:
                for label in {label_in(name)[0] for name in chunk.names} & asked:
                    found.setdefault(label, []).append(chunk)
        return found
    for label in labels:
        try:
            found[label] = planner.find_chunks(label, None, tenant)
        except UnknownChunk:
            continue
    return found


def _cached(chunks: Sequence[Chunk]) -> CachedText:
    """Under several system texts there are several copies: the tokens of one are counted."""
    first = chunks[0].root
    return CachedText(
        num_tokens=sum(chunk.num_tokens for chunk in chunks if chunk.root == first),
        is_ready=all(chunk.is_ready for chunk in chunks if chunk.root == first),
    )
