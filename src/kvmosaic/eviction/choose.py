"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction.lru import LRU
from kvmosaic.eviction.policy import EvictionPolicy
from kvmosaic.eviction.priority import Priority

POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType({"lru": LRU, "priority": Priority})


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
