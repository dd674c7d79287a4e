"""Model facts: KV cache and compute per token, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvmosaic.layers.geometry import LayerShape


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Memory and work of a model."""

    name: str
    dtype: str
    """Of keys and values, and of weights that are not rounded to 8 bits."""
    element_bytes: int
    """Of one number of a key or value."""
    num_parameters: int
    weight_bytes: int
    """All weights, shared ones once."""
    step_bytes: int
    """Weights that one forward of many tokens reads: all but tables that are only looked up in."""
    linear_parameters: int
    """Parameters that one token is multiplied with, without the output layer; of experts, only the routed ones."""
    output_parameters: int
    """Of the output layer, needed for rows with logits only."""
    max_positions: int | None
    layers: tuple[LayerShape, ...]
    quantization: Literal["none", "int8"] = "none"
    note: str = ""
    """What the reader of a plan should know about these numbers; empty if there is nothing."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that the engine keeps of every token, in all layers, whatever a window hides later."""
        return self.element_bytes * sum(layer.kept_per_token for layer in self.layers)

    @property
    def kv_bytes_unshared(self) -> int:
        """The same if every query head had a key head of its own: what grouped queries and latents save."""
        stored = (layer for layer in self.layers if layer.is_stored)
        return self.element_bytes * sum(2 * layer.num_query_heads * _head_dim(layer) for layer in stored)

    def seen_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of `num_tokens` that a token after them can see: a cache that evicts past windows."""
        numbers = sum(layer.kept_per_token * layer.mask.max_seen(num_tokens) for layer in self.layers)
        return self.element_bytes * numbers

    def flops(self, num_new: int, num_before: int, num_rows: int = 0) -> float:
        """Returns floating point operations of new tokens after visible ones, with logits for some rows."""
        linear = 2.0 * (self.linear_parameters * num_new + self.output_parameters * num_rows)
        return linear + sum(
            float(layer.flops_per_pair) * layer.mask.max_pairs(num_new, num_before) for layer in self.layers
        )

    def kinds(self) -> list[tuple[str, int, int]]:
        """Kinds of layers in the order of their first one: what they keep, how many, bytes per token of all of them."""
        found: dict[str, list[LayerShape]] = {}
        for layer in self.layers:
            found.setdefault(describe(layer), []).append(layer)
        return [(kind, len(layers), self._bytes(layers)) for kind, layers in found.items()]

    def _bytes(self, layers: Iterable[LayerShape]) -> int:
        return self.element_bytes * sum(layer.kept_per_token for layer in layers)


def describe(layer: LayerShape) -> str:
    """What a layer keeps, in words: "8 key heads of 128 (32 query heads), window 4,096"."""
    sees = "" if layer.mask.kind == "full" else f", {layer.mask.kind} {layer.mask.size:,}"
    if not layer.is_stored:
        return f"keys of an earlier layer{sees}"
    if layer.value_in_key:
        return f"latent of {layer.value_dim} + {layer.key_dim - layer.value_dim} rotary{sees}"
    size = f"{layer.key_dim}" if layer.key_dim == layer.value_dim else f"{layer.key_dim} and {layer.value_dim}"
    heads = f"{layer.num_kv_heads} key head{'s' if layer.num_kv_heads != 1 else ''} of {size}"
    return f"{heads} ({layer.num_query_heads} query heads){sees}"


def _head_dim(layer: LayerShape) -> int:
    return (layer.key_dim + layer.value_dim + 1) // 2
