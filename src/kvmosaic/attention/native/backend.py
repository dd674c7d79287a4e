"""Native backend: all runs of a layer in one call of the C extension, and the extension with its thread pool.

It also copies tokens of a paged cache with transposed keys, as vLLM's CPUs have it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from kvmosaic.attention.reads import POOLS, ReadPlan
from kvmosaic.attention.torch_backend import Pools, TorchBackend
from kvmosaic.container import INSTRUCTION_SETS, InstructionSet, allowed_instruction_sets
from kvmosaic.errors import InvalidConfig, NativeUnavailable
from kvmosaic.rope import RotationTables

LIBRARY = Path(__file__).with_name("paged.so")
"""Path of the built extension."""

_VERSION = 2
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
    functions.kvmosaic_gather.argtypes = (c_void_p, c_void_p, c_int64)
    functions.kvmosaic_gather.restype = None
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


MAX_DIM = 256
"""Max size of a key or value head."""
MAX_GROUP = 128
"""Max query heads per key head."""
_MAX_KEPT_BYTES = 1 << 24
DTYPES = (torch.float32, torch.bfloat16)


class NativeBackend(TorchBackend):
    """Attention by the C extension for supported layers, by torch for others.

    Takes layers in float32 or bfloat16 on the CPU with heads of at most 256 numbers. Uses as many threads as torch.

    Args:
        library: the extension; default: the one in the package.
        instruction_set: one that the processor supports; default: the best.

    Raises:
        NativeUnavailable: the extension is missing.
        InvalidConfig: the processor does not support the instruction set.
    """

    def __init__(self, library: Library | None = None, instruction_set: InstructionSet | None = None) -> None:
        self.library = library or load_library()
        known = self.library.instruction_sets
        if instruction_set is not None and instruction_set not in known:
            raise InvalidConfig(f"instruction_set is {instruction_set!r}; this processor knows {', '.join(known)}")
        self.instruction_set: InstructionSet = instruction_set or known[-1]
        self._scratch = _Scratch()

    def plan_reader(self, plan: ReadPlan) -> NativeReader:
        """See `LayerBackend.plan_reader`."""
        self._scratch.begin_step()
        return NativeReader(plan, self.library, self.instruction_set, self._scratch)


class _Scratch(threading.local):
    """Buffers for partial results, one per thread: new memory in every step would be zeroed by the system first."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8)

    def begin_step(self) -> None:
        """Frees the memory of an unusually long prompt."""
        if len(self._kept) > _MAX_KEPT_BYTES:
            self._kept = torch.empty(0, dtype=torch.uint8)

    def room(self, num_bytes: int) -> UInt8[Tensor, " bytes"]:
        """A buffer of at least `num_bytes`, reused by the thread's next call."""
        if num_bytes > len(self._kept):
            self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept


class NativeReader:
    """One plan in the C extension's format.

    Shapes and strides are described for the first layer; for layers of the same shapes only the addresses change.
    """

    def __init__(self, plan: ReadPlan, library: Library, instruction_set: InstructionSet, scratch: _Scratch) -> None:
        self._plan = plan
        self._library = library
        self._instruction_set = instruction_set
        self._masks = [None if call.mask is None else call.mask.contiguous() for call in plan.calls]
        self._calls = torch.tensor(
            [
                (
                    POOLS.index(call.pool),
                    call.first_slot,
                    call.num_tokens,
                    call.first,
                    call.last,
                    int(call.causal),
                    0 if mask is None else mask.data_ptr(),
                )
                for call, mask in zip(plan.calls, self._masks, strict=True)
            ]
        )
        needed = plan.needed_slots()
        self._needed = [(number, pool, needed[pool]) for number, pool in enumerate(POOLS) if needed[pool]]
        self._scratch = scratch
        self._pointers = (PoolPointers * len(POOLS))()
        self._layer = LayerPointers(
            pools=ctypes.addressof(self._pointers),
            calls=self._calls.data_ptr(),
            rows=plan.rows.data_ptr(),
            num_rows=plan.num_rows,
            num_stacked=len(plan.rows),
            num_calls=len(plan.calls),
        )
        self._looks: object = None
        self._scratch_bytes = 0

    def attend(
        self,
        query: Float[Tensor, "T H D"],
        pools: Pools,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]] | None:
        """See `PlanReader.attend`."""
        layer, pointers = self._layer, self._pointers
        used = [(number, *pools[pool]) for number, pool, _ in self._needed]
        num_threads = torch.get_num_threads()
        looks = [num_threads, query.dtype, query.shape, query.stride()]
        for _, key, value in used:
            looks += (key.dtype, key.shape, key.stride(), value.dtype, value.shape, value.stride())
        if looks != self._looks:
            if not all(_fits(query, key, value) for _, key, value in used):
                return None
            self._describe(query, pools, num_threads)
            self._looks = looks
        num_rows, num_heads, _ = query.shape
        output = torch.empty(num_rows, num_heads, used[0][2].shape[2], dtype=query.dtype)
        lse = torch.empty(num_rows, num_heads)
        layer.query, layer.output, layer.lse = query.data_ptr(), output.data_ptr(), lse.data_ptr()
        for number, key, value in used:
            pointers[number].key, pointers[number].value = key.data_ptr(), value.data_ptr()
        layer.scaling, layer.softcap = scaling, softcap or 0.0
        if tables is None or tables.is_identity:
            layer.cosines = layer.sines = layer.partners = None
        else:
            layer.cosines, layer.sines = tables.cos.data_ptr(), tables.sin.data_ptr()
            layer.partners = tables.permutation.data_ptr()
        scratch = self._scratch.room(self._scratch_bytes)
        layer.scratch = scratch.data_ptr()
        self._library.attend(layer, self._instruction_set, num_threads)
        return output, lse

    def _describe(self, query: Tensor, pools: Pools, num_threads: int) -> None:
        """Sets everything but addresses and per-layer values, for layers with the same shapes."""
        layer = self._layer
        assert len(query) == self._plan.num_rows, "a plan is for all rows of a step"
        for number, pool, needed in self._needed:
            key, value = pools[pool]
            assert len(key) >= needed, "reads lie inside their pools"
            self._pointers[number] = PoolPointers(0, 0, *key.stride()[:2], *value.stride()[:2])
        layer.query_row, layer.query_head = query.stride()[:2]
        layer.num_heads, layer.key_dim = query.shape[1:]
        layer.num_kv_heads, layer.value_dim = value.shape[1:]
        layer.is_bfloat16 = query.dtype is torch.bfloat16
        self._scratch_bytes = self._library.scratch_bytes(layer, num_threads)


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the extension supports these tensors."""
    tensors = (query, key, value)
    return (
        all(x.device.type == "cpu" and x.dtype is query.dtype and x.stride(-1) == 1 for x in tensors)
        and query.dtype in DTYPES
        and max(key.shape[-1], value.shape[-1]) <= MAX_DIM
        and query.shape[1] <= MAX_GROUP * key.shape[1]
    )


class _Gather(ctypes.Structure):
    """`Gather` in gather.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("cache", "slots", "keys", "values")),
        *((name, c_int64) for name in ("num_slots", "num_heads", "dim", "block_size", "number_bytes", "block_bytes")),
        ("next", c_int64),
    )


def gather(
    library: Library,
    cache: Float[Tensor, "N G P D2"],
    slots: Int[Tensor, " S"],
    out: tuple[Float[Tensor, "S G D"], Float[Tensor, "S G D"]] | None = None,
) -> tuple[Float[Tensor, "S G D"], Float[Tensor, "S G D"]]:
    """Keys and values of tokens.

    Args:
        library: the extension.
        cache: [N, G, P, 2D], each block and head contiguous: keys [D, P], then values [P, D].
        slots: [S] int64; token p of block n is slot n P + p.
        out: where to, contiguous: new memory in every call would be zeroed by the system first.

    Raises:
        ValueError: a cache of another kind, or a slot outside it.
    """
    num_blocks, num_heads, block_size, both = cache.shape
    if cache.device.type != "cpu" or cache.itemsize not in (2, 4) or not cache[0].is_contiguous():
        raise ValueError(f"a cache of {cache.dtype} with strides {cache.stride()} on {cache.device}")
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise ValueError(f"slots {int(slots.min())} to {int(slots.max())} of {num_blocks * block_size}")
    slots = slots.to(torch.int64).contiguous()
    shape = (len(slots), num_heads, both // 2)
    keys, values = out or (torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype))
    for each in (keys, values):
        if each.shape != shape or each.dtype is not cache.dtype or not each.is_contiguous():
            raise ValueError(f"copies of {shape} do not go into {tuple(each.shape)} of {each.dtype}")
    given = _Gather(
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        num_slots=len(slots),
        num_heads=num_heads,
        dim=both // 2,
        block_size=block_size,
        number_bytes=cache.itemsize,
        block_bytes=cache.stride(0) * cache.itemsize,
    )
    library.functions.kvmosaic_gather(ctypes.byref(given), library.parallel, c_int64(torch.get_num_threads()))
    return keys, values
