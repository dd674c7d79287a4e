"""Device and tier speeds of a capacity plan: given, measured, by data sheet, or assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvmosaic.capacity import ASSUMED_TIERS, HARDWARE, Speed, TierSpeed, spec_speed
from kvmosaic.capacity.speed import parse_rate, parse_seconds
from kvmosaic.capacity.tier_plan import assumed
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import parse_tier_url

if TYPE_CHECKING:
    from kvmosaic.capacity import ModelFacts

ASSUMED = "h100"


@dataclass(frozen=True, slots=True)
class SpeedAsked:
    """Options for the speed of the device."""

    hardware: str | None = None
    flops: str | None = None
    bandwidth: str | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        ways = [self.hardware is not None, self.flops is not None or self.bandwidth is not None, self.measure]
        if sum(ways) > 1:
            raise InvalidConfig("give --hardware, or --flops and --bandwidth, or --measure: only one of them")
        if (self.flops is None) != (self.bandwidth is None):
            missing = "--bandwidth" if self.bandwidth is None else "--flops"
            raise InvalidConfig(f"--flops and --bandwidth belong together; {missing} is missing")

    def speed(self, model: ModelFacts) -> Speed:
        """Returns the speed to plan with.

        Raises:
            InvalidConfig: a device without figures, or something that is no rate.
        """
        if self.measure:
            from kvmosaic.capacity.machine import measure_speed

            return measure_speed(model.dtype)
        if self.flops is not None and self.bandwidth is not None:
            return Speed(parse_rate(self.flops, "FLOP"), parse_rate(self.bandwidth, "B"), "as given")
        if self.hardware is not None:
            return spec_speed(self.hardware.lower())
        speed = spec_speed(ASSUMED)
        hint = "assumed, give --hardware, --flops and --bandwidth, or --measure"
        return replace(speed, source=f"{speed.source}: {hint}")


def tiers_of(urls: Sequence[str], speeds: Sequence[str], *, measure: bool) -> tuple[list[TierSpeed], list[TierSpeed]]:
    """Returns the named tiers, and tiers of other kinds whose speed was given.

    Raises:
        InvalidConfig: a URL or a speed that cannot be read, or a kind that is named twice.
    """
    given = _speeds(speeds)
    found: dict[str, TierSpeed] = {}
    for url in urls:
        spec = parse_tier_url(url)
        if spec.kind in found:
            raise InvalidConfig(f"two tiers are of kind {spec.kind}; a plan has one of each kind at most")
        found[spec.kind] = given.pop(spec.kind, assumed(spec.kind))
        if measure and found[spec.kind].source == "assumed":
            from kvmosaic.capacity.machine import measure_tier

            found[spec.kind] = measure_tier(url)
        found[spec.kind] = replace(found[spec.kind], quota_bytes=spec.quota_bytes)
    return list(found.values()), list(given.values())


def _speeds(texts: Sequence[str]) -> dict[str, TierSpeed]:
    found = {}
    for text in texts:
        kind, _, rest = text.partition("=")
        rate, _, latency = rest.partition(",")
        if kind not in ASSUMED_TIERS or not rate:
            raise InvalidConfig(
                f"--tier-speed is {text[:60]!r}; write a kind ({', '.join(ASSUMED_TIERS)}), bytes per second and a "
                "latency: disk=3GB/s,0.2ms"
            )
        seconds = parse_seconds(latency) if latency else ASSUMED_TIERS[kind][0]
        found[kind] = TierSpeed(kind, seconds, parse_rate(rate, "B"), "as given")
    return found


assert ASSUMED in HARDWARE
