"""Step attention: the attention of every layer during one forward of composed prompts.

write the new keys and values into their slots
rotate the stacked queries, one rotation per (row, distance)
one call per run of keys, shared by all its readers
merge by log-sum-exp

A backend that takes a whole layer does the last three at once, for the layers it supports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvmosaic.attention.composed import apply_sinks, merge_partials
from kvmosaic.attention.interface import Piece, PoolName, RowGroup
from kvmosaic.attention.reads import Call, ReadPlan, plan_reads
from kvmosaic.attention.torch_backend import AttentionBackend, LayerBackend, PlanReader, Pools
from kvmosaic.layers import AttentionCall, DistanceBias, LayerSpec, MaskSpec
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation, RotationTables, TableCache, rotate

_MAX_SCORES = 1 << 24
"""Max scores written out at once, which bounds the memory of a long question over a long chunk."""


@runtime_checkable
class KVSlots(Protocol):
    """Stored keys and values of one pool, read by slot; `BlockStorage` is one."""

    @property
    def num_slots(self) -> int:
        """Slots of the pool."""

    def run(
        self, layer_index: int, first_slot: int, num_tokens: int
    ) -> tuple[Float[Tensor, "n G D"], Float[Tensor, "n G Dv"]]:
        """Views of a run of slots: keys [num_tokens, G, D] and values [num_tokens, G, Dv]."""


def watch_group(
    group: RowGroup,
    call: AttentionCall,
    lse: Float[Tensor, "T H"],
    layer: LayerSpec,
    storages: Mapping[PoolName, KVSlots],
) -> None:
    """Reports to a group's observer the share of attention on every key of a chunk, in one layer.

    Args:
        group: rows that see all keys of their reads from chunks.
        call: the layer's call.
        lse: [T, H], log-sum-exp of all scores of a row, without sinks.
        layer: its rotation and mask.
        storages: storage of the keys.
    """
    watch = group.rules.watch
    assert watch is not None
    lse = lse[group.first_row : group.first_row + group.num_rows]
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse))
    for index, read in enumerate(group.reads):
        if read.pool != "chunk_cache":
            continue
        key, _ = storages[read.pool].run(call.layer_index, read.first_slot, read.num_tokens)
        max_rows = max(1, _MAX_SCORES // (call.query.shape[1] * read.num_tokens))
        parts = [
            _shares(group, read, range(first, min(first + max_rows, group.num_rows)), call, lse, layer, key)
            for first in range(0, group.num_rows, max_rows)
        ]
        watch.observe(call.layer_index, index, torch.stack(parts).sum(0))


def _shares(
    group: RowGroup, read: Piece, rows: range, call: AttentionCall, lse: Tensor, layer: LayerSpec, key: Tensor
) -> Tensor:
    """[S], the attention of some rows of a group on the keys of a read."""
    query = call.query[group.first_row + rows.start : group.first_row + rows.stop]
    precision = torch.promote_types(query.dtype, torch.float32)
    if read.distance and layer.rotation is not None:
        distances = torch.full((len(rows),), -read.distance, device=query.device)
        query = rotate(query, layer.rotation.tables(distances, dtype=precision, device=query.device))
    split = query.to(precision).reshape(len(rows), key.shape[1], -1, key.shape[2])
    scores = torch.einsum("rgjd,sgd->rgjs", split, key.to(precision)).flatten(1, 2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    shares = torch.exp(scores - lse[rows.start : rows.stop, :, None])
    if layer.mask.kind != "full":
        lowest = torch.tensor([group.lowest_seen(layer.mask, row) for row in rows])
        keys = torch.arange(read.position, read.position + read.num_tokens)
        shown = (keys[None, :] >= lowest[:, None]).to(shares.device)
        shares = shares.masked_fill(~shown[:, None], 0.0)
    return shares.mean(1).sum(0)


@dataclass(frozen=True, slots=True)
class Choice:
    """The keys that an indexer has chosen for the rows of a step."""

    by_rows: Mapping[range, Bool[Tensor, "n S"]]
    """For the rows of each group, which of the keys in its runs, in the order of `ReadPlan.by_group`."""
    masks: tuple[Bool[Tensor, "R S"], ...]
    """The same for each call of the plan. No masks: all keys are read, as no row sees more than it may choose."""

    def of(self, calls: Sequence[Call]) -> list[Call]:
        """The calls of the plan, with these keys only."""
        if not self.masks:
            return list(calls)
        return [replace(call, causal=False, mask=mask) for call, mask in zip(calls, self.masks, strict=True)]


def _index_scores(
    plan: ReadPlan, runs: Sequence[tuple[int, int]], keys: Sequence[Tensor], query: Tensor, weights: Tensor, rows: range
) -> Float[Tensor, "n S"]:
    """Scores of an indexer for some rows of a group over all keys of its runs; -inf where a key is not seen."""
    precision = torch.promote_types(query.dtype, torch.float32)
    found = []
    for (number, first), key in zip(runs, keys, strict=True):
        call, stacked = plan.calls[number], slice(first + rows.start, first + rows.stop)
        scores = torch.relu(torch.einsum("rhd,sd->rhs", query[stacked].to(precision), key.to(precision)))
        scores = torch.einsum("rh,rhs->rs", weights[stacked].to(precision), scores)
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask[stacked.start - call.first : stacked.stop - call.first], -torch.inf)
        elif call.causal:
            own = torch.arange(rows.start, rows.stop, device=key.device)
            later = torch.arange(call.num_tokens, device=key.device)[None, :] > own[:, None]
            scores = scores.masked_fill(later, -torch.inf)
        found.append(scores)
    return torch.cat(found, dim=1)


def best_keys(scores: Float[Tensor, "n S"], count: int) -> Bool[Tensor, "n S"]:
    """The `count` keys of each row with the highest scores, the first ones among equal ones; never one of -inf."""
    is_seen = scores > -torch.inf
    if scores.shape[1] <= count:
        return is_seen
    lowest = scores.topk(count, dim=1).values[:, -1:]
    above, equal = scores > lowest, scores == lowest
    room = count - above.sum(dim=1, keepdim=True)
    return is_seen & (above | (equal & (equal.cumsum(dim=1) <= room)))


@dataclass(frozen=True, slots=True)
class Write:
    """Slots for the rows of a step: `rows` of the step go to `slots` of a pool."""

    pool: PoolName
    rows: Int[Tensor, " n"] | slice
    slots: Int[Tensor, " n"] | slice


@dataclass(frozen=True, slots=True)
class PreparedReads:
    """The reads of a step for one kind of mask, planned before the step, and its tables for each rotation."""

    plan: ReadPlan
    reader: PlanReader | None
    """Of a backend that takes a whole layer; None: made when it is needed."""
    tables: Mapping[Rotation, RotationTables]


class StepAttention:
    """The receiver of every attention call of one forward."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        storages: Mapping[PoolName, KVSlots],
        groups: Sequence[RowGroup],
        writes: Sequence[Write],
        backend: AttentionBackend,
        table_cache: TableCache | None = None,
        prepared: Mapping[MaskSpec, PreparedReads] | None = None,
    ) -> None:
        """Prepares one forward; `table_cache` keeps rotation tables between forwards; what is `prepared` is used."""
        self.num_calls = 0
        """Layers called so far."""
        self._layers = layers
        self._storages = storages
        self._groups = groups
        self._watched = [group for group in groups if group.rules.watch is not None]
        self._writes = writes
        self._backend = backend
        self._layer_backend = backend if isinstance(backend, LayerBackend) else None
        self._table_cache = TableCache() if table_cache is None else table_cache
        ready = prepared or {}
        self._plans = {mask: reads.plan for mask, reads in ready.items()}
        self._readers = {mask: reads.reader for mask, reads in ready.items() if reads.reader is not None}
        self._tables = {(mask, turn): tables for mask, reads in ready.items() for turn, tables in reads.tables.items()}
        self._biases: dict[tuple[MaskSpec, DistanceBias], list[tuple[Tensor, Tensor]]] = {}
        self._by_group: dict[MaskSpec, dict[range, list[tuple[int, int]]]] = {}

    def __call__(self, call: AttentionCall) -> Float[Tensor, "T H Dv"] | Choice:
        """Stores the keys and values of one layer, and attends; or chooses the keys that its attention will read."""
        self.num_calls += 1
        self._write(call)
        return self.choose(call) if call.num_chosen else self.attend(call)

    def attend(self, call: AttentionCall) -> Float[Tensor, "T H Dv"]:
        """Attention of one layer: queries [T, H, D] to outputs [T, H, Dv]."""
        index, layer = call.layer_index, self._layers[call.layer_index]
        plan, tables = self._reads(call, layer)
        result = None
        reads_all = call.chosen is None or not call.chosen.masks
        if self._layer_backend is not None and layer.bias is None and reads_all:
            result = self._reader(self._layer_backend, layer.mask, plan).attend(
                call.query, self._pools(call), scaling=call.scaling, softcap=call.softcap, tables=tables
            )
        output, lse = result or self._attend_all(call, plan, tables, self._biases_of(layer, plan, call.query))
        for group in self._watched:
            if group.rules.watch is not None and group.rules.watch.wants_layer(index):
                watch_group(group, call, lse, layer, self._storages)
        if call.sinks is not None:
            output = apply_sinks(output, lse, call.sinks)
        return output

    def _reads(self, call: AttentionCall, layer: LayerSpec) -> tuple[ReadPlan, RotationTables | None]:
        """What the rows read, and how their queries turn for that."""
        plan = self._plan(layer.mask, call.query.device)
        is_turned = plan.is_moved and layer.rotation is not None
        return plan, self._turning_tables(layer, plan, call.query) if is_turned else None

    def _write(self, call: AttentionCall) -> None:
        for write in self._writes:
            storage = self._storages[write.pool]
            assert isinstance(storage, BlockStorage), "only blocks that are owned are written"
            storage.write(call.layer_index, write.slots, call.key[write.rows], call.value[write.rows])

    def choose(self, call: AttentionCall) -> Choice:
        """The keys with the best scores of an indexer, which the next attention reads."""
        layer = self._layers[call.layer_index]
        plan, tables = self._reads(call, layer)
        groups = self._by_group.get(layer.mask) or self._by_group.setdefault(layer.mask, plan.by_group())
        counts = [sum(plan.calls[number].num_tokens for number, _ in parts) for parts in groups.values()]
        if max(counts) <= call.num_chosen:
            return Choice({}, ())
        query, weights = (part if plan.is_single else part[plan.rows] for part in (call.query, call.value[:, 0]))
        if tables is not None:
            query = rotate(query.to(torch.promote_types(query.dtype, torch.float32)), tables)
        chosen: dict[range, Tensor] = {}
        masks: list[list[Tensor]] = [[] for _ in plan.calls]
        for rows, parts in groups.items():
            keys = [self._run(call, plan.calls[number])[0][:, 0] for number, _ in parts]
            num_keys = sum(len(key) for key in keys)
            count = max(1, _MAX_SCORES // (query.shape[1] * num_keys))
            chosen[rows] = torch.cat(
                [
                    best_keys(_index_scores(plan, parts, keys, query, weights, each), call.num_chosen)
                    for each in (range(first, min(first + count, len(rows))) for first in range(0, len(rows), count))
                ]
            )
            for (number, _), mask in zip(
                parts, torch.split(chosen[rows], [len(key) for key in keys], dim=1), strict=True
            ):
                masks[number].append(mask)
        return Choice(chosen, tuple(torch.cat(parts) for parts in masks))

    def _run(self, call: AttentionCall, part: Call) -> tuple[Tensor, Tensor]:
        """Keys [S, G, D] and values [S, G, Dv] of a call of a plan."""
        if part.pool is None:
            rows = slice(part.first_slot, part.first_slot + part.num_tokens)
            return call.key[rows], call.value[rows]
        return self._storages[part.pool].run(call.layer_index, part.first_slot, part.num_tokens)

    def _attend_all(
        self, call: AttentionCall, plan: ReadPlan, tables: RotationTables | None, biases: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Runs the calls of a plan one by one, and merges them."""
        query = call.query if plan.is_single else call.query[plan.rows]
        if tables is not None:
            query = rotate(query, tables).to(call.query.dtype)
        results = [
            self._attend(call, query[part.first : part.last], part, biases[index] if biases else None)
            for index, part in enumerate(call.chosen.of(plan.calls) if call.chosen is not None else plan.calls)
        ]
        if len(results) == 1:
            output, lse = results[0]
        else:
            output, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
        if not plan.is_single:
            output, lse = merge_partials(output, lse, plan.rows, plan.num_rows)
        return output, lse

    def _attend(
        self, call: AttentionCall, query: Tensor, part: Call, bias: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        key, value = self._run(call, part)
        if bias is None:
            return self._backend.attend(
                query, key, value, scaling=call.scaling, causal=part.causal, mask=part.mask, softcap=call.softcap
            )
        within, of_last = bias
        output, lse = self._backend.attend(
            query,
            key,
            value,
            scaling=call.scaling,
            causal=part.causal,
            mask=part.mask,
            softcap=call.softcap,
            bias=within,
        )
        return output, lse + of_last

    def _biases_of(self, layer: LayerSpec, plan: ReadPlan, query: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The bias of every call, in two parts (see `DistanceBias.of_run`); empty for layers without one."""
        if layer.bias is None:
            return []
        biases = self._biases.get((layer.mask, layer.bias))
        if biases is None:
            precision = torch.promote_types(query.dtype, torch.float32)
            positions, key_positions = plan.positions()
            biases = self._biases[layer.mask, layer.bias] = [
                layer.bias.of_run(
                    part.num_tokens,
                    key_positions[part.first : part.last],
                    positions[part.first : part.last],
                    precision,
                )
                for part in plan.calls
            ]
        return biases

    def _pools(self, call: AttentionCall) -> Pools:
        """The pools that the calls of a layer may read."""
        pools: dict[PoolName | None, tuple[Tensor, Tensor]] = {None: (call.key, call.value)}
        for name, storage in self._storages.items():
            pools[name] = storage.run(call.layer_index, 0, storage.num_slots)
        return pools

    def _reader(self, backend: LayerBackend, mask: MaskSpec, plan: ReadPlan) -> PlanReader:
        reader = self._readers.get(mask)
        if reader is None:
            reader = self._readers[mask] = backend.plan_reader(plan)
        return reader

    def _plan(self, mask: MaskSpec, device: torch.device) -> ReadPlan:
        plan = self._plans.get(mask)
        if plan is None:
            plan = self._plans[mask] = plan_reads(self._groups, mask, device)
        return plan

    def _turning_tables(self, layer: LayerSpec, plan: ReadPlan, query: Tensor) -> RotationTables:
        assert layer.rotation is not None
        key = (layer.mask, layer.rotation)
        tables = self._tables.get(key)
        if tables is None:
            precision = torch.promote_types(query.dtype, torch.float32)
            distances = -plan.distances
            tables = self._table_cache.tables(layer.rotation, distances, dtype=precision, device=query.device)
            self._tables[key] = tables
        return tables
