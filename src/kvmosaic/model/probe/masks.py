"""Mask detection: a layer's true mask, read from the predicate that transformers would build it from.

Some families express their window only there, so the predicate is evaluated, not the configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvmosaic.layers import MaskSpec

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query index, key index) -> whether the query sees the key."""

_FAR = 1 << 40
"""A query position far beyond any window or chunk of a model."""


def read_mask(predicate: Predicate, device: torch.device) -> MaskSpec | None:
    """Detects whether a predicate is causal, a causal window or causal chunks.

    Returns:
        The mask, or None when the predicate is something else (two-way attention, for instance).
    """

    def sees(query: Tensor, key: Tensor) -> Tensor:
        zero = torch.zeros_like(query)
        return torch.as_tensor(predicate(zero, zero, query, key)).expand(query.shape).cpu()

    def span(query: int) -> int:
        """Number of keys that the query sees, itself included, if they are consecutive."""
        return _bisect(lambda distance: bool(sees(*_pair(query, query - distance, device))), query + 1)

    spans = [span(_FAR + step) for step in (0, 1, 13)]
    if spans[0] == _FAR + 1:
        spec = MaskSpec("full")
    elif spans[0] == spans[1] == spans[2]:
        spec = MaskSpec("window", spans[0])
    else:
        start = _FAR + 1 - spans[0]
        spec = MaskSpec("chunked", _bisect(lambda step: bool(sees(*_pair(start + step, start, device))), _FAR))
    grid = _probe_grid(spec, device)
    return spec if torch.equal(sees(*grid), expected_mask(spec, *(part.cpu() for part in grid))) else None


def expected_mask(spec: MaskSpec, query: Tensor, key: Tensor) -> Tensor:
    """The mask of a spec, with query and key positions of any broadcastable shapes."""
    causal = key <= query
    if spec.kind == "window":
        return causal & (query - key < spec.size)
    if spec.kind == "chunked":
        return causal & (
            torch.div(query, spec.size, rounding_mode="floor") == torch.div(key, spec.size, rounding_mode="floor")
        )
    return causal


def _bisect(is_inside: Callable[[int], bool], limit: int) -> int:
    """The first number in 0 … limit that is not inside, for a predicate that is true first and false later."""
    low, high = 0, 1
    while high < limit and is_inside(high):
        low, high = high, 2 * high
    high = min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_inside(middle) else (low, middle)
    return high if is_inside(low) else low


def _pair(query: int, key: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.tensor([query], device=device), torch.tensor([key], device=device)


def _probe_grid(spec: MaskSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries and keys around every border of the mask, early and late."""
    size = max(spec.size, 1)
    offsets = torch.arange(-3, 4)
    queries = torch.cat((torch.arange(24), size + offsets, 2 * size + offsets, 7 * size + offsets, 100_003 + offsets))
    queries = queries[queries >= 0]
    chunk_start = torch.div(queries, size, rounding_mode="floor") * size
    columns = [torch.arange(24).expand(len(queries), 24), queries[:, None] + offsets]
    columns += [queries[:, None] - size + offsets, chunk_start[:, None] + offsets]
    keys = torch.cat(columns, dim=1).clamp_min(0)
    return queries[:, None].expand_as(keys).reshape(-1).to(device), keys.reshape(-1).to(device)
