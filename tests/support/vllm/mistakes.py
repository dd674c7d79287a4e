"""Ways to misunderstand a layer that runs inside vLLM, by name, and faults of the layer itself."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from kvmosaic.vllm.worker.key_rotation import Factors, KeyRotation
from support.vllm import faults


@dataclass(frozen=True, eq=False)
class Backwards(KeyRotation):
    """Turns the other way."""

    def factors(self, old: Any, new: Any, dtype: torch.dtype = torch.float32) -> Factors:
        found = super().factors(old, new, dtype)
        return Factors(found.cos, -found.sin)


@dataclass(frozen=True, eq=False)
class Larger(KeyRotation):
    """Turns by the right angles, and makes keys larger on the way."""

    def factors(self, old: Any, new: Any, dtype: torch.dtype = torch.float32) -> Factors:
        found = super().factors(old, new, dtype)
        return Factors(found.cos * 1.03, found.sin * 1.03)


@dataclass(frozen=True, eq=False)
class Slower(KeyRotation):
    """Turns by angles of another base."""

    def factors(self, old: Any, new: Any, dtype: torch.dtype = torch.float32) -> Factors:
        return super().factors(old, old + (new - old) * 7 // 8, dtype)


@dataclass(frozen=True, eq=False)
class Partly(KeyRotation):
    """Leaves a quarter of what turns."""

    def rotate(self, keys: Any, factors: Factors) -> None:
        part = slice(self.first + self.rotary_dim // 4, self.first + self.rotary_dim // 2)
        kept = keys[..., part].clone()
        super().rotate(keys, factors)
        keys[..., part] = kept


class Displaced:
    """A layout that finds tokens of a block in the opposite order, or writes them one too far."""

    def __init__(self, layout: Any, *, flipped: bool) -> None:
        self._layout, self._flipped = layout, flipped
        self.block_size, self.key_size, self.is_latent = layout.block_size, layout.key_size, layout.is_latent
        self.quantization = layout.quantization

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


class Swapped:
    """A layout that takes keys for values."""

    def __init__(self, layout: Any) -> None:
        self._layout = layout
        self.block_size, self.key_size, self.is_latent = layout.block_size, layout.key_size, layout.is_latent
        self.quantization = layout.quantization

    def read(self, slots: Any) -> Any:
        return self._layout.read(slots)[::-1]

    def write(self, slots: Any, keys: Any, values: Any) -> None:
        self._layout.write(slots, values, keys)


def _turning(rotation: KeyRotation, kind: type[KeyRotation]) -> KeyRotation:
    return kind(**{field.name: getattr(rotation, field.name) for field in fields(rotation)})


OTHER = {"half": "interleaved", "interleaved": "half"}

MISTAKES: dict[str, Any] = {
    "taken for unturned": lambda place: replace(place, rotation=None),
    "backwards": lambda place: replace(place, rotation=_turning(place.rotation, Backwards)),
    "larger": lambda place: replace(place, rotation=_turning(place.rotation, Larger)),
    "slower": lambda place: replace(place, rotation=_turning(place.rotation, Slower)),
    "other pairs": lambda place: replace(place, rotation=replace(place.rotation, layout=OTHER[place.rotation.layout])),
    "only partly": lambda place: replace(place, rotation=_turning(place.rotation, Partly)),
    "flipped blocks": lambda place: replace(place, layout=Displaced(place.layout, flipped=True)),
    "written too far": lambda place: replace(place, layout=Displaced(place.layout, flipped=False)),
    "values for keys": lambda place: replace(place, layout=Swapped(place.layout)),
}
IN_CACHE = ("flipped blocks", "written too far", "values for keys")
FAULTS: dict[str, Any] = {
    **{
        each.__name__: lambda places, layer, each=each: faults.rotation(places, layer, each)
        for each in faults.ROTATIONS
    },
    **{each.__name__: each for each in faults.OTHERS},
}
ROTATED = [each.__name__ for each in faults.ROTATIONS]
STORED = ["stored_elsewhere", "stored_values_smaller"]
