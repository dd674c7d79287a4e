"""Compiled extension: its location, its structures, and the thread pool it shares with torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvmosaic.cpu_instructions import INSTRUCTION_SETS, InstructionSet, allowed_instruction_sets
from kvmosaic.errors import NativeUnavailable

LIBRARY = Path(__file__).with_name("paged.so")
"""Path of the built extension."""

_VERSION = 1
"""Version of the structures below; `kvmosaic_version` in paged.c."""


class PoolPointers(ctypes.Structure):
    """`Pool` in paged.h: strides are in numbers, not bytes."""

    _fields_ = (
        *((name, c_void_p) for name in ("key", "value")),
        *((name, c_int64) for name in ("key_token", "key_head", "value_token", "value_head")),
    )


class LayerPointers(ctypes.Structure):
    """`Layer` in paged.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "output", "lse", "pools", "calls", "rows")),
        *((name, c_void_p) for name in ("cosines", "sines", "partners", "scratch")),
        *((name, c_int64) for name in ("query_row", "query_head", "num_rows", "num_stacked", "num_calls")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "is_bfloat16")),
        *((name, c_double) for name in ("scaling", "softcap")),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded extension."""

    functions: Any
    parallel: Any
    """The address of GOMP_parallel in the OpenMP runtime that torch uses, or None: one thread."""
    instruction_sets: tuple[InstructionSet, ...]
    """Instruction sets that the processor supports and the environment allows, in ascending order."""

    def scratch_bytes(self, layer: LayerPointers, num_threads: int) -> int:
        """Bytes that `attend` needs for this layer."""
        return int(self.functions.kvmosaic_scratch_bytes(ctypes.byref(layer), num_threads))

    def attend(self, layer: LayerPointers, instruction_set: InstructionSet, num_threads: int) -> None:
        """Runs one layer."""
        path = INSTRUCTION_SETS.index(instruction_set)
        failed = self.functions.kvmosaic_attend(ctypes.byref(layer), path, self.parallel, num_threads)
        assert not failed, f"the processor knows {self.instruction_sets}, not {instruction_set}"


def load_library(path: Path = LIBRARY) -> Library:
    """Loads the extension.

    Raises:
        NativeUnavailable: it was not built, or cannot be loaded.
        InvalidConfig: KVMOSAIC_CPU_ISA has an unknown value.
    """
    if not path.exists():
        raise NativeUnavailable("the package was installed without its C extension (no C compiler was found then)")
    try:
        functions = ctypes.CDLL(str(path))
        version = functions.kvmosaic_version()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"its C extension cannot be loaded: {error}") from None
    if version != _VERSION:
        raise NativeUnavailable(f"its C extension is of version {version}, not {_VERSION}; install the package again")
    functions.kvmosaic_scratch_bytes.argtypes = (c_void_p, c_int64)
    functions.kvmosaic_attend.argtypes = (c_void_p, c_int64, c_void_p, c_int64)
    for function in (functions.kvmosaic_scratch_bytes, functions.kvmosaic_attend, functions.kvmosaic_best_path):
        function.restype = c_int64
    known, allowed = functions.kvmosaic_best_path() + 1, allowed_instruction_sets()
    return Library(functions, _parallel(), INSTRUCTION_SETS[: min(known, len(allowed))])


def _parallel() -> Any:
    """GOMP_parallel of the OpenMP runtime in this process; a second runtime is never loaded."""
    only_loaded = getattr(os, "RTLD_NOLOAD", None)
    if only_loaded is None:
        return None
    for candidate in _openmp_runtimes():
        try:
            runtime = ctypes.CDLL(candidate, mode=os.RTLD_LAZY | only_loaded)
            return ctypes.cast(runtime.GOMP_parallel, c_void_p)
        except (OSError, AttributeError):
            continue
    return None


def _openmp_runtimes() -> Iterator[str]:
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for name in ("libgomp*", "libomp*", "libiomp*"):
            yield from sorted(str(path) for path in folder.glob(name))
    yield from ("libgomp.so.1", "libomp.so", "libiomp5.so")
