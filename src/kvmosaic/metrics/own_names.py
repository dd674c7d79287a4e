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
POLICIES = ("first", "deviation", "query", "combined", "temperature", "full", "other")
"""Values of the label `policy`: repair policies without their numbers; other: a custom one."""
REPAIR_ACTIONS = ("reused", "computed")


def _family(name: str, kind: Kind, meaning: str, *labels: str, bounds: tuple[float, ...] = ()) -> Family:
    return Family(f"kvmosaic:{name}", kind, meaning, ("model_name", *labels), bounds)


CHUNK_LOOKUPS = _family("chunk_lookups", "counter", "Documents of prompts, each looked up in the chunk cache.")
CHUNK_HITS = _family(
    "chunk_hits", "counter", "Of these, found: ready, being computed for another request, or in a tier."
)
CHUNK_MISSES = _family("chunk_misses", "counter", "Of these, not found, and computed.")
CHUNK_TOKENS = _family(
    "chunk_tokens",
    "counter",
    "Tokens of these documents, by `action`: reused where they were computed, moved (reused at another position), or "
    "computed.",
    "action",
)
CHUNK_EVICTIONS = _family("chunk_evictions", "counter", "Chunks that left the cache to make room.")
LOST_REUSE_TOKENS = _family(
    "lost_reuse_tokens",
    "counter",
    "Tokens that were computed and could have been cache hits, by `reason`: a changing system text, eviction, "
    "documents that differ in white space or numbers only, another order in a conversation, documents that are part of "
    "a message, conversations that began on another replica.",
    "reason",
)
CHUNKS_CACHED = _family("chunk_entries", "gauge", "Chunks in the cache, those being computed included.")
CHUNKS_PINNED = _family("chunk_pinned_entries", "gauge", "Of these, pinned.")
CHUNK_LOOKUP_SECONDS = _family(
    "chunk_lookup_seconds", "summary", "To find one document: hash its tokens and look into the index."
)
CHUNK_ALLOCATE_SECONDS = _family(
    "chunk_allocate_seconds",
    "summary",
    "To allocate one prompt with all of its segments: hold what is reused, make room.",
)
CHUNK_COMPUTE_SECONDS = _family(
    "chunk_compute_seconds", "summary", "To compute one missing document: its share of the steps it was in."
)
PREFIX_EVICTIONS = _family("prefix_evictions", "counter", "Blocks that left the prefix cache to make room.")
PREFIX_BLOCKS = _family("prefix_blocks", "gauge", "Blocks that the prefix cache keeps.")

POOL_BLOCKS = _family(
    "pool_blocks",
    "gauge",
    "Blocks of a pool (request or chunk_cache) in a tier (device), by `state`: free, idle (kept for later, leaves when "
    "room is needed) or held (in use or pinned).",
    *("pool", "tier", "state"),
)
POOL_BYTES = _family("pool_bytes", "gauge", "The same in bytes.", "pool", "tier", "state")
POOL_SHARED_BLOCKS = _family(
    "pool_shared_blocks", "gauge", "Blocks with more than one reference, each stored once.", "pool", "tier"
)

TIER_ENTRIES = _family(
    "tier_entries",
    "gauge",
    "Chunks in a host or disk tier. Redis and object stores count their own.",
    "tier",
)
TIER_BYTES = _family("tier_bytes", "gauge", "Bytes of these entries.", "tier")
TIER_QUOTA = _family(
    "tier_quota_bytes", "gauge", "Most bytes that a tier keeps; those without a limit of their own have none.", "tier"
)
TIER_UP = _family(
    "tier_up", "gauge", "1 while a tier is read; 0 while it is left alone because it failed, until it answers.", "tier"
)
TIER_HITS = _family("tier_hits", "counter", "Entries that were asked for and found.", "tier")
TIER_MISSES = _family("tier_misses", "counter", "Entries that were asked for and not found.", "tier")
TIER_PUTS = _family("tier_puts", "counter", "Entries that were stored.", "tier")
TIER_WRITTEN_BYTES = _family("tier_written_bytes", "counter", "Bytes of these entries.", "tier")
TIER_READ_BYTES = _family("tier_read_bytes", "counter", "Bytes of entries that were found.", "tier")
TIER_EVICTIONS = _family("tier_evictions", "counter", "Entries that left a tier to make room.", "tier")
TIER_FAILURES = _family("tier_failures", "counter", "Calls of a tier that failed.", "tier")
TIER_OPENED = _family("tier_breaker_openings", "counter", "Times that a tier was given up after failures.", "tier")
TIER_SKIPPED = _family(
    "tier_breaker_skips", "counter", "Calls that were refused without asking a tier that was given up.", "tier"
)
TIER_QUARANTINED = _family(
    "tier_quarantined", "counter", "Entries that were put aside because they were not what they should be.", "tier"
)
TIER_LOAD_SPEED = _family(
    "tier_load_bytes_per_second",
    "gauge",
    "How fast chunks come from a tier, verifying and decoding included; none before the first hit.",
    "tier",
)
TIER_STORES = _family(
    "tier_stores",
    "counter",
    "Chunks on their way to the tiers, by `outcome`: stored, dropped (too much waited to be written) or failed.",
    "outcome",
)
TIER_FETCHES = _family(
    "tier_fetches",
    "counter",
    "Chunks that were looked for in the tiers, by `outcome`: fetched or missed. Besides: late (after the "
    "request's timeout), invalid (quarantined; of the tiers asked), skipped (not asked, because computing is faster).",
    "outcome",
)
TIER_PENDING_BYTES = _family("tier_pending_bytes", "gauge", "Bytes of chunks that wait to be written to the tiers.")
CHUNK_LOADS = _family("chunk_loads", "counter", "Chunks that were copied to the device from a tier, not computed.")
CHUNK_LOADED_TOKENS = _family("chunk_loaded_tokens", "counter", "Tokens of these chunks.")

TENANT_BYTES = _family(
    "tenant_chunk_bytes",
    "gauge",
    "Bytes of cached chunks of a tenant. The first 32 configured tenants have a series of their own, all others share "
    'the one named "(others)".',
    "tenant",
)
TENANT_QUOTA = _family(
    "tenant_quota_bytes",
    "gauge",
    "Most bytes of cached chunks of a tenant; tenants without a quota have none.",
    "tenant",
)
DOCUMENTS = _family("documents", "gauge", "Documents stored at /v1/documents, of all tenants.")
DOCUMENT_BYTES = _family(
    "document_bytes", "gauge", "Bytes of their texts; what was computed from them is in the pools."
)

PREEMPTIONS = _family(
    "preemptions",
    "counter",
    "Answers that gave their blocks away, by `kind`: recompute (all is computed again, or found) or swap (moved to the "
    "memory of the host and back).",
    "kind",
)
SWAPPED_BYTES = _family(
    "swapped_bytes", "counter", "Bytes of these blocks that were moved, by `direction`: out or in.", "direction"
)
SWAP_SPACE_BYTES = _family("swap_space_bytes", "gauge", "Bytes of them in the memory of the host now.")
QUEUE_SECONDS = _family(
    "request_queue_seconds",
    "histogram",
    "From arrival to the first step as vllm:request_queue_time_seconds, by `priority`: low (below 0), normal (0) or "
    "high.",
    "priority",
    bounds=family.REQUEST_LATENCY,
)
PROMPT_TOKENS = _family(
    "prompt_tokens",
    "counter",
    "Prompt tokens as vllm:prompt_tokens, by `action`: reused where they were computed, moved, or computed.",
    "action",
)
REPAIRS = _family(
    "repairs",
    "counter",
    "Prompts whose documents were repaired, by `policy`: first, deviation, query, combined, temperature, full, or "
    "other (one that is not ours).",
    "policy",
)
REPAIRED_TOKENS = _family(
    "repaired_tokens",
    "counter",
    "Tokens of documents that answers read repaired, by `action`: computed for this prompt, or reused from an earlier "
    "one.",
    "action",
)
REPAIR_SECONDS = _family(
    "repair_seconds",
    "histogram",
    "Spent on choosing and repairing the tokens of one prompt: their share of the steps they were in.",
    bounds=family.TIME_TO_FIRST_TOKEN,
)
UNCACHED_TTFT = _family(
    "request_uncached_ttft_seconds",
    "histogram",
    "Estimated time to the first token if nothing had been reused: the measured one, and for every reused token the "
    "mean time that a computed one takes. To be held against vllm:time_to_first_token_seconds.",
    bounds=family.TIME_TO_FIRST_TOKEN,
)
REQUESTS = _family(
    "requests",
    "counter",
    "Prompts that ended, by route and `status`: complete, cancelled (the client left) or failed.",
    *("route", "status"),
)
REJECTIONS = _family(
    "admission_rejections", "counter", "Requests refused with 429 because too many wait already, in all or of a tenant."
)
HTTP_REQUESTS = _family(
    "http_requests",
    "counter",
    "HTTP requests answered, by method, route (as in the OpenAPI document, never the address that was asked for) and "
    "status.",
    *("method", "route", "status"),
)
ENGINE_UP = _family(
    "engine_up", "gauge", "1 while the engine answers; 0 while its steps fail again and again, and when it has stopped."
)
ENGINE_ASLEEP = _family(
    "engine_asleep", "gauge", "1 while the caches have no memory on the device, until the server is woken."
)
DRAINING = _family("draining", "gauge", "1 while the server finishes what is under way and takes no new requests.")
SNAPSHOT_AGE = _family(
    "snapshot_age_seconds",
    "gauge",
    "How old the numbers of the caches are. The engine publishes them after each step, so this is how long the present "
    "one takes; 0 while there is nothing to do.",
)
COMPOSITION = _family(
    "composition_info",
    "gauge",
    "Always 1; how prompts are composed that do not say it themselves is in the labels, and in `profile` the day of "
    "the model's profile, if one is followed.",
    *("position_strategy", "chunk_context", "repair", "profile"),
)
BUILD = _family(
    "build_info", "gauge", "Always 1; the versions are in the labels.", *("version", "python", "torch", "transformers")
)
ENGINE = _family(
    "engine_info",
    "gauge",
    "Always 1; what computes is in the labels: the engine's name (transformers or llama.cpp), its package and version, "
    "its attention backend, the types of weights and of cached keys and values, and where the weights are.",
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
