"""In-place left shift of a window's tokens: each byte is moved once, nothing is allocated."""

from __future__ import annotations

import ctypes
import math

import torch
from jaxtyping import Shaped
from torch import Tensor

_ROWS_PER_BLOCK = 8
"""Number of memmove calls that take about as long as one torch call."""

# A torch custom operation, so that torch.compile does not trace into it.
_NAME = "kvmosaic::shift_left"
torch.library.define(_NAME, "(Tensor(a!) storage, int dim, SymInt start, SymInt stop, SymInt by) -> ()")


def shift_left(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """Moves the tokens start + by … stop - 1 of dimension `dim` to start …; evicted ones are overwritten.

    Source and target may overlap. memmove handles that in one call, where the storage is in
    host memory. Elsewhere blocks of `by` tokens are copied from left to right, each to slots just vacated: with
    chunks much smaller than the window that is many calls, and a ring is the better choice.

    Args:
        storage: contiguous, any rank.
        dim: dimension of the tokens.
        start: target of the first token that stays.
        stop: end of the tokens that move.
        by: how far they move.
    """
    torch.ops.kvmosaic.shift_left(storage, dim, start, stop, by)


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _shift_left(storage: Tensor, dim: int, start: int, stop: int, by: int) -> None:
    assert storage.is_contiguous(), "the storage of a rolling cache is contiguous"
    num_rows = math.prod(storage.shape[:dim])
    num_blocks = -(-(stop - start - by) // by)
    if storage.device.type == "cpu" and num_rows <= _ROWS_PER_BLOCK * num_blocks:
        move_rows(storage, dim, start, stop, by)
    else:
        copy_blocks(storage, dim, start, stop, by)
    torch.autograd.graph.increment_version(storage)  # autograd must detect that the old keys are overwritten


def _shift_nothing(storage: Tensor, dim: int, start: int, stop: int, by: int) -> None:
    """Fake implementation for compilers: the storage is written."""


torch.library.register_fake(_NAME, _shift_nothing)


def copy_blocks(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """One copy for every `by` tokens, to slots that the previous copy has vacated."""
    for place in range(start, stop - by, by):
        length = min(by, stop - by - place)
        storage.narrow(dim, place, length).copy_(storage.narrow(dim, place + by, length))


def move_rows(storage: Shaped[Tensor, "*storage"], dim: int, start: int, stop: int, by: int) -> None:
    """One memmove for each row of `dim`, in host memory."""
    token_bytes = storage.stride(dim) * storage.element_size()
    row_bytes, num_bytes = storage.shape[dim] * token_bytes, (stop - start - by) * token_bytes
    first = storage.data_ptr() + start * token_bytes
    for target in range(first, first + math.prod(storage.shape[:dim]) * row_bytes, row_bytes):
        ctypes.memmove(target, target + by * token_bytes, num_bytes)
