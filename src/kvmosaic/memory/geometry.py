"""The geometry of a stored chunk: heads and dimensions of every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmosaic.memory.storage import StoredLayer

MAX_LAYERS = 1024
MAX_WIDTH = 2**16
"""Maximum heads of a layer, and maximum head dimension."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer stores per token; the fields of `StoredLayer`, without the model."""

    source_layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool

    @classmethod
    def of(cls, layer: StoredLayer) -> LayerGeometry:
        """The geometry of a model's layer."""
        return cls(layer.source_layer, layer.num_kv_heads, layer.key_dim, layer.value_dim, bool(layer.value_in_key))

    @classmethod
    def from_numbers(cls, numbers: object) -> LayerGeometry:
        """Inverse of `numbers`.

        Raises:
            ValueError: malformed, or out of range.
        """
        if not isinstance(numbers, list) or len(numbers) != 5 or any(type(number) is not int for number in numbers):
            raise ValueError("a layer is not five whole numbers")
        source, heads, key_dim, value_dim, in_key = numbers
        if not 0 <= source < MAX_LAYERS or in_key not in (0, 1):
            raise ValueError("a layer has an impossible source")
        if not all(1 <= width <= MAX_WIDTH for width in (heads, key_dim, value_dim)):
            raise ValueError(f"a layer has a width outside 1 to {MAX_WIDTH}")
        if in_key and value_dim > key_dim:
            raise ValueError("a layer has values in its keys that are wider than these")
        return cls(source, heads, key_dim, value_dim, in_key == 1)

    @property
    def numbers(self) -> list[int]:
        """Its five fields as integers."""
        return [int(number) for number in astuple(self)]


def geometry_of(layers: Sequence[StoredLayer]) -> tuple[LayerGeometry, ...]:
    """The geometry of all layers of a model."""
    return tuple(LayerGeometry.of(layer) for layer in layers)


def stored_layers(layers: Sequence[LayerGeometry]) -> list[tuple[int, LayerGeometry]]:
    """The layers that store something, with their index."""
    return [(index, layer) for index, layer in enumerate(layers) if layer.source_layer == index]
