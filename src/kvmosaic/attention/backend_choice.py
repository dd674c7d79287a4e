"""Choice of the attention backend, and the reason for it."""

from __future__ import annotations

import os
from inspect import signature

import torch

from kvmosaic.attention.interface import BackendName, ChosenBackend
from kvmosaic.attention.native import NativeBackend
from kvmosaic.attention.native.backend import DTYPES
from kvmosaic.attention.torch_backend import AttentionBackend, TorchBackend
from kvmosaic.errors import InvalidConfig, NativeUnavailable, TritonUnavailable

VARIABLE = "KVMOSAIC_ATTENTION"
"""Environment variable with the name of a backend, for programs that do not call `LLM` directly."""


def choose_backend(
    wanted: AttentionBackend | BackendName | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_bias: bool = False,
) -> ChosenBackend:
    """The requested backend, or else triton on a GPU, native on a CPU, and torch where these are unavailable.

    Args:
        wanted: an instance, a name, or None: the environment variable, if it is set.
        dtype: dtype of the model.
        device: device of the model.
        has_bias: whether its layers add a bias by distance, which only torch supports.

    Raises:
        InvalidConfig: an unknown name, or an instance without bias support for a model with a bias.
        NativeUnavailable, TritonUnavailable: the requested backend cannot be used.
    """
    asked = "asked for"
    if wanted is None and os.environ.get(VARIABLE):
        wanted, asked = os.environ[VARIABLE], f"{VARIABLE} says so"  # type: ignore[assignment]
    if wanted is not None and not isinstance(wanted, str):
        if has_bias and "bias" not in signature(wanted.attend).parameters:
            raise InvalidConfig(
                f"the attend of {type(wanted).__name__} takes no bias, and this model's layers add one by distance "
                "(ALiBi); give it a parameter `bias`, or leave the choice of a backend open"
            )
        return ChosenBackend(wanted, type(wanted).__name__, asked)
    if wanted not in (None, "torch", "native", "triton"):
        raise InvalidConfig(
            f"the attention backend is {wanted!r}; choose 'triton', 'torch' or 'native', or pass an instance"
        )
    if wanted == "torch":
        return ChosenBackend(TorchBackend(), "torch", asked)
    name = wanted or ("triton" if device.type == "cuda" else "native")
    try:
        if has_bias:
            unavailable = TritonUnavailable if name == "triton" else NativeUnavailable
            raise unavailable("this model's layers add a bias by distance (ALiBi), which torch attention computes")
        return _chosen_triton(dtype, device, wanted) if name == "triton" else _chosen_native(dtype, device)
    except (NativeUnavailable, TritonUnavailable) as error:
        if wanted is not None:
            raise type(error)(f"{name} attention cannot be used: {error}; leave the choice open") from None
        return ChosenBackend(TorchBackend(), "torch", str(error))


def _chosen_native(dtype: torch.dtype, device: torch.device) -> ChosenBackend:
    if device.type != "cpu":
        raise NativeUnavailable(f"it is for the CPU, the model is on {device}")
    if dtype not in DTYPES:
        raise NativeUnavailable(f"it is for float32 and bfloat16, the model is in {str(dtype).removeprefix('torch.')}")
    backend = NativeBackend()
    threads = "" if backend.library.parallel else ", one thread: torch has no OpenMP here"
    return ChosenBackend(backend, "native", f"C extension, {backend.instruction_set}{threads}")


def _chosen_triton(dtype: torch.dtype, device: torch.device, wanted: str | None) -> ChosenBackend:
    try:
        # triton exists only where torch was built for a GPU, and its import is slow
        from kvmosaic.attention.triton.backend import TritonBackend, try_triton
    except ImportError as error:
        raise TritonUnavailable(f"Triton cannot be imported for {device}: {error}") from None
    backend = TritonBackend()
    if backend.is_interpreted and wanted is None:
        raise TritonUnavailable(f"TRITON_INTERPRET is set, and {device} should not wait for the CPU")
    try_triton(backend, dtype, device)
    return ChosenBackend(backend, "triton", f"Triton {backend.version}{', interpreted' * backend.is_interpreted}")
