"""Native backend: all runs of a layer in one call of the C extension."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvmosaic.attention.layer_backend import Pools
from kvmosaic.attention.native.library import InstructionSet, LayerPointers, Library, PoolPointers, load_library
from kvmosaic.attention.reads import PoolName, ReadPlan
from kvmosaic.attention.torch_backend import TorchBackend
from kvmosaic.errors import InvalidConfig
from kvmosaic.rope import RotationTables

MAX_DIM = 256
"""Longest key or value head."""
MAX_GROUP = 128
"""Most query heads per key head."""
DTYPES = (torch.float32, torch.bfloat16)

_POOLS: tuple[PoolName | None, ...] = (None, "request", "chunk_cache")


class NativeBackend(TorchBackend):
    """Attention by the C extension where a layer suits it, by torch everywhere else.

    Takes layers in float32 or bfloat16 on the CPU with heads of at most 256 numbers. Uses as many threads as torch.

    Args:
        library: the extension; default: the one in the package.
        instruction_set: one that the processor knows; default: the best.

    Raises:
        NativeUnavailable: the extension is not there.
        InvalidConfig: the processor does not know the instruction set.
    """

    def __init__(self, library: Library | None = None, instruction_set: InstructionSet | None = None) -> None:
        self.library = library or load_library()
        known = self.library.instruction_sets
        if instruction_set is not None and instruction_set not in known:
            raise InvalidConfig(f"instruction_set is {instruction_set!r}; this processor knows {', '.join(known)}")
        self.instruction_set: InstructionSet = instruction_set or known[-1]

    def plan_reader(self, plan: ReadPlan) -> NativeReader:
        """See `LayerBackend.plan_reader`."""
        return NativeReader(plan, self.library, self.instruction_set)


class NativeReader:
    """One plan as the C extension wants it, with room for its partial results."""

    def __init__(self, plan: ReadPlan, library: Library, instruction_set: InstructionSet) -> None:
        self._plan = plan
        self._library = library
        self._instruction_set = instruction_set
        self._masks = [None if call.mask is None else call.mask.contiguous() for call in plan.calls]
        self._calls = torch.tensor(
            [
                (
                    _POOLS.index(call.pool),
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
        self._needed = {
            pool: max((call.first_slot + call.num_tokens for call in plan.calls if call.pool == pool), default=0)
            for pool in _POOLS
        }
        self._scratch: Tensor | None = None

    def attend(
        self,
        query: Tensor,
        pools: Pools,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """See `PlanReader.attend`."""
        used = {pool: pools[pool] for pool, needed in self._needed.items() if needed}
        if not all(_fits(query, key, value) for key, value in used.values()):
            return None
        assert len(query) == self._plan.num_rows, "a plan is for all rows of a step"
        assert all(len(key) >= self._needed[pool] for pool, (key, _) in used.items()), "reads lie inside their pools"
        num_rows, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = next(iter(used.values()))[1].shape[1:]
        output = torch.empty(num_rows, num_heads, value_dim, dtype=query.dtype)
        lse = torch.empty(num_rows, num_heads)
        pointers = (PoolPointers * len(_POOLS))(
            *(_pointers(*used[pool]) if pool in used else PoolPointers() for pool in _POOLS)
        )
        layer = LayerPointers(
            query=query.data_ptr(),
            output=output.data_ptr(),
            lse=lse.data_ptr(),
            pools=ctypes.addressof(pointers),
            calls=self._calls.data_ptr(),
            rows=self._plan.rows.data_ptr(),
            query_row=query.stride(0),
            query_head=query.stride(1),
            num_rows=num_rows,
            num_stacked=len(self._plan.rows),
            num_calls=len(self._plan.calls),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            is_bfloat16=query.dtype is torch.bfloat16,
            scaling=scaling,
            softcap=softcap or 0.0,
        )
        if tables is not None and not tables.is_identity:
            layer.cosines, layer.sines = tables.cos.data_ptr(), tables.sin.data_ptr()
            layer.partners = tables.permutation.data_ptr()
        num_threads = torch.get_num_threads()
        scratch = self._room(self._library.scratch_bytes(layer, num_threads))
        layer.scratch = scratch.data_ptr()
        self._library.attend(layer, self._instruction_set, num_threads)
        return output, lse

    def _room(self, num_bytes: int) -> Tensor:
        if self._scratch is None or len(self._scratch) < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the extension can read these tensors."""
    tensors = (query, key, value)
    return (
        all(x.device.type == "cpu" and x.dtype is query.dtype and x.stride(-1) == 1 for x in tensors)
        and query.dtype in DTYPES
        and max(key.shape[-1], value.shape[-1]) <= MAX_DIM
        and query.shape[1] <= MAX_GROUP * key.shape[1]
    )


def _pointers(key: Tensor, value: Tensor) -> PoolPointers:
    return PoolPointers(key.data_ptr(), value.data_ptr(), *key.stride()[:2], *value.stride()[:2])
