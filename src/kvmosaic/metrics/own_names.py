"""Metric families of kvmosaic's own: chunks, pools, documents, and the server."""

from __future__ import annotations

from kvmosaic.metrics.family import family_named

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


CHUNK_LOOKUPS = family_named("kvmosaic:chunk_lookups")
CHUNK_HITS = family_named("kvmosaic:chunk_hits")
CHUNK_MISSES = family_named("kvmosaic:chunk_misses")
CHUNK_TOKENS = family_named("kvmosaic:chunk_tokens")
CHUNK_EVICTIONS = family_named("kvmosaic:chunk_evictions")
LOST_REUSE_TOKENS = family_named("kvmosaic:lost_reuse_tokens")
CHUNKS_CACHED = family_named("kvmosaic:chunk_entries")
CHUNKS_PINNED = family_named("kvmosaic:chunk_pinned_entries")
CHUNK_LOOKUP_SECONDS = family_named("kvmosaic:chunk_lookup_seconds")
CHUNK_ALLOCATE_SECONDS = family_named("kvmosaic:chunk_allocate_seconds")
CHUNK_COMPUTE_SECONDS = family_named("kvmosaic:chunk_compute_seconds")
PREFIX_EVICTIONS = family_named("kvmosaic:prefix_evictions")
PREFIX_BLOCKS = family_named("kvmosaic:prefix_blocks")

POOL_BLOCKS = family_named("kvmosaic:pool_blocks")
POOL_BYTES = family_named("kvmosaic:pool_bytes")
POOL_SHARED_BLOCKS = family_named("kvmosaic:pool_shared_blocks")

TIER_ENTRIES = family_named("kvmosaic:tier_entries")
TIER_BYTES = family_named("kvmosaic:tier_bytes")
TIER_QUOTA = family_named("kvmosaic:tier_quota_bytes")
TIER_UP = family_named("kvmosaic:tier_up")
TIER_HITS = family_named("kvmosaic:tier_hits")
TIER_MISSES = family_named("kvmosaic:tier_misses")
TIER_PUTS = family_named("kvmosaic:tier_puts")
TIER_WRITTEN_BYTES = family_named("kvmosaic:tier_written_bytes")
TIER_READ_BYTES = family_named("kvmosaic:tier_read_bytes")
TIER_EVICTIONS = family_named("kvmosaic:tier_evictions")
TIER_FAILURES = family_named("kvmosaic:tier_failures")
TIER_OPENED = family_named("kvmosaic:tier_breaker_openings")
TIER_SKIPPED = family_named("kvmosaic:tier_breaker_skips")
TIER_QUARANTINED = family_named("kvmosaic:tier_quarantined")
TIER_LOAD_SPEED = family_named("kvmosaic:tier_load_bytes_per_second")
TIER_STORES = family_named("kvmosaic:tier_stores")
TIER_FETCHES = family_named("kvmosaic:tier_fetches")
TIER_PENDING_BYTES = family_named("kvmosaic:tier_pending_bytes")
CHUNK_LOADS = family_named("kvmosaic:chunk_loads")
CHUNK_LOADED_TOKENS = family_named("kvmosaic:chunk_loaded_tokens")

TENANT_BYTES = family_named("kvmosaic:tenant_chunk_bytes")
TENANT_QUOTA = family_named("kvmosaic:tenant_quota_bytes")
DOCUMENTS = family_named("kvmosaic:documents")
DOCUMENT_BYTES = family_named("kvmosaic:document_bytes")

PREEMPTIONS = family_named("kvmosaic:preemptions")
SWAPPED_BYTES = family_named("kvmosaic:swapped_bytes")
SWAP_SPACE_BYTES = family_named("kvmosaic:swap_space_bytes")
QUEUE_SECONDS = family_named("kvmosaic:request_queue_seconds")
PROMPT_TOKENS = family_named("kvmosaic:prompt_tokens")
REPAIRS = family_named("kvmosaic:repairs")
REPAIRED_TOKENS = family_named("kvmosaic:repaired_tokens")
REPAIR_SECONDS = family_named("kvmosaic:repair_seconds")
UNCACHED_TTFT = family_named("kvmosaic:request_uncached_ttft_seconds")
REQUESTS = family_named("kvmosaic:requests")
REJECTIONS = family_named("kvmosaic:admission_rejections")
HTTP_REQUESTS = family_named("kvmosaic:http_requests")
ENGINE_UP = family_named("kvmosaic:engine_up")
ENGINE_ASLEEP = family_named("kvmosaic:engine_asleep")
DRAINING = family_named("kvmosaic:draining")
SNAPSHOT_AGE = family_named("kvmosaic:snapshot_age_seconds")
COMPOSITION = family_named("kvmosaic:composition_info")
BUILD = family_named("kvmosaic:build_info")
ENGINE = family_named("kvmosaic:engine_info")
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
