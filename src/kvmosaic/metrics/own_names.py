"""Metric families of kvmosaic's own: chunks, pools, documents, and the server."""

from __future__ import annotations

from kvmosaic.metrics import family
from kvmosaic.metrics.family import Family, Kind

ACTIONS = ("reused", "moved", "computed")
"""Values of the label `action`, one for each token: reused at its position, reused at another one, computed."""
POOLS = ("request", "chunk_cache")
STATES = ("free", "idle", "held")
"""Values of the label `state`, one for each block: free; cached and evictable; in use or pinned."""
STORED = ("stored", "dropped", "failed")
FETCHED = ("fetched", "missed", "late", "invalid", "skipped")
"""Values of the label `outcome`: results of stores to the tiers, and of fetches from them."""
POLICIES = ("first", "names", "alike", "documents", "deviation", "query", "combined", "full", "other")
"""Values of the label `policy`: repair policies without their numbers; other: a custom one."""
REPAIR_ACTIONS = ("reused", "computed")


def _family(name: str, kind: Kind, meaning: str, *labels: str, bounds: tuple[float, ...] = ()) -> Family:
    return Family(f"kvmosaic:{name}", kind, meaning, ("model_name", *labels), bounds)


CHUNK_LOOKUPS = _family("chunk_lookups", "counter", "Documents of prompts, looked up in the chunk cache.")
CHUNK_HITS = _family(
    "chunk_hits", "counter", "Of these, found: ready, being computed for another request, or in a tier."
)
CHUNK_MISSES = _family("chunk_misses", "counter", "Of these, not found, and computed.")
CHUNK_TOKENS = _family(
    "chunk_tokens",
    "counter",
    "Tokens of these documents, by `action`: reused, moved (reused at another position), or computed.",
    "action",
)
CHUNK_EVICTIONS = _family("chunk_evictions", "counter", "Chunks evicted.")
LOST_REUSE_TOKENS = _family(
    "lost_reuse_tokens", "counter", "Tokens that were computed and could have been cache hits, by `reason`.", "reason"
)
CHUNKS_CACHED = _family("chunk_entries", "gauge", "Chunks in the cache, also unfinished ones.")
CHUNKS_PINNED = _family("chunk_pinned_entries", "gauge", "Of these, pinned.")
CHUNK_LOOKUP_SECONDS = _family("chunk_lookup_seconds", "summary", "To look up one document.")
CHUNK_ALLOCATE_SECONDS = _family("chunk_allocate_seconds", "summary", "To allocate one prompt.")
CHUNK_COMPUTE_SECONDS = _family(
    "chunk_compute_seconds", "summary", "To compute one missing document: its share of its steps."
)
PREFIX_EVICTIONS = _family("prefix_evictions", "counter", "Blocks evicted from the prefix cache.")
PREFIX_BLOCKS = _family("prefix_blocks", "gauge", "Blocks in the prefix cache.")

POOL_BLOCKS = _family(
    "pool_blocks",
    "gauge",
    "Blocks of a pool (request or chunk_cache), by `state`: free, idle (cached, evictable) or held (in use or pinned).",
    *("pool", "tier", "state"),
)
POOL_BYTES = _family("pool_bytes", "gauge", "The same in bytes.", "pool", "tier", "state")
POOL_SHARED_BLOCKS = _family("pool_shared_blocks", "gauge", "Blocks with more than one reference.", "pool", "tier")

TIER_ENTRIES = _family("tier_entries", "gauge", "Chunks in a host or disk tier.", "tier")
TIER_BYTES = _family("tier_bytes", "gauge", "Bytes of these entries.", "tier")
TIER_QUOTA = _family("tier_quota_bytes", "gauge", "Quota of a tier, if it has one.", "tier")
TIER_UP = _family("tier_up", "gauge", "1 while a tier is read; 0 while its breaker is open.", "tier")
TIER_HITS = _family("tier_hits", "counter", "Entries that were requested and found.", "tier")
TIER_MISSES = _family("tier_misses", "counter", "Entries that were requested and not found.", "tier")
TIER_PUTS = _family("tier_puts", "counter", "Entries stored.", "tier")
TIER_WRITTEN_BYTES = _family("tier_written_bytes", "counter", "Bytes of these entries.", "tier")
TIER_READ_BYTES = _family("tier_read_bytes", "counter", "Bytes of entries found.", "tier")
TIER_EVICTIONS = _family("tier_evictions", "counter", "Entries evicted.", "tier")
TIER_FAILURES = _family("tier_failures", "counter", "Failed calls.", "tier")
TIER_OPENED = _family("tier_breaker_openings", "counter", "Times that the breaker opened after failures.", "tier")
TIER_SKIPPED = _family("tier_breaker_skips", "counter", "Calls refused by an open breaker.", "tier")
TIER_QUARANTINED = _family("tier_quarantined", "counter", "Damaged entries, quarantined.", "tier")
TIER_LOAD_SPEED = _family(
    "tier_load_bytes_per_second",
    "gauge",
    "Speed of loading, verifying and decoding; none before the first hit.",
    "tier",
)
TIER_STORES = _family(
    "tier_stores",
    "counter",
    "Chunks for the tiers, by `outcome`: stored, dropped (too many pending bytes) or failed.",
    "outcome",
)
TIER_FETCHES = _family(
    "tier_fetches",
    "counter",
    "Chunks looked for in the tiers, by `outcome`: fetched, missed, late (after the request's timeout), invalid "
    "(quarantined) or skipped (not asked, because computing is faster).",
    "outcome",
)
TIER_PENDING_BYTES = _family("tier_pending_bytes", "gauge", "Bytes of chunks that wait to be written.")
CHUNK_LOADS = _family("chunk_loads", "counter", "Chunks loaded from a tier.")
CHUNK_LOADED_TOKENS = _family("chunk_loaded_tokens", "counter", "Tokens of these chunks.")

TENANT_BYTES = _family(
    "tenant_chunk_bytes",
    "gauge",
    'Bytes of cached chunks of a tenant; after the first 32, tenants share "(others)".',
    "tenant",
)
TENANT_QUOTA = _family("tenant_quota_bytes", "gauge", "Quota of a tenant, if it has one.", "tenant")
DOCUMENTS = _family("documents", "gauge", "Documents stored at /v1/documents.")
DOCUMENT_BYTES = _family("document_bytes", "gauge", "Bytes of their texts.")

PREEMPTIONS = _family(
    "preemptions", "counter", "Preempted answers, by `kind`: recompute or swap (to host memory and back).", "kind"
)
SWAPPED_BYTES = _family("swapped_bytes", "counter", "Bytes swapped, by `direction`: out or in.", "direction")
SWAP_SPACE_BYTES = _family("swap_space_bytes", "gauge", "Bytes of preempted answers in host memory.")
QUEUE_SECONDS = _family(
    "request_queue_seconds",
    "histogram",
    "As vllm:request_queue_time_seconds, by `priority`: low (below 0), normal (0) or high.",
    "priority",
    bounds=family.REQUEST_LATENCY,
)
PROMPT_TOKENS = _family(
    "prompt_tokens", "counter", "As vllm:prompt_tokens, by `action`: reused, moved, or computed.", "action"
)
REPAIRS = _family(
    "repairs",
    "counter",
    "Prompts with repairs, by `policy`: first, names, alike, documents, deviation, query, combined, full, or other.",
    "policy",
)
REPAIRED_TOKENS = _family(
    "repaired_tokens",
    "counter",
    "Repaired tokens that answers read, by `action`: computed, or reused from an earlier prompt.",
    "action",
)
REPAIR_SECONDS = _family(
    "repair_seconds",
    "histogram",
    "To choose and repair the tokens of one prompt: their share of its steps.",
    bounds=family.TIME_TO_FIRST_TOKEN,
)
UNCACHED_TTFT = _family(
    "request_uncached_ttft_seconds",
    "histogram",
    "Estimated time to the first token without any reuse; compare vllm:time_to_first_token_seconds.",
    bounds=family.TIME_TO_FIRST_TOKEN,
)
REQUESTS = _family(
    "requests",
    "counter",
    "Prompts that ended, by `status`: complete, cancelled (the client left) or failed.",
    *("route", "status"),
)
REJECTIONS = _family("admission_rejections", "counter", "Requests refused with 429 because too many wait.")
HTTP_REQUESTS = _family(
    "http_requests",
    "counter",
    "HTTP requests answered; routes are those of the OpenAPI document.",
    *("method", "route", "status"),
)
ENGINE_UP = _family(
    "engine_up", "gauge", "1 while the engine answers; 0 while its steps fail, and when it has stopped."
)
ENGINE_ASLEEP = _family("engine_asleep", "gauge", "1 while the server sleeps.")
DRAINING = _family("draining", "gauge", "1 while the server finishes requests and takes no new ones.")
SNAPSHOT_AGE = _family(
    "snapshot_age_seconds", "gauge", "Age of the numbers of the caches, published after each step; 0 while idle."
)
COMPOSITION = _family(
    "composition_info",
    "gauge",
    "Always 1; the labels have the defaults of requests, `profile` the day of the model's profile.",
    *("position_strategy", "chunk_context", "repair", "profile"),
)
BUILD = _family(
    "build_info", "gauge", "Always 1; the labels have the versions.", *("version", "python", "torch", "transformers")
)
ENGINE = _family(
    "engine_info",
    "gauge",
    "Always 1; the labels have the engine, its package and version, its attention backend, the types of weights and "
    "cache, and the device.",
    *("name", "build", "attention", "weights", "cache", "device"),
)
TIER_COUNTERS = {
    TIER_HITS: "hits",
    TIER_MISSES: "misses",
    TIER_PUTS: "puts",
    TIER_WRITTEN_BYTES: "put_bytes",
    TIER_READ_BYTES: "get_bytes",
    TIER_EVICTIONS: "evictions",
    TIER_FAILURES: "failures",
    TIER_QUARANTINED: "quarantined",
}
"""Families of each tier, by the fields of its `TierStat`."""
TIER_OUTCOMES = {TIER_STORES: STORED, TIER_FETCHES: FETCHED}
"""Families of all tiers together, by the fields of their `TieredStoreStats`."""
