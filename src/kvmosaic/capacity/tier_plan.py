"""Tier plan: the length from which loading beats computing, and the hit rate that pays for a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvmosaic.capacity.model_facts import ModelFacts
from kvmosaic.capacity.speed import FirstToken
from kvmosaic.errors import InvalidConfig

Codec = Literal["none", "int8"]

MARGIN = 0.9
"""Maximum loading time / computing time: the engine's own rule (`tiers.cost`)."""
LONGEST = 2**24
"""Maximum document length considered."""
_MAX_RATE = 1e15
_GROUP = 64
"""Numbers that share a scale of 2 bytes."""


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How long one entry takes from a tier to the device: latency + bytes / bandwidth."""

    kind: str
    """`host`, `disk`, `redis` or `object`."""
    latency_seconds: float
    bytes_per_second: float
    """Reading, verifying, decoding and copying to the device included."""
    source: str
    """Where these numbers come from."""
    quota_bytes: int | None = None
    """Quota in bytes; None: unlimited, or unknown."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds <= 3_600:
            raise InvalidConfig(f"a latency must be between 0 and 3600 seconds, got {self.latency_seconds!r}")
        if not 1e3 <= self.bytes_per_second <= _MAX_RATE:
            raise InvalidConfig(
                f"a tier reads between 1e3 and {_MAX_RATE:g} bytes per second, got {self.bytes_per_second!r}"
            )


ASSUMED_TIERS: dict[str, tuple[float, float]] = {
    "host": (1e-4, 4e9),
    "disk": (5e-4, 2e9),
    "redis": (1e-3, 0.3e9),
    "object": (3e-2, 0.3e9),
}
"""Latency and bandwidth of a kind of tier if nothing is known: about what docs/performance.md and docs/tiers.md found
on one machine, with checksums; of object stores, which were not measured over a network, a guess."""


def assumed(kind: str) -> TierSpeed:
    """A tier of this kind, as it is assumed to be.

    Raises:
        InvalidConfig: no such kind.
    """
    if kind not in ASSUMED_TIERS:
        raise InvalidConfig(f"there is no kind of tier {kind!r:.40}; choose from {', '.join(ASSUMED_TIERS)}")
    latency, rate = ASSUMED_TIERS[kind]
    return TierSpeed(kind, latency, rate, "assumed")


@dataclass(frozen=True, slots=True)
class TierPlan:
    """One tier below the device."""

    tier: TierSpeed
    entry_bytes: int
    """Of one document."""
    load_seconds: float
    compute_seconds: float
    break_even_tokens: int | None
    """Minimum length of a document worth loading; None: not even `LONGEST` tokens are."""
    least_hit_rate: float | None
    """Minimum hit rate at which probing the tier pays; None: not even a hit rate of 1 does."""
    kept: int | None = None
    """Documents that fit into its quota."""
    found: float = 0.0
    """Share of requested documents found here, but not on the device or in an earlier tier."""
    is_planned: bool = False
    """Whether the tier is part of what is planned; others are only compared."""

    @property
    def is_worth(self) -> bool:
        """Whether loading a document of the planned length is expected to be faster than computing it."""
        return self.load_seconds < MARGIN * self.compute_seconds


def plan_tier(tier: TierSpeed, first: FirstToken, codec: Codec = "none") -> TierPlan:
    """Compares loading from a tier with computing."""
    model, length = first.model, first.demand.tokens_per_document
    share = codec_share(codec, model.element_bytes)

    def load(num_tokens: int) -> float:
        return tier.latency_seconds + share * num_tokens * model.kv_bytes_per_token / tier.bytes_per_second

    seconds, compute = load(length), first.document_seconds(length)
    saved = MARGIN * compute - seconds
    rate = tier.latency_seconds / (tier.latency_seconds + saved) if saved > 0 else None
    even = _first_worth(lambda count: MARGIN * first.document_seconds(count) > load(count))
    entry = entry_bytes(model, length, codec)
    kept = None if tier.quota_bytes is None else tier.quota_bytes // entry
    return TierPlan(tier, entry, seconds, compute, even, rate, kept)


def entry_bytes(model: ModelFacts, num_tokens: int, codec: Codec = "none") -> int:
    """Bytes of a stored document; its header and tokens, a few bytes per token, are left out."""
    return max(1, round(codec_share(codec, model.element_bytes) * num_tokens * model.kv_bytes_per_token))


def codec_share(codec: Codec, element_bytes: float) -> float:
    """Of the bytes of keys and values, what an entry takes.

    Raises:
        InvalidConfig: no such codec.
    """
    shares = {"none": 1.0, "int8": (1 + 2 / _GROUP) / element_bytes}
    if codec not in shares:
        raise InvalidConfig(f"codec is {codec!r}; choose from {', '.join(shares)}")
    return shares[codec]


def _first_worth(is_worth: Callable[[int], bool]) -> int | None:
    """Returns the smallest number from which the condition holds."""
    high = 1
    while not is_worth(high):
        if high >= LONGEST:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_worth(middle) else (middle, high)
    return high
