"""Views: what the dashboard is sent, as names and values for JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.cache import ChunkCacheStats, TenantUsage
from kvmosaic.sampling import SegmentAction, SegmentReuse
from kvmosaic.sampling.reuse import RepairUse
from kvmosaic.server.dashboard.glance import CachedText, Glance, PoolGlance
from kvmosaic.server.documents import StoredDocument, shown_name
from kvmosaic.server.record import RequestRecord
from kvmosaic.server.tier_readings import TierMoment

MAX_SEGMENTS = 256
"""Segments of one record that are sent; the rest are summed up."""
_EQUAL_BYTES = re.compile(rb"(.)\1*", re.DOTALL)


def record_view(number: int, record: RequestRecord, *, with_segments: bool = True) -> dict[str, Any]:
    """One request that has ended, for the strips and the charts."""
    reuse = record.reuse
    return {
        "number": number,
        "id": record.request_id,
        "time": record.time,
        "tenant": record.tenant,
        "route": record.route,
        "status": record.status,
        "num_tokens": reuse.num_tokens if reuse else record.num_prompt_tokens,
        "reused_tokens": reuse.reused_tokens if reuse else 0,
        "moved_tokens": reuse.moved_tokens if reuse else 0,
        "ttft": reuse.time_to_first_token if reuse else None,
        "uncached_ttft": record.estimated_uncached_ttft,
        "repair": _repair(reuse.repair) if reuse and reuse.repair else None,
        "segments": _segments(reuse.segments) if reuse and with_segments else [],
    }


def document_view(document: StoredDocument, cached: CachedText | None) -> dict[str, Any]:
    """One stored document and where its keys and values are."""
    tier = "none" if cached is None else "device" if cached.is_ready else "computing"
    return {
        "id": document.id,
        "title": document.content.title,
        "bytes": document.num_bytes,
        "tokens": cached.num_tokens if cached else None,
        "hits": document.hits,
        "tier": tier,
        "pinned": document.pinned,
    }


def chunks_view(statistics: ChunkCacheStats) -> dict[str, Any]:
    """Counters of the chunk cache, all tenants together."""
    return {
        "cached": statistics.cached_chunks,
        "pinned": statistics.pinned_chunks,
        "lookups": statistics.lookups,
        "hits": statistics.hits,
        "evictions": statistics.evictions,
        "lookup_ms": statistics.average_lookup_ms,
        "attach_ms": statistics.average_attach_ms,
        "compute_ms": statistics.average_compute_ms,
    }


def usage_view(usage: TenantUsage) -> dict[str, Any]:
    """What one tenant has in the chunk cache."""
    return {"num_chunks": usage.num_chunks, "num_bytes": usage.num_bytes, "quota_bytes": usage.quota_bytes}


def pool_view(pool: PoolGlance) -> dict[str, Any]:
    """How full a pool is."""
    return {
        "name": pool.name,
        "num_blocks": pool.num_blocks,
        "used": pool.num_used,
        "block_bytes": pool.block_bytes,
    }


def tier_view(moment: TierMoment) -> dict[str, Any]:
    """What a tier below the device holds, and whether it answers."""
    stat = moment.stat
    return {
        "name": moment.label,
        "num_entries": stat.num_entries,
        "num_bytes": stat.num_bytes,
        "quota_bytes": stat.quota_bytes,
        "hits": stat.hits,
        "misses": stat.misses,
        "is_up": moment.is_up,
    }


def blocks_view(glance: Glance) -> dict[str, Any] | None:
    """The states of all blocks, run-length encoded; None if they were not read."""
    if glance.block_map is None:
        return None
    states: Mapping[str, bytes] = {"chunk_cache": glance.block_map.chunk_cache, "request": glance.block_map.request}
    return {"pools": [{**pool_view(pool), "runs": encode_runs(states[pool.name])} for pool in glance.pools]}


def encode_runs(states: bytes) -> list[int]:
    """A run-length code: state, how many blocks, state, how many blocks, ..."""
    runs: list[int] = []
    for match in _EQUAL_BYTES.finditer(states):
        runs += (states[match.start()], match.end() - match.start())
    return runs


def _repair(repair: RepairUse) -> dict[str, Any]:
    return {
        "policy": repair.policy,
        "repaired_tokens": repair.repaired_tokens,
        "document_tokens": repair.document_tokens,
        "milliseconds": round(repair.milliseconds, 3),
    }


def _segments(segments: Sequence[SegmentReuse]) -> list[dict[str, Any]]:
    if len(segments) <= MAX_SEGMENTS:
        return [_segment(segment) for segment in segments]
    first, rest, last = segments[: MAX_SEGMENTS - 32], segments[MAX_SEGMENTS - 32 : -31], segments[-31:]
    num_tokens = sum(one.num_tokens for one in rest)
    num_reused = sum(one.reused_tokens for one in rest)
    action: SegmentAction = "computed" if not num_reused else "reused" if num_reused == num_tokens else "partly reused"
    summed = SegmentReuse(
        kind="chunk",
        num_tokens=num_tokens,
        action=action,
        name=f"{len(rest)} more documents",
        reused_tokens=num_reused,
        milliseconds=sum(one.milliseconds for one in rest),
    )
    return [_segment(segment) for segment in (*first, summed, *last)]


def _segment(segment: SegmentReuse) -> dict[str, Any]:
    return {
        "kind": segment.kind,
        "name": shown_name(segment.name) if segment.name else None,
        "num_tokens": segment.num_tokens,
        "action": segment.action,
        "distance": segment.distance,
        "reused_tokens": segment.reused_tokens,
        "milliseconds": round(segment.milliseconds, 3),
        "note": segment.note,
    }
