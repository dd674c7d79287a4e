"""Keys and queries at two positions: what turning them gives, against what the model gives there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.integrations.vllm.worker.key_rotation import KeyRotation, arithmetic
from kvmosaic.integrations.vllm.worker.kv_layout import LayerPlace
from kvmosaic.integrations.vllm.worker.trial.rounding import unit, wide

ROUNDINGS = 4
"""Of the table, two products and their sum: an error of this many roundings is allowed."""


def fitted(rotation: KeyRotation | None, place: LayerPlace, size: int) -> KeyRotation | None:
    """The turning of a layer for vectors of another size than its keys: queries of a layer with a latent cache."""
    if rotation is None or size == place.layout.key_size:
        return rotation
    return replace(rotation, first=size - rotation.rotary_dim)


def turned(rotation: KeyRotation | None, vectors: Tensor, old: int, new: int) -> Tensor:
    """[T, H, D] vectors of neighbouring tokens, the first at position `old`, as they are from position `new` on."""
    vectors = wide(vectors).clone()
    if rotation is not None and old != new:
        tokens = torch.arange(len(vectors), device=vectors.device)
        rotation.rotate(vectors, rotation.factors(old + tokens, new + tokens, arithmetic(vectors.dtype)))
    return vectors


def apart(rotation: KeyRotation | None, found: Tensor, wanted: Tensor) -> float:
    """How far [T, H, D] vectors lie apart: of all D numbers the worst, in parts of the pair that it turns in.

    Rounding the larger number of a pair moves the smaller one by as much, so the pair is the measure. All tokens and
    heads are taken together, so that it is the mean of many roundings.
    """
    found, wanted = wide(found), wide(wanted)
    size = (_pair_size(rotation, found) + _pair_size(rotation, wanted)).square().mean((0, 1)).sqrt() / 2
    error = (found - wanted).square().mean((0, 1)).sqrt()
    far = error / size.clamp(min=float(size.mean()) * 1e-6 + 1e-30)
    return float(far.max()) if far.isfinite().all() else float("inf")


def allowed(*dtypes: torch.dtype) -> float:
    """The most that `apart` may give for vectors of these types."""
    return ROUNDINGS * unit(*dtypes)


def _pair_size(rotation: KeyRotation | None, vectors: Tensor) -> Tensor:
    """[T, H, D]: the length of the pair in which each number turns; of a number that does not turn, its own size."""
    sizes = vectors.abs()
    if rotation is None:
        return sizes
    part = sizes[..., rotation.first : rotation.first + rotation.rotary_dim]
    half = rotation.rotary_dim // 2
    pairs = part.view(*part.shape[:-1], *((half, 2) if rotation.is_interleaved else (2, half)))
    dim = -1 if rotation.is_interleaved else -2
    part.copy_(pairs.norm(dim=dim, keepdim=True).expand_as(pairs).flatten(-2))
    return sizes


def direct_trouble(place: LayerPlace, positions: tuple[int, ...]) -> str:
    """What a layer's rotary embedding, called with random queries and keys, does otherwise than turning them.

    Args:
        place: a layer whose keys turn.
        positions: at which it is called; the first is what the others are turned from.

    Returns:
        Empty: nothing.
    """
    rotation, num_tokens = place.rotation, 8
    assert rotation is not None
    rotary: Any = rotation.rotary
    size = int(getattr(rotary, "head_size", 0)) or rotation.rotary_dim
    bare = replace(rotation, first=size - rotation.rotary_dim if rotation.first else 0)
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(num_tokens, size, generator=generator).to(rotation.table.device, rotation.dtype)
    shape = (num_tokens, 1, size) if place.layout.is_latent else (num_tokens, size)
    seen = {}
    for position in positions:
        at = torch.arange(position, position + num_tokens, device=given.device)
        query, key = rotary(at, given.clone().view(shape), given.clone().flip(0).contiguous().view(shape))
        seen[position] = query.view(num_tokens, -1, size), key.view(num_tokens, -1, size)
    most = allowed(rotation.dtype)
    for position in positions[1:]:
        for name, still, wanted in zip(("queries", "keys"), seen[positions[0]], seen[position], strict=True):
            far = apart(bare, turned(bare, still, positions[0], position), wanted)
            if not far <= most:
                return misunderstood(name, positions[0], position, far, most)
    return ""


def misunderstood(name: str, old: int, new: int, far: float, most: float) -> str:
    """A rotation that is another one, in words."""
    return (
        f"{name} turned from position {old} to {new} are {far:.2g} of their size away from those that the model turns "
        f"there itself (at most {most:.2g}): its rotation was not understood"
    )
