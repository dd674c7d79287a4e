"""Plain bytes of the host as tensors: fresh ones, and those that somebody else owns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def new_bytes(count: int) -> Tensor:
    """[count] uint8, not filled.

    numpy asks the system for huge pages. With small ones, first touching the memory takes longer than filling it.
    """
    return torch.from_numpy(np.empty(count, np.uint8))


def pinned_bytes(count: int) -> memoryview:
    """Bytes that a GPU reads directly, so that copies to it are fast; they are never swapped out."""
    return memory_of(torch.empty(count, dtype=torch.uint8, pin_memory=True))


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8: the memory of a tensor on the CPU, a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def view_of(data: bytes | bytearray | memoryview) -> Tensor:
    """[bytes] uint8: the same memory, kept alive by the view; never write to it if `data` is read-only."""
    return torch.from_numpy(np.asarray(_Memory(data)))


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    return tensor.numpy().data


class _Memory:
    """Bytes as numpy takes them; torch has no read-only tensors and warns of arrays that are."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.__array_interface__: dict[str, Any] = {
            **np.frombuffer(data, np.uint8).__array_interface__,
            "strides": None,
        }
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)
        self._owner = memoryview(data)
