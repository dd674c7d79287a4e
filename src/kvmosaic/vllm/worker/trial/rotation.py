"""Trials of rotations, against the model's own, and of caches without a forward; limits of rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import KVMosaicError
from kvmosaic.rope import paired
from kvmosaic.vllm.operations import Move
from kvmosaic.vllm.worker.key_rotation import KeyRotation, arithmetic
from kvmosaic.vllm.worker.kv_layout import KVLayout, LayerPlace, Mover
from kvmosaic.vllm.worker.layouts.ascend import is_ascend
from kvmosaic.vllm.worker.layouts.paged import write_rows

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


_INT8 = 2.0**-6
"""Twice the error of rounding 128 numbers to a scale of their own, relative to their size."""
_ARITHMETIC = 2.0**-20
"""Error of sums in float32, whatever the dtype of their terms."""


def unit(*dtypes: torch.dtype) -> float:
    """The relative error of one rounding to the coarsest of these dtypes, plus that of the arithmetic before it."""
    return max(_INT8 if dtype is torch.int8 else torch.finfo(dtype).eps for dtype in dtypes) / 2 + _ARITHMETIC


def wide(numbers: Tensor) -> Tensor:
    """Numbers in a dtype in which comparing them adds no rounding."""
    return numbers.float() if numbers.dtype in (torch.bfloat16, torch.float16) else numbers.double()


def perturbed(numbers: Tensor, seed: int = 0, kept: torch.dtype | None = None) -> Tensor:
    """Floating-point numbers, each moved up or down by about one rounding; the same on every worker.

    Args:
        numbers: of any shape.
        seed: of the directions.
        kept: the dtype of the rounding; None: that of the numbers.
    """
    signs = torch.randint(2, numbers.shape, generator=torch.Generator().manual_seed(seed)).to(numbers.device) * 2 - 1
    return (wide(numbers) * (1 + 2 * unit(kept or numbers.dtype) * signs)).to(numbers.dtype)


def noise_ratio(found: Sequence[Tensor], wanted: Sequence[Tensor], noisy: Sequence[Tensor]) -> float:
    """The distance of `found` from `wanted`, divided by that of `noisy`; infinite if it is not finite.

    Args:
        found: tensors [T, …].
        wanted: the same by another computation.
        noisy: the same by the other computation again, after its input was `perturbed`.

    Some channels of a model are many times larger than all others and hide them: each is normalized by its own size,
    and the median counts.
    """
    largest = 0.0
    for one, other, third in zip(found, wanted, noisy, strict=True):
        a, b, c = (wide(each).flatten(1) for each in (one, other, third))
        if not a.isfinite().all():
            return float("inf")
        allowed = _size(c - b) + unit(other.dtype) * _size(b)
        largest = max(largest, float((_size(a - b) / allowed.clamp(min=1e-30)).median()))
    return largest


def _size(numbers: Tensor) -> Tensor:
    """[C]: the size of each channel of [T, C]."""
    return numbers.square().mean(0).sqrt()


ROUNDINGS = 4
"""Roundings of the table, two products and their sum: the max error."""


def fitted(rotation: KeyRotation | None, place: LayerPlace, size: int) -> KeyRotation | None:
    """The rotation of a layer for vectors of another size than its keys: queries of a layer with a latent cache."""
    if rotation is None or size == place.layout.key_size:
        return rotation
    return replace(rotation, first=size - rotation.rotary_dim)


def turned(rotation: KeyRotation | None, vectors: Tensor, old: int, new: int) -> Tensor:
    """[T, H, D] vectors of consecutive tokens, rotated from position `old` of the first one to position `new`."""
    vectors = wide(vectors).clone()
    if rotation is not None and old != new:
        tokens = torch.arange(len(vectors), device=vectors.device)
        rotation.rotate(vectors, rotation.factors(old + tokens, new + tokens, arithmetic(vectors.dtype)))
    return vectors


def apart(rotation: KeyRotation | None, found: Tensor, wanted: Tensor) -> float:
    """Distance of [T, H, D] vectors: the worst of all D numbers, relative to the pair that it rotates in.

    Rounding the larger number of a pair moves the smaller one by as much, so the pair is the measure. All tokens and
    heads are averaged, so that it is the mean of many roundings.
    """
    found, wanted = wide(found), wide(wanted)
    size = (_pair_size(rotation, found) + _pair_size(rotation, wanted)).square().mean((0, 1)).sqrt() / 2
    error = (found - wanted).square().mean((0, 1)).sqrt()
    far = error / size.clamp(min=float(size.mean()) * 1e-6 + 1e-30)
    return float(far.max()) if far.isfinite().all() else float("inf")


def allowed(*dtypes: torch.dtype) -> float:
    """Max value of `apart` for vectors of these dtypes."""
    return ROUNDINGS * unit(*dtypes)


def _pair_size(rotation: KeyRotation | None, vectors: Tensor) -> Tensor:
    """[T, H, D]: the length of the pair in which each number rotates; its own size if it does not rotate."""
    sizes = vectors.abs()
    if rotation is None:
        return sizes
    part = sizes[..., rotation.first : rotation.first + rotation.rotary_dim]
    one, other = paired(part, rotation.layout)
    size = (one.square() + other.square()).sqrt()
    one.copy_(size)
    other.copy_(size)
    return sizes


def direct_trouble(place: LayerPlace, positions: tuple[int, ...]) -> str:
    """How a layer's rotary embedding, called with random queries and keys, differs from the detected rotation.

    Args:
        place: a layer with rotated keys.
        positions: positions of the calls; the others are rotated from the first.

    Returns:
        Empty: it does not.
    """
    rotation, num_tokens = place.rotation, 8
    assert rotation is not None
    size = _embedded_size(rotation)
    bare = replace(rotation, first=size - rotation.rotary_dim if rotation.first else 0)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(num_tokens, size, generator=generator).to(rotation.table.device, rotation.dtype)
    seen = {}
    for position in positions:
        at = torch.arange(position, position + num_tokens, device=given.device)
        seen[position] = _embedded(place, at, given, given.flip(0).contiguous())
    most = allowed(rotation.dtype)
    for position in positions[1:]:
        for name, still, wanted in zip(("queries", "keys"), seen[positions[0]], seen[position], strict=True):
            far = apart(bare, turned(bare, still, positions[0], position), wanted)
            if not far <= most:
                return misunderstood(name, positions[0], position, far, most)
    return ""


def rotated_directly(place: LayerPlace, keys: Tensor, position: int) -> Tensor:
    """[T, G, D] keys of consecutive tokens, rotated from `position` on by the layer's rotary embedding."""
    rotation, keys = place.rotation, keys.clone()
    assert rotation is not None
    size, (num_tokens, num_heads, _) = _embedded_size(rotation), keys.shape
    part = keys[..., keys.shape[-1] - size :] if rotation.first else keys[..., :size]
    rows = part.reshape(num_tokens * num_heads, size).to(rotation.dtype)
    at = torch.arange(position, position + num_tokens, device=keys.device).repeat_interleave(num_heads)
    part.copy_(_embedded(place, at, torch.zeros_like(rows), rows)[1].view(part.shape))
    return keys


def _embedded_size(rotation: KeyRotation) -> int:
    """Size of the vectors that a rotary embedding takes."""
    return int(getattr(rotation.rotary, "head_size", 0)) or rotation.rotary_dim


def _embedded(place: LayerPlace, at: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer's rotary embedding gives for queries and keys [T, size] of one head: [T, 1, size] each."""
    assert place.rotation is not None
    rotary: Any = place.rotation.rotary
    num_tokens, size = keys.shape
    shape = (num_tokens, 1, size) if place.layout.is_latent else (num_tokens, size)
    query, key = rotary(at, queries.clone().view(shape), keys.clone().view(shape))
    return query.view(num_tokens, -1, size), key.view(num_tokens, -1, size)


def misunderstood(name: str, old: int, new: int, far: float, most: float) -> str:
    """The error text for a wrong rotation."""
    return (
        f"{name} rotated from position {old} to {new} are {far:.2g} of their size away from the keys that the model "
        f"rotates there itself (at most {most:.2g}): its rotation was not understood"
    )
