"""Row kernels: a layer's small operations in bfloat16, each one call of the C extension."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch

from kvmosaic.attention.native.backend import load_library
from kvmosaic.container import InstructionSet
from kvmosaic.errors import NativeUnavailable

_FEW_ROWS = 16
"""Row count up to which a second thread is not worth it."""


class NormPlan(ctypes.Structure):
    """`Norm` in rows.c."""

    _fields_ = (("width", c_int64), ("form", c_int64), ("epsilon", c_double), ("parallel", c_void_p))


class GatePlan(ctypes.Structure):
    """`Gate` in rows.c."""

    _fields_ = (("activation", c_int64), ("parallel", c_void_p))


class TurnPlan(ctypes.Structure):
    """`Turn` in rows.c."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "query_row", "key_row", "head_dim")),
        *((name, c_int64) for name in ("dims", "pairs", "table_dim", "second", "step", "wide")),
        *(("sign", c_double), ("parallel", c_void_p)),
    )


class RowKernels:
    """The functions of rows.c for one instruction set, by default the best that the processor supports.

    They are called with addresses, the first one of a plan: a call with tensors would take longer than the work. All
    numbers are contiguous bfloat16 on the CPU.

        norm(plan, x, residual, weight, sum, out, rows, threads)   out = norm(x), or sum = x + residual, out = norm(sum)
        gate(plan, gate, up, numbers, threads)                     gate = activation(gate) * up
        turn(plan, query, key, cos, sin, rows, threads)            rotates queries and keys in place

    Raises:
        NativeUnavailable: the extension is missing, or older than these functions.
    """

    def __init__(self, instruction_set: InstructionSet | None = None) -> None:
        library = load_library()
        self.parallel = library.parallel
        chosen = instruction_set or library.instruction_sets[-1]
        self.norm = _function(library.functions, f"kvmosaic_norm_{chosen}", 8)
        self.gate = _function(library.functions, f"kvmosaic_gate_{chosen}", 5)
        self.turn = _function(library.functions, f"kvmosaic_turn_{chosen}", 7)


def num_threads(num_rows: int) -> int:
    """Threads for `num_rows` rows; for a few rows, the look-up in torch would cost more than it saves."""
    return 1 if num_rows <= _FEW_ROWS else torch.get_num_threads()


def _function(functions: Any, name: str, num_arguments: int) -> Any:
    try:
        function = functions[name]
    except AttributeError:
        raise NativeUnavailable(f"its C extension has no {name}; install the package again") from None
    function.argtypes = (c_void_p,) * num_arguments
    function.restype = None
    return function
