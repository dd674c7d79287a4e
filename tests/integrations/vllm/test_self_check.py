"""The check at start: it passes on what is understood, and finds every way to misunderstand a model."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

from kvmosaic.integrations.vllm.worker.nested import Nested
from kvmosaic.integrations.vllm.worker.places import Places
from kvmosaic.integrations.vllm.worker.self_check import check
from kvmosaic.integrations.vllm.worker.turning import Factors, Turning

ENGINES: dict[str, dict[str, Any]] = {
    "llama": {"dtype": "float32"},
    "qwen3": {"dtype": "bfloat16"},
    "deepseek": {"dtype": "bfloat16", "environment": {}},  # with its latent cache
}
ROTATION, CACHE = "rotation was not understood", "cache was not understood"


@dataclass(frozen=True, eq=False)
class Backwards(Turning):
    """Turns the other way."""

    def factors(self, old: Any, new: Any, dtype: torch.dtype = torch.float32) -> Factors:
        found = super().factors(old, new, dtype)
        return Factors(found.cos, -found.sin)


@dataclass(frozen=True, eq=False)
class Partly(Turning):
    """Leaves a quarter of what turns."""

    def turn(self, keys: Any, factors: Factors) -> None:
        part = slice(self.first + self.rotary_dim // 4, self.first + self.rotary_dim // 2)
        kept = keys[..., part].clone()
        super().turn(keys, factors)
        keys[..., part] = kept


class Displaced:
    """A layout that finds tokens of a block in the opposite order, or writes them one too far."""

    def __init__(self, layout: Any, *, flipped: bool) -> None:
        self._layout, self._flipped = layout, flipped
        self.block_size, self.key_size, self.is_latent = layout.block_size, layout.key_size, layout.is_latent

    def _at(self, slots: Any) -> Any:
        if not self._flipped:
            return slots
        return slots // self.block_size * self.block_size + (self.block_size - 1 - slots % self.block_size)

    def read(self, slots: Any) -> Any:
        return self._layout.read(self._at(slots))

    def write(self, slots: Any, keys: Any, values: Any) -> None:
        if not self._flipped:
            keys, values = keys.roll(1, 0), None if values is None else values.roll(1, 0)
        self._layout.write(self._at(slots), keys, values)


def _turning(turning: Turning, kind: type[Turning]) -> Turning:
    return kind(**{field.name: getattr(turning, field.name) for field in fields(turning)})


MISTAKES: dict[str, Any] = {
    "taken for unturned": lambda place: replace(place, turning=None),
    "backwards": lambda place: replace(place, turning=_turning(place.turning, Backwards)),
    "other pairs": lambda place: replace(
        place, turning=replace(place.turning, is_interleaved=not place.turning.is_interleaved)
    ),
    "only partly": lambda place: replace(place, turning=_turning(place.turning, Partly)),
    "flipped blocks": lambda place: replace(place, layout=Displaced(place.layout, flipped=True)),
    "written too far": lambda place: replace(place, layout=Displaced(place.layout, flipped=False)),
}


def checked(engine: Any, mistake: str | None, layer: int | None) -> list[Any]:
    """What the check says, with a mistake in one layer or in all of them, and the largest number that it leaves."""
    worker = engine.core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {name: each.kv_cache for name, each in layers.items() if hasattr(each, "kv_cache")}
    places = Places.of(worker.vllm_config, caches)
    mistaken = places
    if mistake is not None:
        found = [
            MISTAKES[mistake](place) if layer is None or index == layer else place
            for index, place in enumerate(places.layers)
        ]
        mistaken = replace(places, layers=tuple(found))
    said = check(mistaken, Nested(worker.vllm_config, worker.model_runner.kv_cache_config, places.root))
    slots = torch.arange(32 * places.block_size)
    parts = [part for place in places.layers for part in place.layout.read(slots) if part is not None]
    return [said, max(float(part.abs().max()) for part in parts)]


@pytest.mark.parametrize("name", ENGINES)
def test_it_passes_and_leaves_nothing(vllm_engine, name):
    assert vllm_engine(name, **ENGINES[name]).call(checked, mistake=None, layer=None) == ["", 0.0]


@pytest.mark.parametrize("layer", [None, 2], ids=["everywhere", "in the last layer"])
@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("name", ENGINES)
def test_mistakes_are_found(vllm_engine, name, mistake, layer):
    said, left = vllm_engine(name, **ENGINES[name]).call(checked, mistake=mistake, layer=layer)
    assert (CACHE if mistake in ("flipped blocks", "written too far") else ROTATION) in said
    assert f"layers.{layer or 0}." in said
    assert left == 0.0


class Unturned(torch.nn.Module):
    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        return query, key


def constant(engine: Any) -> str:
    """The check of a layer whose keys do not turn, taken for one that does."""
    worker = engine.core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {name: each.kv_cache for name, each in layers.items() if hasattr(each, "kv_cache")}
    places = Places.of(worker.vllm_config, caches)
    nested = Nested(worker.vllm_config, worker.model_runner.kv_cache_config, places.root)
    rotary = places.layers[1].turning.rotary
    attention = next(
        module for module in places.root.modules() if getattr(module, "attn", None) is places.layers[1].layer
    )
    attention.rotary_emb = Unturned()
    try:
        unturned = replace(places.layers[1], turning=None)
        fine = check(replace(places, layers=(places.layers[0], unturned, places.layers[2])), nested)
        return fine or check(places, nested)
    finally:
        attention.rotary_emb = rotary


def test_a_layer_without_positions_is_checked_as_one(vllm_engine):
    said = vllm_engine("llama", **ENGINES["llama"]).call(constant)
    assert ROTATION in said and "layers.1." in said
