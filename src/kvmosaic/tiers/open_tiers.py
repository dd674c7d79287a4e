"""Opening of the configured tiers, each wrapped in a circuit breaker."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierError
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.deadline import Deadline
from kvmosaic.tiers.host import Allocate
from kvmosaic.tiers.tier import Tier
from kvmosaic.tiers.url import open_tier

_GREETING_SECONDS = 0.5
_NO_KEY = Key(bytes(32))


def open_tiers(places: Sequence[str | Any], *, allocate: Allocate | None = None) -> list[Tier]:
    """Opens tiers, fastest first; all of them or none.

    Args:
        places: URLs (see `open_tier`), or tiers that are open already.
        allocate: allocator of a host tier's memory; see `HostTier`.

    Raises:
        InvalidConfig: an invalid URL, an unusable location, or neither a URL nor a tier.
    """
    opened: list[Tier] = []
    try:
        for place in places:
            if isinstance(place, str):
                tier = open_tier(place, allocate=allocate)
            elif isinstance(place, Tier):
                tier = place
            else:
                raise InvalidConfig(
                    f"a tier is a URL such as 'disk:/var/cache/kvmosaic?quota=100GiB', or a Tier; got {place!r:.80}"
                )
            opened.append(Breaker(tier))
            _greet(opened[-1])
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def _greet(tier: Tier) -> None:
    """Probes a tier: if it is unreachable, its breaker logs that now, and not when the first chunk is stored."""
    with contextlib.suppress(TierError):
        tier.exists_many([_NO_KEY], Deadline(_GREETING_SECONDS))
