"""This machine: its memory, and the type in which it loads a model."""

from __future__ import annotations

import torch

from kvmosaic.memory.storage import device_memory_bytes
from kvmosaic.model.transformers_loading import dtype_on


def dtype_here(stored: str) -> str:
    """Returns the dtype that `load_model` chooses on this machine for a checkpoint in `stored`."""
    return str(dtype_on(_device(), getattr(torch, stored))).removeprefix("torch.")


def memory_here() -> int:
    """Bytes of memory of this machine's device, as the engine counts it."""
    return device_memory_bytes(_device())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
