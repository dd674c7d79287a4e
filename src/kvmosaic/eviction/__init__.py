"""Eviction policies."""

from kvmosaic.eviction.choose import POLICIES, choose
from kvmosaic.eviction.line import EvictionLine
from kvmosaic.eviction.lru import LRU
from kvmosaic.eviction.policy import Candidate, EvictionPolicy
from kvmosaic.eviction.priority import Priority
from kvmosaic.eviction.queue import EvictionQueue

__all__ = ["LRU", "POLICIES", "Candidate", "EvictionLine", "EvictionPolicy", "EvictionQueue", "Priority", "choose"]
