"""Device speed, and the time to the first token estimated from it: a model of operations and bytes, not a measurement.

    step       layers * layer_seconds + max(operations / speed, bytes / bandwidth)
    prompt     the documents that are not cached, the question, and one read of the KV cache

One prompt alone on the device. The system text is cached. Queueing comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmosaic.capacity.demand import Demand
from kvmosaic.capacity.model_facts import ModelFacts
from kvmosaic.config import EngineConfig
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


STEP_TOKENS = EngineConfig().max_num_batched_tokens
"""Maximum tokens of one forward."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A model on a device, with a demand."""

    model: ModelFacts
    speed: Speed
    demand: Demand

    def document_seconds(self, num_tokens: int) -> float:
        """Seconds that computing one more document adds to a prompt."""
        operations = self.model.flops(num_tokens, self.demand.system_tokens)
        steps = num_tokens / STEP_TOKENS
        return operations / self.speed.flops_per_second + steps * self._step_seconds

    def prompt_seconds(self, num_missing: int) -> float:
        """Returns the TTFT of a prompt with this many uncached documents."""
        demand, model = self.demand, self.model
        num_new = demand.question_tokens + num_missing * demand.tokens_per_document
        operations = num_missing * model.flops(demand.tokens_per_document, demand.system_tokens)
        operations += self._question_flops()
        num_steps = -(-num_new // STEP_TOKENS)
        num_bytes = num_steps * model.step_bytes + model.kv_bytes_per_token * demand.prompt_tokens
        work = max(operations / self.speed.flops_per_second, num_bytes / self.speed.bytes_per_second)
        return num_steps * self._step_seconds + work

    def expected_seconds(self, hit_rate: float) -> float:
        """Returns the mean TTFT if each document is cached with this probability, independently."""
        number = self.demand.documents_per_prompt
        return sum(
            chance * self.prompt_seconds(missing)
            for missing, chance in enumerate(_binomial(number, 1.0 - hit_rate))
            if chance > 0.0
        )

    def saved_share(self) -> float:
        """Returns β: the share of the time of a prompt with only new documents that is saved if all are cached."""
        number = self.demand.documents_per_prompt
        return 1.0 - self.prompt_seconds(0) / self.prompt_seconds(number)

    @property
    def _step_seconds(self) -> float:
        return len(self.model.layers) * self.speed.layer_seconds

    def _question_flops(self) -> float:
        """Operations of the question after the system text and all documents; a window reaches into each of them."""
        demand, num_new = self.demand, self.demand.question_tokens
        operations = 2.0 * (self.model.linear_parameters * num_new + self.model.output_parameters)
        for layer in self.model.layers:
            seen = demand.documents_per_prompt * layer.mask.max_seen(demand.tokens_per_document) + layer.mask.max_seen(
                demand.system_tokens
            )
            operations += float(layer.flops_per_pair) * (num_new * seen + layer.mask.max_pairs(num_new, 0))
        return operations


def _binomial(number: int, probability: float) -> list[float]:
    """Chances of 0 to `number` successes."""
    if probability <= 0.0 or probability >= 1.0:
        return [float(count == (number if probability >= 1.0 else 0)) for count in range(number + 1)]
    one, other = math.log(probability), math.log1p(-probability)
    whole = math.lgamma(number + 1)
    return [
        math.exp(
            whole - math.lgamma(count + 1) - math.lgamma(number - count + 1) + count * one + (number - count) * other
        )
        for count in range(number + 1)
    ]
