"""Device speed: multiplications, memory bandwidth, and the fixed cost of a forward."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig

SPEC_SHARE = 0.5
"""Share of a data sheet's speed that a prompt reaches: an assumption."""
LAYER_SECONDS = 1.2e-4
"""Python, launches and small operations of one layer in one forward; measured on one CPU core (docs/performance.md)."""
_MAX_RATE = 1e18


@dataclass(frozen=True, slots=True)
class Speed:
    """Speeds that prompts reach on a device."""

    flops_per_second: float
    """Floating point operations, in the dtype of the model."""
    bytes_per_second: float
    """Read from the memory that weights, keys and values are in."""
    source: str
    """Where these numbers come from, for the reader of a plan."""
    layer_seconds: float = LAYER_SECONDS

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second"):
            value = getattr(self, name)
            if not _is_number(value) or not 1e3 <= value <= _MAX_RATE:
                raise InvalidConfig(f"{name} must be a number between 1e3 and 1e18, got {value!r}")
        if not _is_number(self.layer_seconds) or not 0 <= self.layer_seconds <= 1:
            raise InvalidConfig(f"layer_seconds must be a number between 0 and 1, got {self.layer_seconds!r}")

    def times(self, share: float, source: str) -> Speed:
        """This share of both rates."""
        rates = (share * self.flops_per_second, share * self.bytes_per_second)
        return Speed(*rates, source, self.layer_seconds)


HARDWARE: dict[str, tuple[float, float, str]] = {
    "a100": (312e12, 2.039e12, "NVIDIA A100 SXM 80 GB"),
    "h100": (989e12, 3.35e12, "NVIDIA H100 SXM"),
    "h200": (989e12, 4.8e12, "NVIDIA H200 SXM"),
    "l4": (121e12, 0.3e12, "NVIDIA L4"),
    "l40s": (362e12, 0.864e12, "NVIDIA L40S"),
    "rtx4090": (165e12, 1.008e12, "NVIDIA RTX 4090"),
    "mi300x": (1_307e12, 5.3e12, "AMD Instinct MI300X"),
}
"""Dense bfloat16 operations and bytes of memory per second, by the makers' public data sheets."""


def spec_speed(name: str, share: float = SPEC_SHARE) -> Speed:
    """The speed of a device by its data sheet, times the share of it that prompts reach.

    Raises:
        InvalidConfig: a device that is not in `HARDWARE`, or a share that is not above 0 and at most 1.
    """
    if name not in HARDWARE:
        raise InvalidConfig(
            f"there are no figures of {name!r}; choose from {', '.join(HARDWARE)}, or give flops and bandwidth yourself"
        )
    if not _is_number(share) or not 0 < share <= 1:
        raise InvalidConfig(f"the share of a data sheet must be above 0 and at most 1, got {share!r}")
    flops, bandwidth, title = HARDWARE[name]
    return Speed(flops, bandwidth, title).times(share, f"{title}, {share:.0%} of its data sheet")


def parse_rate(text: str | float, unit: str) -> float:
    """Reads a rate: a number, or text with a power of ten such as "3.35TB/s", "25 GB/s" or "312T".

    Raises:
        InvalidConfig: neither.
    """
    if isinstance(text, str):
        bare = text.strip().removesuffix("/s").strip()
        for ending in (unit, unit.lower()):
            bare = bare.removesuffix(ending)
        bare = bare.strip()
        factor = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(bare[-1:].upper(), 0.0)
        try:
            number = float(bare[:-1] if factor else bare) * (factor or 1.0)
        except ValueError:
            raise InvalidConfig(f"{text[:40]!r} is not a rate; write for example '25G{unit}/s' or 2.5e10") from None
    else:
        number = float(text)
    if not 1e3 <= number <= _MAX_RATE:
        raise InvalidConfig(f"a rate must be between 1e3 and 1e18 {unit}/s, got {text!r:.40}")
    return number


def parse_seconds(text: str | float) -> float:
    """Reads a time: a number of seconds, or text such as "0.3ms", "50us" or "2 s".

    Raises:
        InvalidConfig: neither, or not between 0 and an hour.
    """
    bare, factor = str(text).strip(), 1.0
    for ending, worth in (("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if bare.endswith(ending):
            bare, factor = bare.removesuffix(ending).strip(), worth
            break
    try:
        seconds = float(bare) * factor
    except ValueError:
        raise InvalidConfig(f"{str(text)[:40]!r} is not a time; write for example '0.3ms' or 0.0003") from None
    if not 0 <= seconds <= 3_600:
        raise InvalidConfig(f"a time must be between 0 and 3600 seconds, got {text!r:.40}")
    return seconds


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
