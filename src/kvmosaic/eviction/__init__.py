"""Eviction policies, by name."""

from collections.abc import Callable
from typing import Final

from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction.lfu import LFU
from kvmosaic.eviction.lru import LRU
from kvmosaic.eviction.policy import Candidate, EvictionPolicy
from kvmosaic.eviction.priority import Priority
from kvmosaic.eviction.queue import Evictable, EvictionQueue

__all__ = ["LFU", "LRU", "POLICIES", "Candidate", "Evictable", "EvictionPolicy", "EvictionQueue", "Priority", "choose"]

POLICIES: Final[dict[str, Callable[[], EvictionPolicy]]] = {"lru": LRU, "lfu": LFU, "priority": Priority}
"""To add a policy: write its file, and add it here."""


def choose(policy: str | EvictionPolicy) -> EvictionPolicy:
    """The policy with this name, or the given instance.

    Raises:
        InvalidConfig: an unknown name, or an object without a `rank`.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise InvalidConfig(f"eviction is {policy!r}; choose " + " or ".join(repr(name) for name in POLICIES))
        return POLICIES[policy]()
    if not isinstance(policy, EvictionPolicy):
        raise InvalidConfig(
            f"eviction is {policy!r}; give a name or an object with a name and a method rank(candidate)"
        )
    return policy
