"""Paged attention: queries of many sequences over blocks of keys and values, by block tables and context lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvmosaic.attention.backend_choice import choose_backend
from kvmosaic.attention.interface import Piece, RowGroup
from kvmosaic.attention.reads import plan_reads
from kvmosaic.attention.step import PreparedReads, StepAttention
from kvmosaic.attention.torch_backend import AttentionBackend, LayerBackend
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec

MAX_CONTEXT = 2**27
"""Maximum tokens of one sequence, as of `max_model_len`."""


def paged_attention(
    query: Float[Tensor, "T H D"],
    key_cache: Float[Tensor, "N P G D"],
    value_cache: Float[Tensor, "N P G Dv"],
    block_tables: Int[Tensor, "B M"] | Sequence[Sequence[int]],
    context_lens: Int[Tensor, " B"] | Sequence[int],
    *,
    query_lens: Int[Tensor, " B"] | Sequence[int] | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    backend: AttentionBackend | None = None,
) -> Float[Tensor, "T H Dv"]:
    """Causal attention of the newest tokens of each sequence over all of its tokens, read from blocks.

        key_cache   block 0 | block 1 | block 2 | block 3 | …      N blocks of P slots
        sequence 0  block_tables [2, 0], context_lens 6            tokens 0 to 3 in block 2, 4 and 5 in block 0
        sequence 1  block_tables [2, 3], context_lens 7            a shared prefix, here block 2, is read once

    Keys and values are read in place, in any layout whose slots are evenly spaced: [N, P, G, D], or views of it such as
    `cache[:, 0]` of [N, 2, P, G, D] and `cache.transpose(1, 2)` of [N, G, P, D]. Only the newest tokens of sequences
    with several queries are copied, one row each.

    Args:
        query: [T, H, D], the queries of sequence 0, then those of sequence 1, …; G divides H.
        key_cache: [N, P, G, D], with the newest tokens already written.
        value_cache: [N, P, G, Dv].
        block_tables: [B, M] the blocks of each sequence in token order; entries after its last token are ignored.
        context_lens: [B] tokens of each sequence, the newest included.
        query_lens: [B] queries of each sequence, for its last so many tokens; default: one each (decode).
        scaling: factor on the scores; default D ** -0.5.
        softcap: soft cap on the scores.
        window: sliding window: a token sees so many tokens, itself included.
        sinks: [H] learned sink scores.
        backend: default: the fastest for this dtype and device, see `choose_backend`.

    Returns:
        [T, H, Dv] in the dtype of the query.

    Raises:
        InvalidConfig: shapes, dtypes, lengths or block ids that do not fit.
    """
    plan = plan_paged_attention(
        *(key_cache, value_cache, block_tables, context_lens), query_lens=query_lens, window=window, backend=backend
    )
    return plan.attend(query, key_cache, value_cache, scaling=scaling, softcap=softcap, sinks=sinks)


def plan_paged_attention(
    key_cache: Float[Tensor, "N P G D"],
    value_cache: Float[Tensor, "N P G Dv"],
    block_tables: Int[Tensor, "B M"] | Sequence[Sequence[int]],
    context_lens: Int[Tensor, " B"] | Sequence[int],
    *,
    query_lens: Int[Tensor, " B"] | Sequence[int] | None = None,
    window: int | None = None,
    backend: AttentionBackend | None = None,
) -> PagedPlan:
    """What `paged_attention` works out of tables and lengths: once per step, for all layers of one shape.

    Tables and lengths on a GPU are read back here, and nothing is in `PagedPlan.attend`. Arguments and errors are those
    of `paged_attention`; the caches are those of any of the layers.
    """
    slots = _Slots.of(key_cache, value_cache)
    if window is not None and not 1 <= window <= MAX_CONTEXT:
        raise InvalidConfig(f"window must be between 1 and {MAX_CONTEXT} tokens, got {window!r:.80}; None: no window")
    contexts = _numbers("context_lens", context_lens)
    counts = [1] * len(contexts) if query_lens is None else _numbers("query_lens", query_lens)
    tables = [_listed(table) for table in _listed(block_tables)]
    _check_sequences(tables, contexts, counts, slots)
    firsts = [0, *accumulate(counts)]
    readers = Counter(
        block_id
        for table, context in zip(tables, contexts, strict=True)
        for block_id in table[: -(-context // slots.block_size)]
    )
    groups = [
        _group(first, count, slots, table, context, readers)
        for first, count, table, context in zip(firsts, counts, tables, contexts, strict=False)
    ]
    newest = torch.tensor(
        [
            slots.slot(table, token)
            for table, context, count in zip(tables, contexts, counts, strict=True)
            for token in range(context - count, context)
        ],
        device=slots.key.device,
    )
    mask = MaskSpec() if window is None else MaskSpec("window", window)
    return PagedPlan(slots, groups, newest, mask, backend or _backend(slots.key.dtype, slots.key.device))


class PagedPlan:
    """The reads of the queries of one step, for layers whose caches have one shape and layout."""

    def __init__(
        self, slots: _Slots, groups: Sequence[RowGroup], newest: Tensor, mask: MaskSpec, backend: AttentionBackend
    ) -> None:
        self._shape = slots.shape
        self._newest = newest
        self._mask = mask
        self._backend = backend
        plan = plan_reads(groups, mask, newest.device)
        reader = backend.plan_reader(plan) if isinstance(backend, LayerBackend) else None
        self._reads = {mask: PreparedReads(plan, reader, {})}

    def attend(
        self,
        query: Float[Tensor, "T H D"],
        key_cache: Float[Tensor, "N P G D"],
        value_cache: Float[Tensor, "N P G Dv"],
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "T H Dv"]:
        """Attention of one layer; see `paged_attention`. Waits for no device."""
        slots = _Slots.of(key_cache, value_cache)
        if slots.shape != self._shape:
            planned, (num_blocks, block_size, stride) = self._shape, slots.shape
            raise InvalidConfig(
                f"the plan is for {planned[0]} blocks of {planned[1]} slots, {planned[2]} apart, and the cache has "
                f"{num_blocks} of {block_size}, {stride} apart; plan for caches of this shape"
            )
        _check_heads(query, slots, sinks)
        if len(query) != len(self._newest):
            raise InvalidConfig(f"query has {len(query)} rows, but the sequences have {len(self._newest)} (query_lens)")
        layer = LayerSpec(
            source_layer=0,
            num_kv_heads=slots.key.shape[1],
            key_dim=query.shape[2],
            value_dim=slots.value.shape[2],
            index=0,
            num_query_heads=query.shape[1],
            mask=self._mask,
        )
        call = AttentionCall(
            layer_index=0,
            query=query,
            key=slots.key[self._newest],
            value=slots.value[self._newest],
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            softcap=softcap,
            sinks=sinks,
            module=nn.Identity(),
        )
        return StepAttention([layer], {"request": slots}, (), (), self._backend, prepared=self._reads).attend(call)


@dataclass(frozen=True, slots=True)
class _Slots:
    """The slots of all blocks of one layer as views: keys [S, G, D] and values [S, G, Dv]."""

    key: Tensor
    value: Tensor
    num_blocks: int
    block_size: int
    block_stride: int
    """Slots from the start of a block to that of the next one."""

    @classmethod
    def of(cls, key_cache: Tensor, value_cache: Tensor) -> _Slots:
        shapes = f"key_cache is {list(key_cache.shape)} and value_cache {list(value_cache.shape)}"
        if key_cache.dim() != 4 or value_cache.dim() != 4 or 0 in (*key_cache.shape, *value_cache.shape):
            raise InvalidConfig(f"{shapes}; give [blocks, block_size, kv_heads, head_dim], none of them 0")
        if key_cache.shape[:3] != value_cache.shape[:3]:
            raise InvalidConfig(f"{shapes}; they must have the same blocks, block_size and kv_heads")
        strides = {_block_stride(key_cache), _block_stride(value_cache)}
        if None in strides or len(strides) > 1:
            raise InvalidConfig(
                f"the slots of key_cache (strides {key_cache.stride()}) and value_cache (strides "
                f"{value_cache.stride()}) are not evenly spaced; pass both with .contiguous()"
            )
        num_blocks, block_size, *_ = key_cache.shape
        stride = strides.pop()
        assert stride is not None
        return cls(_slots(key_cache, stride), _slots(value_cache, stride), num_blocks, block_size, stride)

    def run(self, layer_index: int, first_slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of a run of slots."""
        end = first_slot + num_tokens
        return self.key[first_slot:end], self.value[first_slot:end]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Blocks, slots of a block, and slots from one block to the next: what the reads of a table depend on."""
        return self.num_blocks, self.block_size, self.block_stride

    @property
    def num_slots(self) -> int:
        """Slots, those between the blocks included."""
        return self.key.shape[0]

    def slot(self, table: Sequence[int], token: int) -> int:
        """The slot of a token of a sequence."""
        return table[token // self.block_size] * self.block_stride + token % self.block_size

    def pieces(self, table: Sequence[int], num_tokens: int, readers: Counter[int]) -> tuple[Piece, ...]:
        """The first tokens of a sequence as runs of neighbouring slots.

        A run ends where blocks have another number of readers, so that a prefix that sequences share is one run in all
        of them.
        """
        runs: list[tuple[int, int]] = []
        for index, block_id in enumerate(table[: -(-num_tokens // self.block_size)]):
            slot, count = block_id * self.block_stride, min(self.block_size, num_tokens - index * self.block_size)
            if runs and sum(runs[-1]) == slot and readers[table[index - 1]] == readers[block_id]:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((slot, count))
        positions = accumulate((count for _, count in runs), initial=0)
        return tuple(
            Piece("request", slot, count, position) for (slot, count), position in zip(runs, positions, strict=False)
        )


def _block_stride(blocks: Tensor) -> int | None:
    """Slots from the start of a block to that of the next one; None if that is no whole number."""
    step = blocks.stride(1) if blocks.shape[1] > 1 else blocks.stride(0)
    if blocks.shape[0] == 1:
        return blocks.shape[1]
    return blocks.stride(0) // step if step > 0 and blocks.stride(0) % step == 0 else None


def _slots(blocks: Tensor, block_stride: int) -> Tensor:
    num_blocks, block_size, num_heads, width = blocks.shape
    step = blocks.stride(1) if block_size > 1 else blocks.stride(0)
    size = ((num_blocks - 1) * block_stride + block_size, num_heads, width)
    return blocks.as_strided(size, (step, *blocks.stride()[2:]))


def _group(
    first_row: int, num_rows: int, slots: _Slots, table: Sequence[int], context: int, readers: Counter[int]
) -> RowGroup:
    before = context if num_rows == 1 else context - num_rows
    pieces = slots.pieces(table, before, readers)
    return RowGroup(first_row, num_rows, context - num_rows, pieces, reads_itself=num_rows == 1)


def _listed(given: Any) -> list[Any]:
    """A list of a sequence, a tensor or an array of numpy; elements of the latter two are plain numbers."""
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _numbers(name: str, given: Tensor | Sequence[int]) -> list[int]:
    numbers = _listed(given)
    if not numbers or not all(type(number) is int and 1 <= number <= MAX_CONTEXT for number in numbers):
        raise InvalidConfig(
            f"{name} must be whole numbers from 1 to {MAX_CONTEXT}, one for each sequence, got {numbers!r:.80}"
        )
    return numbers


def _check_sequences(
    tables: Sequence[Sequence[int]], contexts: Sequence[int], counts: Sequence[int], slots: _Slots
) -> None:
    if not len(tables) == len(contexts) == len(counts):
        raise InvalidConfig(
            f"there are {len(tables)} block_tables, {len(contexts)} context_lens and {len(counts)} query_lens; give "
            "one of each for every sequence"
        )
    for number, (table, context, count) in enumerate(zip(tables, contexts, counts, strict=True)):
        if count > context:
            raise InvalidConfig(
                f"sequence {number} has {count} queries and {context} tokens; context_lens includes the newest tokens"
            )
        needed = -(-context // slots.block_size)
        if len(table) < needed:
            raise InvalidConfig(
                f"sequence {number} has {context} tokens and {len(table)} blocks of {slots.block_size}; it needs "
                f"{needed}"
            )
        for block_id in table[:needed]:
            if type(block_id) is not int or not 0 <= block_id < slots.num_blocks:
                raise InvalidConfig(
                    f"sequence {number} has block {block_id!r:.80}; the cache has blocks 0 to {slots.num_blocks - 1}"
                )


def _check_heads(query: Tensor, slots: _Slots, sinks: Tensor | None) -> None:
    key, value = slots.key, slots.value
    if query.dim() != 3 or 0 in query.shape or not query.is_floating_point():
        raise InvalidConfig(
            f"query must be floating point numbers [T, H, D], none of them 0, got {query.dtype} {list(query.shape)}"
        )
    if query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise InvalidConfig(
            f"query is {list(query.shape)} and the cache has {key.shape[1]} heads of {key.shape[2]}; kv_heads must "
            "divide the heads of the query, and head_dim must be the same"
        )
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        raise InvalidConfig(
            f"query, keys and values are {query.dtype}, {key.dtype} and {value.dtype} on {query.device}, {key.device} "
            f"and {value.device}; convert them to one dtype and device"
        )
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise InvalidConfig(f"sinks must be one number for each of the {query.shape[1]} heads, got {list(sinks.shape)}")


@cache
def _backend(dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    return cast(AttentionBackend, choose_backend(None, dtype, device).backend)
