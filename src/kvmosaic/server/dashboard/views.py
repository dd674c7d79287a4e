"""Dashboard views: its page, a snapshot of the engine between two steps, and events, ready for JSON."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Any

from kvmosaic.cache import BlockId, BlockMap, BlockState, ChunkCacheStats, TenantUsage
from kvmosaic.documents import shown_name
from kvmosaic.engine import Engine, EngineFigures
from kvmosaic.sampling import SegmentAction, SegmentReuse
from kvmosaic.sampling.reuse import RepairUse
from kvmosaic.server.metrics.gauges import TierMoment
from kvmosaic.server.metrics.request_log import RequestRecord

POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""Only this server's address, only the script and style of the file, no text as markup, no embedding in frames."""

_QUESTIONS = (
    (
        "Who is the captain of the Amber Pearl?",
        ("Talmira Varlow", "Amber Pearl", "Corlow Lighthouse", "Golden Anchor Museum", "Fenbury"),
    ),
    (
        "What does Torren Briwick drink in the morning?",
        ("Golden Anchor Museum", "Bellos", "Torren Briwick", "Amber Pearl", "Talmira Varlow"),
    ),
    (
        "How high is the Corlow Lighthouse?",
        ("Bellos", "Fenbury", "Talmira Varlow", "Corlow Lighthouse", "Torren Briwick"),
    ),
)
"""Each question reads other documents in another order, so that the second one finds most of its documents cached."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The HTML file with its Content-Security-Policy header."""

    text: str
    policy: str

    @classmethod
    def read(cls) -> Markup:
        """Reads the file from the package; the policy allows script and style by their hashes."""
        text = files("kvmosaic.server.dashboard").joinpath("page.html").read_text(encoding="utf-8")
        return cls(text, POLICY.format(script=hash_of("script", text), style=hash_of("style", text)))


def hash_of(element: str, text: str) -> str:
    """Returns the source of the one element of this kind without attributes, for a Content-Security-Policy."""
    contents = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    assert len(contents) == 1, f"one <{element}> without attributes, or the policy does not fit"
    return f"'sha256-{b64encode(sha256(contents[0].encode()).digest()).decode()}'"


def example_documents() -> list[dict[str, str]]:
    """Returns the bundled documents as `{"id", "title", "text"}`, sorted by title."""
    paths = (path for path in files("kvmosaic").joinpath("bundled", "documents").iterdir())
    texts = {path.name.removesuffix(".txt"): path for path in paths if path.name.endswith(".txt")}
    return [
        {"id": _id_of(title), "title": title, "text": path.read_text(encoding="utf-8").strip()}
        for title, path in sorted(texts.items())
    ]


def example_questions() -> list[dict[str, Any]]:
    """Returns questions about them as `{"question", "documents"}`, with the ids to read in this order."""
    return [{"question": question, "documents": [_id_of(title) for title in titles]} for question, titles in _QUESTIONS]


def _id_of(title: str) -> str:
    return title.lower().replace(" ", "-")


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """State of the caches at one moment."""

    block_map: BlockMap | None
    """None unless requested."""
    held_blocks: Mapping[str, int]
    """By tenant: blocks of the request pool that its running requests hold, each counted once."""


def take_snapshot(engine: Engine, tenants: Iterable[str], *, with_blocks: bool) -> EngineSnapshot:
    """Reads the caches; call it on the engine's thread.

    Args:
        engine: the engine to read.
        tenants: names of the tenants that have viewers.
        with_blocks: whether a viewer may see the blocks of all tenants.
    """
    return EngineSnapshot(
        block_map=engine.kv_cache.block_map() if with_blocks else None,
        held_blocks={tenant: len(block_ids) for tenant, block_ids in _held(engine, tenants).items()},
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


MAX_SEGMENTS = 256
"""Maximum number of segments sent per record; the rest are summed up."""
_EQUAL_BYTES = re.compile(rb"(.)\1*", re.DOTALL)


def record_view(number: int, record: RequestRecord, *, with_segments: bool = True) -> dict[str, Any]:
    """Returns the view of one ended request, for the strips and the charts."""
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


def chunks_view(statistics: ChunkCacheStats) -> dict[str, Any]:
    """Returns the counters of the chunk cache, all tenants together."""
    return {
        "cached": statistics.cached_chunks,
        "pinned": statistics.pinned_chunks,
        "lookups": statistics.lookups,
        "hits": statistics.hits,
        "evictions": statistics.evictions,
        "lookup_ms": statistics.average_lookup_ms,
        "allocate_ms": statistics.average_allocate_ms,
        "compute_ms": statistics.average_compute_ms,
    }


def usage_view(usage: TenantUsage) -> dict[str, Any]:
    """Returns what one tenant has in the chunk cache."""
    return {"num_chunks": usage.num_chunks, "num_bytes": usage.num_bytes, "quota_bytes": usage.quota_bytes}


def pools_view(figures: EngineFigures) -> list[dict[str, Any]]:
    """Returns how full the pools are, all tenants together; for admins."""
    caches = figures.caches
    fills = {
        "chunk_cache": (caches.total_blocks, caches.used_blocks),
        "request": (caches.request_total_blocks, caches.request_used_blocks),
    }
    return [
        {"name": pool, "num_blocks": num_blocks, "used": used, "block_bytes": figures.block_bytes[pool]}
        for pool, (num_blocks, used) in fills.items()
    ]


def own_pools_view(usage: TenantUsage, held_blocks: int | None, figures: EngineFigures) -> list[dict[str, Any]]:
    """Returns what one tenant has in the pools, without how full they are: that would reveal what others have.

    Args:
        usage: its chunks.
        held_blocks: blocks of the request pool that its running requests hold; None: not known yet.
        figures: figures of the engine.
    """
    chunks = {
        "name": "chunk_cache",
        "block_bytes": figures.block_bytes["chunk_cache"],
        "used": usage.num_blocks,
        "idle": usage.num_idle_blocks,
        "pinned": usage.num_pinned_blocks,
        "quota_bytes": usage.quota_bytes,
    }
    held = {"name": "request", "block_bytes": figures.block_bytes["request"], "used": held_blocks}
    return [chunks] if held_blocks is None else [chunks, held]


def tier_view(moment: TierMoment) -> dict[str, Any]:
    """Returns how much a tier below the device holds, and whether it answers."""
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


def blocks_view(block_map: BlockMap, block_bytes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the states of all blocks, run-length encoded; for admins.

    Args:
        block_map: blocks of both pools.
        block_bytes: bytes of one block, by pool.
    """
    states = {"chunk_cache": block_map.chunk_cache, "request": block_map.request}
    return {
        "pools": [
            {
                "name": pool,
                "num_blocks": len(blocks),
                "used": len(blocks) - blocks.count(BlockState.FREE),
                "block_bytes": block_bytes[pool],
                "runs": encode_runs(blocks),
            }
            for pool, blocks in states.items()
        ]
    }


def encode_runs(states: bytes) -> list[int]:
    """Encodes runs as: state, number of blocks, state, number of blocks, ..."""
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
        "miss": segment.miss,
    }
