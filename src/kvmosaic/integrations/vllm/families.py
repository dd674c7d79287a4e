"""Metric families that the plugin adds to vLLM's /metrics; names of our own server where the meaning is the same."""

from __future__ import annotations

from kvmosaic.metrics.family import Family, Kind
from kvmosaic.metrics.own_names import (
    ACTIONS,
    CHUNK_HITS,
    CHUNK_LOADED_TOKENS,
    CHUNK_LOADS,
    CHUNK_LOOKUPS,
    CHUNK_MISSES,
    CHUNK_TOKENS,
    REPAIRED_TOKENS,
    TIER_COUNTERS,
    TIER_OUTCOMES,
)


def _family(name: str, kind: Kind, meaning: str, *labels: str) -> Family:
    return Family(f"kvmosaic:{name}", kind, meaning, ("model_name", *labels))


COMPOSED = _family("composed_requests", "counter", "Requests that were put together from chunks.")
BYPASSED = _family(
    "bypassed_requests",
    "counter",
    "Requests with documents that were answered as ordinary prompts, by `reason`.",
    "reason",
)
CHUNK_WAITS = _family("chunk_waits", "counter", "Chunks that were found while they were computed for another request.")
CHUNK_PROMPTS = _family("chunk_prompts", "counter", "Internal requests, each of which computes one missing chunk.")
CHUNK_PROMPTS_RUNNING = _family("chunk_prompts_running", "gauge", "The ones of these that are not done.")
MOVED_TOKENS = _family(
    "moved_tokens", "counter", "Tokens copied into the blocks of requests, at the same position or at another."
)
MOVE_SECONDS = _family("move_seconds", "counter", "Time that the workers took to copy them, of all workers together.")

FAMILIES = (
    *(COMPOSED, BYPASSED, CHUNK_LOOKUPS, CHUNK_HITS, CHUNK_MISSES, CHUNK_TOKENS, CHUNK_WAITS),
    *(CHUNK_PROMPTS, CHUNK_PROMPTS_RUNNING, CHUNK_LOADS, CHUNK_LOADED_TOKENS),
    *(MOVED_TOKENS, MOVE_SECONDS, REPAIRED_TOKENS),
    *TIER_COUNTERS,
    *TIER_OUTCOMES,
)
BY_NAME = {family.name: family for family in FAMILIES}
LABEL_VALUES = {CHUNK_TOKENS: ACTIONS}
"""Label values that are exported from the start, at zero."""
