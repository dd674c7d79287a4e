"""Triton backend: all runs of a layer in two kernel launches, on an NVIDIA GPU, and its trial on a device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvmosaic.attention.reads import POOLS, Call, ReadPlan
from kvmosaic.attention.torch_backend import Pools, TorchBackend, attend_plain
from kvmosaic.attention.triton.kernel import IS_INTERPRETED, attend_walks, merge_walks, store_rows
from kvmosaic.attention.triton.work import TILE_HEIGHTS, WorkList, list_work
from kvmosaic.errors import TritonUnavailable
from kvmosaic.rope import RotationTables

MAX_DIM = 256
"""Max size of a key or value head."""
MAX_GROUP = TILE_HEIGHTS[-1]
"""Max query heads per key head."""
MAX_TALL_BYTES = 256
"""Max head size, in bytes, for the tallest tile: more does not fit into the shared memory of small GPUs."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MERGED_PARTS = 16
_MIN_BLOCK = 16
"""Min side of a matrix product in Triton."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """Tile shape and pipelining of one kernel program.

    Chosen by compiling for compute capability 8.0 to 12.0: 98,816 bytes of shared memory at most (131,104 on 9.0 and
    10.0, which have more than twice as much), and few or no spilled registers; for heads of up to 128 numbers in 16
    bits, the best of eight on an H200: with 8 warps and two stages, long prompts took 2.2x as long.

    num_keys: keys read at a time
    num_stages: number of such reads in flight
    """

    block_key: int
    block_value: int
    num_keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, key_dim: int, value_dim: int, tile: int, dtype: torch.dtype) -> KernelShape:
        """The shape for a head size and a tile height."""
        block_key, block_value = (max(_MIN_BLOCK, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
        head_bytes = (block_key + block_value) * dtype.itemsize
        if head_bytes <= 512 and tile <= 64:
            return cls(block_key, block_value, 64, 4, 3)
        num_keys = 64 if head_bytes <= 512 else 32 if head_bytes <= 1024 else 16
        return cls(block_key, block_value, num_keys, 8 if tile > 16 else 4, 2 if head_bytes <= 1024 else 1)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """A layer's keys and values in blocks anywhere in a cache, and the blocks of all runs that a step reads.

        table     [B] block ids        │ 7 │ 2 │ 9 │ 2 │ 4 │      a run may begin inside a block; slots of a plan count
        slots                          0   P   2P  3P  4P         along the table: slot s is in block table[s // P]
        keys      [N, P', G, D]        values [N, P', G, Dv]      any strides, the last one 1

    Nothing of it is copied or written. The table counts blocks of P tokens; those of the cache, of P' tokens, may be
    parts of them.
    """

    keys: Shaped[Tensor, "N P G D"]
    values: Shaped[Tensor, "N P G Dv"]
    table: Int[Tensor, " B"]
    """On the cache's device."""
    block_size: int
    """P."""
    scales: tuple[Float[Tensor, ""], Float[Tensor, ""]] | None = None
    """If the cache is in 8 bits (float8): numbers by which keys and values are multiplied, one float32 each."""


QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class TritonBackend(TorchBackend):
    """Attention by Triton kernels for supported layers, by torch for others.

    Takes layers in float32, bfloat16 or float16 with heads of at most 256 numbers. With TRITON_INTERPRET=1 in the
    environment before Triton is imported, the kernels run on the CPU, slowly: that is for tests.
    """

    is_interpreted = IS_INTERPRETED
    version: str = triton.__version__

    def plan_reader(self, plan: ReadPlan) -> TritonReader:
        """See `LayerBackend.plan_reader`."""
        return TritonReader(plan)


class TritonReader:
    """One plan, with a work list for each grouping of heads in its layers."""

    def __init__(self, plan: ReadPlan, works: Mapping[tuple[int, int], WorkList] | None = None) -> None:
        """A reader of a plan; `works` are lists that are made already, by heads per key head and key heads."""
        self._plan = plan
        self._works = dict(works or {})
        self._masks: Tensor | None = None
        self._needed = plan.needed_slots()

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
        used = {pool: pools[pool] for pool, needed in self._needed.items() if needed}
        if not all(_fits(query, key, value) for key, value in used.values()):
            return None
        assert all(len(key) >= self._needed[pool] for pool, (key, _) in used.items()), "reads lie inside their pools"
        return self._run(query, used, None, scaling, softcap, tables)

    def attend_paged(
        self,
        query: Float[Tensor, "T H D"],
        cache: PagedCache,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]]:
        """Reads of "chunk_cache" alone, where that pool is a paged cache; see `why_not_paged` for what is possible.

        Args:
            query: [T, H, D].
            cache: of the plan's slots; rows of the step are in it, too.
            scaling: of the scores.
            softcap: of the scores; None: none.
            tables: rotation of the plan's stacked queries; None: no key is moved.

        Returns:
            Outputs [T, H, Dv] in the query's dtype, and their log-sum-exp [T, H] in float32.
        """
        needed = self._needed["chunk_cache"]
        assert not any(count for pool, count in self._needed.items() if pool != "chunk_cache"), "one paged pool"
        assert needed <= len(cache.table) * cache.block_size, "reads lie inside their blocks"
        assert cache.block_size % cache.keys.shape[1] == 0, "blocks of the cache are parts of the table's"
        assert (cache.keys.dtype in QUANTIZED_DTYPES) == (cache.scales is not None), "8 bits have scales"
        return self._run(query, {"chunk_cache": (cache.keys, cache.values)}, cache, scaling, softcap, tables)

    def _run(
        self,
        query: Tensor,
        used: Pools,
        cache: PagedCache | None,
        scaling: float,
        softcap: float | None,
        tables: RotationTables | None,
    ) -> tuple[Tensor, Tensor]:
        assert len(query) == self._plan.num_rows, "a plan is for all rows of a step"
        num_rows, num_heads, _ = query.shape
        num_kv_heads, value_dim = next(iter(used.values()))[1].shape[-2:]
        work = self._work(num_heads // num_kv_heads, num_kv_heads, query.device)
        output = query.new_empty(num_rows, num_heads, value_dim)
        lse = query.new_empty(num_rows, num_heads, dtype=torch.float32)
        with _on(query.device):
            if work.is_direct:
                self._attend(work, query, used, cache, output, lse, scaling, softcap, tables)
                return output, lse
            partials = query.new_empty(len(work.partial_slots), num_heads, value_dim, dtype=torch.float32)
            partial_sums = query.new_empty(len(work.partial_slots), num_heads, dtype=torch.float32)
            self._attend(work, query, used, cache, partials, partial_sums, scaling, softcap, tables)
            merge_walks[num_rows, num_heads](
                partials,
                partial_sums,
                work.partial_slots,
                work.starts,
                output,
                lse,
                num_heads,
                VALUE_DIM=value_dim,
                BLOCK_VALUE=max(_MIN_BLOCK, triton.next_power_of_2(value_dim)),
                PARTS=_MERGED_PARTS,
            )
        return output, lse

    def _attend(
        self,
        work: WorkList,
        query: Tensor,
        used: Pools,
        cache: PagedCache | None,
        outputs: Tensor,
        sums: Tensor,
        scaling: float,
        softcap: float | None,
        tables: RotationTables | None,
    ) -> None:
        """Launches the attention kernel once per tile height; `outputs` and `sums` hold rows or partial results."""
        num_heads, key_dim = query.shape[1:]
        num_kv_heads, value_dim = next(iter(used.values()))[1].shape[-2:]
        is_turned = tables is not None and not tables.is_identity
        rotation = (tables.cos, tables.sin, tables.permutation) if tables is not None else (query, query, query)
        masks = self._mask_bytes(query.device)
        scales = None if cache is None else cache.scales
        for tile, units in work.units.items():
            shape = KernelShape.of(key_dim, value_dim, tile, query.dtype)
            attend_walks[len(units), num_kv_heads](
                query,
                *query.stride()[:2],
                *rotation,
                # a pool that is not read has no tensors: any of the right dtype will do
                *(argument for pool in POOLS for argument in _arguments(*used.get(pool, (query, query)))),
                *((units, 0, 0) if cache is None else (cache.table, cache.keys.stride(0), cache.values.stride(0))),
                *((sums, sums) if scales is None else scales),
                sums if masks is None else masks,
                self._plan.rows,
                work.segments,
                units,
                outputs,
                sums,
                num_heads,
                float(scaling),
                float(softcap or 1.0),
                GROUP=num_heads // num_kv_heads,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                BLOCK_KEY=shape.block_key,
                BLOCK_VALUE=shape.block_value,
                TILE=tile,
                KEYS=shape.num_keys,
                IS_TURNED=is_turned,
                IS_CAPPED=bool(softcap),
                IS_MASKED=masks is not None,
                IS_DIRECT=work.is_direct,
                IS_WIDENED=IS_INTERPRETED and query.dtype is torch.bfloat16,
                TABLE_BLOCK=0 if cache is None else cache.block_size,
                CACHE_BLOCK=1 if cache is None else cache.keys.shape[1],
                IS_SCALED=scales is not None,
                num_warps=shape.num_warps,
                num_stages=shape.num_stages,
            )

    def _work(self, group: int, num_kv_heads: int, device: torch.device) -> WorkList:
        work = self._works.get((group, num_kv_heads))
        if work is None:
            work = self._works[group, num_kv_heads] = list_work(self._plan, group, num_kv_heads, device)
        return work

    def _mask_bytes(self, device: torch.device) -> Tensor | None:
        """All masks of the plan, concatenated, one byte per key."""
        if self._masks is None:
            masks = [call.mask.flatten() for call in self._plan.calls if call.mask is not None]
            self._masks = torch.cat(masks).view(torch.uint8) if masks else torch.empty(0, device=device)
        return self._masks if len(self._masks) else None


def store(
    key: Float[Tensor, "T G D"],
    value: Float[Tensor, "T G Dv"],
    pool: tuple[Float[Tensor, "S G D"], Float[Tensor, "S G Dv"]],
    slots: Int[Tensor, " T"],
) -> None:
    """Copies rows into their slots of a pool in one launch; rows with a negative slot are left out."""
    num_rows, num_heads, key_dim = key.shape
    blocks = (max(_MIN_BLOCK, triton.next_power_of_2(each.shape[-1])) for each in (key, value))
    strides = (*key.stride()[:2], *value.stride()[:2])
    with _on(key.device):
        store_rows[num_rows, num_heads](
            key, value, *strides, *_arguments(*pool), slots, key_dim, value.shape[-1], *blocks
        )


def _fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel supports these tensors."""
    tensors = (query, key, value)
    group, longest = query.shape[1] // key.shape[1], max(key.shape[-1], value.shape[-1])
    is_tall = group > TILE_HEIGHTS[-2]
    return (
        all(x.device == query.device and x.dtype is query.dtype and x.stride(-1) == 1 for x in tensors)
        and (query.device.type == "cuda" or IS_INTERPRETED)
        and query.dtype in DTYPES
        and longest <= MAX_DIM
        and group <= MAX_GROUP
        and (not is_tall or longest * query.dtype.itemsize <= MAX_TALL_BYTES)
    )


def why_not_paged(
    dtype: torch.dtype, num_heads: int, keys: Shaped[Tensor, "N P G D"], values: Shaped[Tensor, "N P G Dv"]
) -> str:
    """Why a paged cache is not read by the kernel for queries [T, num_heads, D] of this dtype; empty: it is."""
    num_kv_heads, key_dim = keys.shape[-2:]
    group, longest = num_heads // num_kv_heads, max(key_dim, values.shape[-1])
    known = " or ".join(str(each).removeprefix("torch.") for each in DTYPES)
    reasons = {
        f"queries in {dtype}; the kernel takes {known}": dtype not in DTYPES,
        f"a cache in {keys.dtype}; the kernel takes that of the queries, or float8": (
            keys.dtype is not values.dtype or keys.dtype not in (dtype, *QUANTIZED_DTYPES)
        ),
        f"heads of {longest} numbers; the kernel takes {MAX_DIM}": longest > MAX_DIM,
        f"{group} query heads per key head with heads of {longest} numbers; the kernel takes {MAX_GROUP}": (
            group > MAX_GROUP or (group > TILE_HEIGHTS[-2] and longest * dtype.itemsize > MAX_TALL_BYTES)
        ),
        "numbers of a head that are not adjacent": keys.stride(-1) != 1 or values.stride(-1) != 1,
        f"a cache on {keys.device}; the kernel is for GPUs": keys.device.type != "cuda" and not IS_INTERPRETED,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _arguments(key: Tensor, value: Tensor) -> tuple[Tensor | int, ...]:
    return key, value, *key.stride()[-3:-1], *value.stride()[-3:-1]


def _on(device: torch.device) -> AbstractContextManager[object]:
    """A context that makes the tensors' GPU the current one, where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
