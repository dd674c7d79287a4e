"""The geometry of layers, heads and dimensions kept per token, and their masks. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal, TypeVar

MaskKind = Literal["full", "window", "chunked"]

_BEFORE_ALL = -(1 << 62)
"""Before every position."""


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """The earlier positions that a token sees in a layer, by position as the reader sees it.

    full       every k <= q
    window     q - k < size
    chunked    q // size == k // size
    """

    kind: MaskKind = "full"
    size: int = 0
    """Positions in the window or chunk; 0 for a full mask."""

    def __post_init__(self) -> None:
        assert (self.kind == "full") == (self.size == 0) and self.size >= 0, "only windows and chunks have a size"

    def __str__(self) -> str:
        return "full" if self.kind == "full" else f"{self.kind} {self.size}"

    def lowest_seen(self, position: int) -> int:
        """Position of the earliest key that a query at `position` sees; before every position if the mask is full."""
        if self.kind == "window":
            return position - self.size + 1
        if self.kind == "chunked":
            return position // self.size * self.size
        return _BEFORE_ALL

    def max_seen(self, num_tokens: int) -> int:
        """Maximum of `num_tokens` tokens that a token right after them sees, without itself."""
        return num_tokens if self.kind == "full" else min(num_tokens, self.size)


FULL = MaskSpec()


MAX_LAYERS = 1024
MAX_WIDTH = 2**16
"""Maximum heads of a layer, and maximum head dimension."""


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer stores per token, as written in the header of an entry.

    With `value_in_key` (latent attention, MLA) there is one key head, the latent followed by its rotary part, and the
    value is the first `value_dim` numbers of the key: only keys are stored. A layer that reads the keys of another
    layer stores nothing.
    """

    source_layer: int
    """The layer whose keys and values are read: its own index, or an earlier one."""
    num_kv_heads: int
    """G."""
    key_dim: int
    """D, numbers of a key in one head."""
    value_dim: int
    """Dv, numbers of a value in one head."""
    value_in_key: bool = False

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
        return LayerGeometry(source, heads, key_dim, value_dim, in_key == 1)

    @property
    def geometry(self) -> LayerGeometry:
        """These five facts alone, without the facts that a subclass adds."""
        return LayerGeometry(
            self.source_layer, self.num_kv_heads, self.key_dim, self.value_dim, bool(self.value_in_key)
        )

    @property
    def numbers(self) -> list[int]:
        """Its five facts as integers."""
        return [int(number) for number in astuple(self.geometry)]

    @property
    def numbers_per_token(self) -> int:
        """Numbers of one token's keys and values; a layer that reads another one's keeps none of them itself."""
        return self.num_kv_heads * (self.key_dim if self.value_in_key else self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerShape(LayerGeometry):
    """Geometry, query heads and mask of a layer: what its memory and work depend on."""

    index: int = 0
    num_query_heads: int = 1
    """H."""
    mask: MaskSpec = FULL
    num_chosen: int = 0
    """If not 0, this is an indexer (see `kvmosaic.model.indexer`): it chooses so many keys for each query."""

    @property
    def is_stored(self) -> bool:
        """Whether this layer stores keys of its own."""
        return self.source_layer == self.index

    @property
    def kept_per_token(self) -> int:
        """Numbers that this layer keeps of a token; 0 if it reads another layer's keys."""
        return self.numbers_per_token if self.is_stored else 0

    @property
    def flops_per_pair(self) -> int:
        """Floating point operations for one query token that sees one key: score and weighted value, in all heads."""
        return 2 * self.num_query_heads * (self.key_dim + self.value_dim)


GeometryT = TypeVar("GeometryT", bound=LayerGeometry)


def geometry_of(layers: Sequence[LayerGeometry]) -> tuple[LayerGeometry, ...]:
    """The bare geometry of all layers of a model."""
    return tuple(layer.geometry for layer in layers)


def stored_layers(layers: Sequence[GeometryT]) -> list[tuple[int, GeometryT]]:
    """The layers that store something, with their index."""
    return [(index, layer) for index, layer in enumerate(layers) if layer.source_layer == index]
