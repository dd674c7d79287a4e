"""Estimated time to the first token, from operations and bytes read: a model, not a measurement.

    step       layers * layer_seconds + max(operations / speed, bytes / bandwidth)
    prompt     the documents that are not cached, the question, and one read of the KV cache

One prompt alone on the device. The system text is cached. Queueing comes on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvmosaic.capacity.demand import Demand
from kvmosaic.capacity.facts import ModelFacts
from kvmosaic.capacity.speed import Speed
from kvmosaic.config import EngineConfig

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
