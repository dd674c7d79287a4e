"""Validation of the shapes, sizes and chunks of a rolling KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from kvmosaic.errors import InvalidChunk, InvalidConfig

MAX_SIZE = 2**40
"""Max value of every size argument; memory ends long before."""


def whole_number(name: str, value: object, least: int) -> int:
    """The value, if it is a whole number from `least` to `MAX_SIZE`.

    Raises:
        InvalidConfig: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
        raise InvalidConfig(f"{name} is {value!r}; give a whole number from {least} to {MAX_SIZE}")
    return value


def shape_of(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape as a tuple, if it is one of at least one dimension.

    Raises:
        InvalidConfig: it is not.
    """
    if isinstance(shape, str) or not isinstance(shape, Sequence) or not shape:
        raise InvalidConfig(f"{name} is {shape!r}; give the size of each dimension")
    return tuple(whole_number(f"{name}[{number}]", size, 1) for number, size in enumerate(shape))


def dimension(seq_dim: int, rank: int) -> int:
    """The dimension of the tokens, counted from the left.

    Raises:
        InvalidConfig: there is no such dimension.
    """
    if isinstance(seq_dim, bool) or not isinstance(seq_dim, int) or not -rank <= seq_dim < rank:
        raise InvalidConfig(f"seq_dim is {seq_dim!r}; shapes of {rank} dimensions have {-rank} to {rank - 1}")
    return seq_dim % rank


def dtype_of(dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of keys and values: torch's default if none is given.

    Raises:
        InvalidConfig: it is not a torch dtype.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidConfig(f"dtype is {dtype!r}; give one of torch, such as torch.bfloat16")
    return dtype or torch.get_default_dtype()


def check_shapes(
    k_shape: tuple[int, ...], v_shape: tuple[int, ...], dim: int, sink_size: int, window_size: int
) -> None:
    """Raises InvalidConfig if keys and values do not match each other or the sizes."""
    if len(k_shape) != len(v_shape) or k_shape[:-1] != v_shape[:-1]:
        raise InvalidConfig(f"k_shape {k_shape} and v_shape {v_shape} may differ in the last dimension only")
    for name, shape in (("k_shape", k_shape), ("v_shape", v_shape)):
        if shape[dim] != sink_size + window_size:
            raise InvalidConfig(
                f"{name} has room for {shape[dim]} tokens in dimension {dim}, but sink_size {sink_size} + window_size "
                f"{window_size} = {sink_size + window_size}; make them equal"
            )


def check_chunk(
    name: str, chunk: Shaped[Tensor, "*chunk"], storage: Shaped[Tensor, "*storage"], dim: int, chunk_size: int
) -> None:
    """Raises InvalidChunk if the chunk cannot be written into the storage."""
    shape = (*storage.shape[:dim], chunk_size, *storage.shape[dim + 1 :])
    if not isinstance(chunk, Tensor):
        raise InvalidChunk(f"update got {name} as {type(chunk).__name__}; give a tensor of shape {shape}")
    if chunk.shape != shape:
        raise InvalidChunk(
            f"update got {name} of shape {tuple(chunk.shape)}, not {shape}: exactly chunk_size {chunk_size} tokens in "
            f"dimension {dim}, the rest as in {name}_shape"
        )
    if chunk.dtype != storage.dtype or chunk.device != storage.device:
        raise InvalidChunk(
            f"update got {name} in {chunk.dtype} on {chunk.device}, but the cache is in {storage.dtype} on "
            f"{storage.device}; convert it first, or give the cache another dtype and device"
        )
