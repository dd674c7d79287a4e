"""Gauges of the tiers: what each holds and does, and the traffic between tiers and device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmosaic.metrics import Sample, own_names
from kvmosaic.tiers import TierStat
from kvmosaic.tiers.breaker import Breaker, BreakerStat, BreakerState

if TYPE_CHECKING:
    from kvmosaic.engine import ChunkOffloader


@dataclass(frozen=True, slots=True)
class TierMoment:
    """State of one tier at one moment."""

    label: str
    """Its name, with a number if several tiers have it."""
    stat: TierStat
    breaker: BreakerStat | None
    is_up: bool
    """Whether it is read: no breaker is open for reads."""
    bytes_per_second: float | None
    """Measured read bandwidth; None before the first hit."""


def look_at_tiers(offloader: ChunkOffloader | None) -> list[TierMoment]:
    """Returns the state of all tiers, fastest first, without waiting for any. On any thread."""
    if offloader is None:
        return []
    tiered_store, moments, num_named = offloader.tiered_store, list[TierMoment](), dict[str, int]()
    for tier in tiered_store.tiers:
        number = num_named[tier.name] = num_named.get(tier.name, 0) + 1
        label = tier.name if number == 1 else f"{tier.name}-{number}"
        breaker = tier.breaker_stat if isinstance(tier, Breaker) else None
        is_up = not isinstance(tier, Breaker) or tier.read_stat.state is BreakerState.CLOSED
        moments.append(TierMoment(label, tier.stat(), breaker, is_up, tiered_store.bytes_per_second(tier)))
    return moments


def tier_readings(offloader: ChunkOffloader | None) -> Iterator[Sample]:
    """Returns all gauges of the tiers; nothing without tiers."""
    if offloader is None:
        return
    for moment in look_at_tiers(offloader):
        yield from _readings_of(moment)
    stats = offloader.tiered_store.stats
    for family, outcomes in own_names.TIER_OUTCOMES.items():
        for outcome in outcomes:
            yield Sample(family, getattr(stats, outcome), {"outcome": outcome})
    yield Sample(own_names.TIER_PENDING_BYTES, offloader.tiered_store.pending_bytes)


def _readings_of(moment: TierMoment) -> Iterator[Sample]:
    stat, labels = moment.stat, {"tier": moment.label}
    values = {
        own_names.TIER_ENTRIES: stat.num_entries,
        own_names.TIER_BYTES: stat.num_bytes,
        own_names.TIER_UP: float(moment.is_up),
        **{family: getattr(stat, field) for family, field in own_names.TIER_COUNTERS.items()},
    }
    for family, value in values.items():
        yield Sample(family, value, labels)
    if stat.quota_bytes is not None:
        yield Sample(own_names.TIER_QUOTA, stat.quota_bytes, labels)
    if moment.bytes_per_second is not None:
        yield Sample(own_names.TIER_LOAD_SPEED, moment.bytes_per_second, labels)
    if moment.breaker is not None:
        yield Sample(own_names.TIER_OPENED, moment.breaker.opened, labels)
        yield Sample(own_names.TIER_SKIPPED, moment.breaker.skipped, labels)
