"""Triton trial: checks that Triton attention runs on a device, before a model depends on it."""

from __future__ import annotations

import torch

from kvmosaic.attention.reads import Call, ReadPlan
from kvmosaic.attention.torch_backend import attend_plain
from kvmosaic.attention.triton.backend import DTYPES, TritonBackend
from kvmosaic.errors import TritonUnavailable

_MIN_CAPABILITY = (8, 0)
_NUM_ROWS, _NUM_KEYS = 3, 40
_TOLERANCE = 0.05
"""Max error for outputs of order 1: the trial finds what is broken, the tests find what is inexact."""


def try_triton(backend: TritonBackend, dtype: torch.dtype, device: torch.device) -> None:
    """Compiles the kernels, runs them once on `device`, and compares with the plain backend.

    Raises:
        TritonUnavailable: an unsupported device or dtype, or any failure.
    """
    if device.type != "cuda" and not backend.is_interpreted:
        raise TritonUnavailable(
            f"it is for CUDA, the model is on {device} (TRITON_INTERPRET=1 in the environment runs it there, for tests)"
        )
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise TritonUnavailable(f"it is for float32, bfloat16 and float16, the model is in {name} on {device}")
    try:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
            found = torch.cuda.get_device_capability(device)
            raise TritonUnavailable(f"it needs compute capability 8.0, {device} has {found[0]}.{found[1]}")
        error = _largest_error(backend, dtype, device)
    except TritonUnavailable:
        raise
    except Exception as failure:  # a missing compiler or driver shows in many ways
        first_line = (str(failure).strip().splitlines() or [""])[0][:200]
        raise TritonUnavailable(f"a trial on {device} failed: {type(failure).__name__}: {first_line}") from failure
    if not error <= _TOLERANCE:
        raise TritonUnavailable(f"a trial on {device} was wrong by {error:.2g}, {_TOLERANCE} is allowed")


def _largest_error(backend: TritonBackend, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error for a few rows over two runs, so that both kernels run."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(count, 2, 64, generator=generator).to(device, dtype) for count in (_NUM_ROWS, _NUM_KEYS, _NUM_KEYS)
    )
    rows = [*range(_NUM_ROWS), 0]
    calls = (Call(0, _NUM_ROWS, "request", 0, _NUM_KEYS - 9), Call(_NUM_ROWS, len(rows), "request", _NUM_KEYS - 9, 9))
    numbers = torch.tensor(rows, device=device)
    plan = ReadPlan(calls, numbers, torch.zeros_like(numbers), _NUM_ROWS, False, False, tuple(rows))
    result = backend.plan_reader(plan).attend(query, {"request": (key, value)}, scaling=0.125)
    assert result is not None, "the trial suits the backend"
    mask = torch.ones(_NUM_ROWS, _NUM_KEYS, dtype=torch.bool, device=device)
    mask[1:, _NUM_KEYS - 9 :] = False
    expected, _ = attend_plain(query, key, value, scaling=0.125, mask=mask)
    return float((result[0].float() - expected.float()).abs().max())
