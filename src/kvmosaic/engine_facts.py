"""Engine facts: what computes the answers of an `LLM`, for the page, the metrics and the start of the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmosaic.assembly import AnyModel


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine, and the numbers it computes with."""

    name: str
    """"transformers" or "llama.cpp"."""
    build: str
    """Package and version of the engine."""
    attention: str
    """The attention backend; that of llama.cpp is its own."""
    weights: str
    """Type of the weights in memory: "bfloat16", "Q4_K - Medium"."""
    cache: str
    """Type of cached keys and values."""
    device: str
    """Where the weights are: "cpu", "cuda:0", "gpu"."""

    @classmethod
    def of(cls, model: AnyModel, attention: str) -> EngineFacts:
        """Those of a loaded model with this attention backend."""
        types = model.weight_type, model.cache_type
        return cls(model.engine_name, model.engine_build, attention, *types, model.weight_device)

    def __str__(self) -> str:
        engine = self.build if self.build.startswith(self.name) else f"{self.name} ({self.build})"
        attention = "" if self.attention == self.name else f", {self.attention} attention"
        return f"{engine}{attention}, weights {self.weights}, cache {self.cache}"
