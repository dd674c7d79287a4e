"""Host buffers as tensors, owned or wrapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor


def new_bytes(count: int) -> UInt8[Tensor, " count"]:
    """[count] uint8, uninitialized.

    numpy allocates huge pages. With small ones, page faults take longer than filling the memory.
    """
    return torch.from_numpy(np.empty(count, np.uint8))


def pinned_bytes(count: int) -> memoryview:
    """Pinned (page-locked) host memory, for fast copies to a GPU; never swapped out."""
    return memory_of(torch.empty(count, dtype=torch.uint8, pin_memory=True))


def bytes_of(tensor: Shaped[Tensor, "*any"]) -> UInt8[Tensor, " bytes"]:
    """[bytes] uint8: the memory of a CPU tensor, a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def view_of(data: bytes | bytearray | memoryview) -> UInt8[Tensor, " bytes"]:
    """[bytes] uint8: the same memory, kept alive by the view; never write to it if `data` is read-only."""
    return torch.from_numpy(np.asarray(_Memory(data)))


def memory_of(tensor: Shaped[Tensor, "*any"]) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    return tensor.numpy().data


class _Memory:
    """numpy array interface over bytes; torch has no read-only tensors and warns of read-only arrays."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.__array_interface__: dict[str, Any] = {
            **np.frombuffer(data, np.uint8).__array_interface__,
            "strides": None,
        }
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)
        self._owner = memoryview(data)
