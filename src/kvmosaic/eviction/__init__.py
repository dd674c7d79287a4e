"""Eviction policies, by name, and the queue that they order."""

from kvmosaic.eviction.policies import (
    GDSF,
    LFU,
    LRU,
    POLICIES,
    Candidate,
    Evictable,
    EvictionPolicy,
    EvictionQueue,
    Priority,
    check_priority,
    choose,
)

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "POLICIES",
    "Candidate",
    "Evictable",
    "EvictionPolicy",
    "EvictionQueue",
    "Priority",
    "check_priority",
    "choose",
]
