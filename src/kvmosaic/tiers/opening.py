"""Opening the tiers that the settings name, each behind a breaker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.host import Allocate
from kvmosaic.tiers.tier import Tier
from kvmosaic.tiers.url import open_tier


def open_tiers(places: Sequence[str | Any], *, allocate: Allocate | None = None) -> list[Tier]:
    """Opens tiers, fastest first; all of them or none.

    Args:
        places: URLs (see `open_tier`), or tiers that are open already.
        allocate: where a host tier takes its memory from; see `HostTier`.

    Raises:
        InvalidConfig: a URL that says nothing sensible, a place that cannot be used, or neither a URL nor a tier.
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
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened
