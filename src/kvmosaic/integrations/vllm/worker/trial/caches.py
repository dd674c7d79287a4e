"""Trial of caches without a forward: keys that a kernel wrote are moved, and compared with keys written there."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.operations import Move
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout, LayerPlace, Mover
from kvmosaic.integrations.vllm.worker.layouts.ascend import is_ascend
from kvmosaic.integrations.vllm.worker.layouts.paged import write_rows
from kvmosaic.integrations.vllm.worker.trial.rotation import allowed, apart, rotated_directly, turned, unit

_START = 3
"""Slot of the first token in its block."""


def cache_trouble(places: KVLayout, position: int) -> str:
    """The first layer whose cache does not hold, after a move, what its kernel writes for keys computed there.

        written     │ . . . a a │ a a a a a │ . . .     by the layer's kernel, rotated for position 0
        moved       │ a a a a a │ a a . . . │           rotated by our own rotation, for `position`
        wanted      the same keys rotated for `position` by the layer's own rotary embedding

    Runs before any request is served, in blocks that it zeroes afterwards.

    Args:
        places: the worker's layers.
        position: where keys are moved to.
    """
    num_tokens = places.block_size + 2
    of_source = -(-(_START + num_tokens) // places.block_size)
    of_target = -(-num_tokens // places.block_size)
    if places.num_blocks < 1 + of_source + of_target:  # block 0 is vLLM's null block
        return f"a cache of {places.num_blocks} blocks has no room for the check at start"
    source = tuple(range(1, 1 + of_source))
    target = tuple(range(1 + of_source, 1 + of_source + of_target))
    move = Move(source, _START, target, 0, num_tokens, 0, position)
    found = [_trouble_of(places, place, move) for place in places.layers]
    clear(places, source + target)
    return next(filter(None, found), "")


def clear(places: KVLayout, blocks: tuple[int, ...]) -> None:
    """Zeroes blocks, as vLLM's own allocation does."""
    slots = places.slots(blocks, 0, len(blocks) * places.block_size).to(places.device)
    for place in places.layers:
        keys, values = place.layout.read(slots)
        place.layout.write(slots, torch.zeros_like(keys), None if values is None else torch.zeros_like(values))


def _trouble_of(places: KVLayout, place: LayerPlace, move: Move) -> str:
    slots = places.slots(move.source_blocks, move.source_start, move.num_tokens).to(places.device)
    like_keys, like_values = place.layout.read(slots)
    values = None if like_values is None else _numbers(place, like_values, 1)
    keys, wanted = _rotated(place, _numbers(place, like_keys, 0), move.distance)
    _write_by_kernel(place, slots, keys, values)
    if place.layout.quantization is not None:
        values = place.layout.read(slots)[1]
    try:
        Mover(replace(places, layers=(place,))).move([move])
    except KVMosaicError as error:
        return f"{place.name}: {error}"
    targets = places.slots(move.target_blocks, move.target_start, move.num_tokens).to(places.device)
    moved_keys, moved_values = place.layout.read(targets)
    # both are rounded once more; that of eight bits is so coarse that no other one counts
    most = 2 * (allowed(keys.dtype) if place.layout.quantization is None else unit(place.layout.quantization.format))
    far = apart(place.rotation, moved_keys, wanted)
    if not far <= most:
        return (
            f"{place.name}: keys that its kernel wrote, moved to position {move.distance}, are {far:.2g} of their size "
            f"away from those rotated there by its own rotary embedding (at most {most:.2g}): its rotation or its "
            "cache was not understood"
        )
    if values is not None and (moved_values is None or not torch.equal(moved_values, values)):
        return f"{place.name}: values that its kernel wrote are not found after a move: its cache was not understood"
    return ""


def _numbers(place: LayerPlace, like: Tensor, which: int) -> Tensor:
    """Random keys (0) or values (1), of a size that the layer's cache has room for."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(which)).to(like.device, like.dtype)
    how = place.layout.quantization
    return numbers if how is None else numbers * 64 * how.scales[which].to(like.device)


def _rotated(place: LayerPlace, keys: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """[T, G, D] keys at position 0, and at `position`: by the rotary embedding where it can be called."""
    if place.rotation is None:
        return keys, keys
    if not is_ascend(place.layer):  # its embeddings rotate by angles that its runner looked up before
        try:
            return rotated_directly(place, keys, 0), rotated_directly(place, keys, position)
        except Exception:  # another signature, or not callable outside a forward
            return keys, turned(place.rotation, keys, 0, position)
    return keys, turned(place.rotation, keys, 0, position)


def _write_by_kernel(place: LayerPlace, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Writes into the layer's cache by the kernel of its backend, unless only its layout knows how to call that."""
    update = getattr(place.layer.impl, "do_kv_cache_update", None)
    if update is None or is_ascend(place.layer):
        return place.layout.write(slots, keys, values)
    cache = place.layer.kv_cache
    cache = cache[0] if isinstance(cache, list) and len(cache) == 1 else cache  # as earlier versions keep it
    if values is None:
        return write_rows(place.layer, cache, slots, keys)
    if (how := place.layout.quantization) is not None:
        keys, values = keys.to(how.dtype), values.to(how.dtype)
    update(place.layer, keys.contiguous(), values.contiguous(), cache, slots)
    return None
