"""Terminal output of a model's layers, rotations, and memory per token."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import size_text

if TYPE_CHECKING:
    from kvmosaic.layers import LayerSpec
    from kvmosaic.model import LoadedModel
    from kvmosaic.rope import Rotation


def layer_table(layers: tuple[LayerSpec, ...]) -> Table:
    """One row per run of equal layers: heads, rotation, mask, and whether cached keys may be moved.

    The slowest turn is the number of tokens after which the slowest pair of dimensions has turned once.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in ("layers", "heads", "head\nsize", "rotation", "slowest\nturn", "sees", "movable"):
        table.add_column(heading, no_wrap=heading not in ("rotation", "sees"))
    for kind, members in groupby(layers, key=_kind):
        run = list(members)
        table.add_row(layer_range(run[0].index, run[-1].index), *kind)
    return table


def memory_table(model: LoadedModel, num_tokens: int, num_blocks: int, block_size: int) -> Table:
    """Bytes of keys and values: per token, and for a prompt of this many tokens in this many blocks."""
    per_token = model.bytes_per_token()
    stored = [layer for layer in model.layers if layer.is_stored]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("one token", Text(f"{size_text(per_token)} = {memory_formula(stored, model.dtype.itemsize)}"))
    size = size_text(per_token * block_size * num_blocks)
    blocks = f"{num_blocks:,} blocks of {block_size} tokens"
    table.add_row("this prompt", Text(f"{size} for {num_tokens:,} tokens in {blocks}"))
    table.add_row("1 GiB holds", Text(f"{2**30 // max(per_token, 1):,} tokens"))
    return table


def memory_formula(stored: list[LayerSpec], item_bytes: int) -> str:
    """Returns how the bytes of one token add up, over the layers that have a KV cache of their own."""
    terms = []
    for (latent, heads, key, value), members in groupby(
        stored, key=lambda layer: (layer.value_in_key, layer.num_kv_heads, layer.key_dim, layer.value_dim)
    ):
        count = len(list(members))
        if latent:
            terms.append(f"{count} layers × {key} latent numbers")
        elif key == value:
            terms.append(f"2 × {count} layers × {heads} heads × {key}")
        else:
            terms.append(f"{count} layers × {heads} heads × ({key} + {value})")
    sum_of_terms = " + ".join(terms)
    return f"({sum_of_terms}) × {item_bytes} bytes" if len(terms) > 1 else f"{sum_of_terms} × {item_bytes} bytes"


def rotation_text(rotation: Rotation | None) -> str:
    """A rotation in a few words: how dimensions are paired, and which of them turn."""
    if rotation is None:
        return "none"
    end = rotation.offset + rotation.rotary_dim
    part = "whole head" if rotation.rotary_dim == rotation.head_dim else f"dimensions {rotation.offset}–{end - 1}"
    return f"{rotation.layout}, {part}{', reversed' if rotation.sign < 0 else ''}"


def layer_range(first: int, last: int) -> str:
    """Layer numbers from the first to the last one."""
    return str(first) if first == last else f"{first}–{last}"


def _kind(layer: LayerSpec) -> tuple[str, ...]:
    heads = f"{layer.num_query_heads} / {layer.num_kv_heads}"
    size = str(layer.key_dim) if layer.key_dim == layer.value_dim else f"{layer.key_dim} / {layer.value_dim}"
    shared = "" if layer.is_stored else f", keys of layer {layer.source_layer}"
    movable = "yes" if layer.is_movable else "no"
    latent = f"{size} latent" if layer.value_in_key else size
    turning = "bias by distance" if layer.bias is not None else rotation_text(layer.rotation)
    return heads, latent, turning, _slowest_turn(layer.rotation), f"{layer.mask}{shared}", movable


def _slowest_turn(rotation: Rotation | None) -> str:
    turning = [frequency for frequency in rotation.inv_freq if frequency > 0] if rotation else []
    return f"{2 * math.pi / min(turning):,.0f}" if turning else ""
