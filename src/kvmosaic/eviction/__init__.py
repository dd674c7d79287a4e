"""Eviction policies."""

from kvmosaic.eviction.choose import POLICIES, choose
from kvmosaic.eviction.lfu import LFU
from kvmosaic.eviction.lru import LRU
from kvmosaic.eviction.policy import Candidate, EvictionPolicy
from kvmosaic.eviction.priority import Priority
from kvmosaic.eviction.queue import Evictable, EvictionQueue

__all__ = ["LFU", "LRU", "POLICIES", "Candidate", "Evictable", "EvictionPolicy", "EvictionQueue", "Priority", "choose"]
