"""Choosing who computes attention, and saying why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from kvmosaic.attention.native import NativeBackend
from kvmosaic.attention.native.backend import DTYPES
from kvmosaic.attention.torch_backend import AttentionBackend, TorchBackend
from kvmosaic.errors import InvalidConfig, NativeUnavailable

VARIABLE = "KVMOSAIC_ATTENTION"
"""Environment variable with the name of a backend, for those who do not call `LLM` themselves."""

BackendName = Literal["torch", "native"]


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """A backend and the reason for it."""

    backend: AttentionBackend
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_backend(
    wanted: AttentionBackend | BackendName | None, dtype: torch.dtype, device: torch.device
) -> ChosenBackend:
    """The backend for a model: the one asked for, or else native where it can be used, and torch everywhere else.

    Args:
        wanted: an instance, a name, or None: what the environment variable says, if it is set.
        dtype: of the model.
        device: of the model.

    Raises:
        InvalidConfig: a name that no backend has.
        NativeUnavailable: native is asked for and cannot be used.
    """
    asked = "asked for"
    if wanted is None and os.environ.get(VARIABLE):
        wanted, asked = os.environ[VARIABLE], f"{VARIABLE} says so"  # type: ignore[assignment]
    if wanted is not None and not isinstance(wanted, str):
        return ChosenBackend(wanted, type(wanted).__name__, asked)
    if wanted not in (None, "torch", "native"):
        raise InvalidConfig(f"the attention backend is {wanted!r}; choose 'torch' or 'native', or pass an instance")
    if wanted == "torch":
        return ChosenBackend(TorchBackend(), "torch", asked)
    try:
        backend = _native_backend(dtype, device)
    except NativeUnavailable as error:
        if wanted == "native":
            raise NativeUnavailable(f"native attention cannot be used: {error}; leave the choice open") from None
        return ChosenBackend(TorchBackend(), "torch", str(error))
    threads = "" if backend.library.parallel else ", one thread: torch has no OpenMP here"
    return ChosenBackend(backend, "native", f"C extension, {backend.instruction_set}{threads}")


def _native_backend(dtype: torch.dtype, device: torch.device) -> NativeBackend:
    if device.type != "cpu":
        raise NativeUnavailable(f"it is for the CPU, the model is on {device}")
    if dtype not in DTYPES:
        raise NativeUnavailable(f"it is for float32 and bfloat16, the model is in {str(dtype).removeprefix('torch.')}")
    return NativeBackend()
