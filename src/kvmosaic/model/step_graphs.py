"""Step graphs: steps of few rows, of answers and questions, replayed as CUDA graphs.

A graph is captured for a *shape*: rows, runs, programs and partial results, each rounded up. What a step computes is
whole numbers in one buffer, whose address the graph knows; rows beyond the step read nothing and are stored nowhere.

    spans ──▶ plans, work lists ──▶ whole numbers ──▶ buffer ──▶ replay ──▶ logits

Rotations by all distances that have occurred stay on the device, in tables that the buffer has places of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention import ORDINARY_ROWS, Call, PoolName, ReadPlan, RowGroup, SpanRows, StepAttention, plan_reads
from kvmosaic.attention.reads import POOLS
from kvmosaic.attention.step import PreparedReads
from kvmosaic.attention.torch_backend import Pools
from kvmosaic.attention.triton.backend import TritonBackend, TritonReader, store
from kvmosaic.attention.triton.replays import (
    MAX_PARTIAL_BYTES,
    MAX_ROWS,
    Capture,
    Replays,
    StepShape,
    room_for,
    room_in_walks,
    rooms_of,
    rounded,
    tails,
)
from kvmosaic.attention.triton.work import Numbers, flat_work, work_of
from kvmosaic.errors import ModelError
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.layers.geometry import FULL
from kvmosaic.memory import BlockStorage
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.rope import Rotation, RotationTables

MAX_DISTANCES = 4_096
"""Max distances whose rotations are kept on the device, 1 kB each for heads of 128 numbers."""
_CPU = torch.device("cpu")
_REQUEST = POOLS.index("request")


class StepGraphs:
    """The captured steps of one model over two pools."""

    def __init__(
        self,
        model: LoadedModel,
        storages: Mapping[PoolName, BlockStorage],
        backend: TritonBackend,
        capture: Capture | None = None,
    ) -> None:
        """Captures nothing yet; `capture` is a `GraphCapture`, or a twin for machines without a GPU."""
        self.replays = Replays(model.device, capture)
        self._model = model
        self._storages = storages
        self._backend = backend
        self._kinds: dict[MaskSpec, list[tuple[int, int]]] = {}
        """Query heads per key head, and key heads, of the layers with each mask."""
        self._turns: dict[MaskSpec, list[Rotation]] = {}
        for layer in model.layers:
            kinds, turns = self._kinds.setdefault(layer.mask, []), self._turns.setdefault(layer.mask, [])
            if (kind := (layer.num_query_heads // layer.num_kv_heads, layer.num_kv_heads)) not in kinds:
                kinds.append(kind)
            if layer.rotation is not None and layer.rotation not in turns:
                turns.append(layer.rotation)
        self._row_bytes = max(4 * layer.num_query_heads * layer.value_dim for layer in model.layers)
        self._places: dict[int, int] = {}
        """Of each distance, its row in the tables."""
        self._tables: dict[Rotation, RotationTables] = {}
        self._planned: _PlannedStep | None = None

    def clear(self) -> None:
        """Forgets what is captured, as when the pools move."""
        self.replays.steps.clear()
        self._planned = None

    def run(self, spans: Sequence[SpanRows]) -> Tensor | None:
        """[R, V] logits in the model's dtype, valid until the next run; None if the step is not replayed.

        It is not if it has many rows, rows of documents, of a repair or of an adapter, or no logits; and when its shape
        occurs for the first time.
        """
        num_logits = sum(span.num_logits for span in spans)
        is_small = 0 < num_logits <= sum(len(span.token_ids) for span in spans) <= MAX_ROWS
        if self.replays.problem or not is_small or not all(map(_is_ordinary, spans)):
            return None
        if self._planned is None or not self._planned.grow(spans):
            self._planned = self._plan(spans)
        if (planned := self._planned) is None:
            return None
        logits = self.replays.run(planned.shape, planned.parts, num_logits, partial(self._forward, planned.shape))
        return None if logits is None else logits[:num_logits]

    def _keep(self, distances: Sequence[int]) -> bool:
        """Puts rotations by new distances into the tables; False if there are too many of them."""
        new = sorted({*distances} - self._places.keys())
        if len(self._places) + len(new) > MAX_DISTANCES:
            self._places.clear()
            new = sorted({*distances})
            if len(new) > MAX_DISTANCES:
                return False
        if not new:
            return True
        first = len(self._places)
        precision = torch.promote_types(self._model.dtype, torch.float32)
        for turn in {turn for turns in self._turns.values() for turn in turns}:
            tables = turn.tables(-torch.tensor(new), dtype=precision, device=self._model.device)
            if turn not in self._tables:
                cos, sin = (part.new_zeros(MAX_DISTANCES, *part.shape[1:]) for part in (tables.cos, tables.sin))
                self._tables[turn] = RotationTables(cos, sin, tables.permutation, turn)
            self._tables[turn].cos[first : first + len(new)] = tables.cos
            self._tables[turn].sin[first : first + len(new)] = tables.sin
        self._places |= {distance: first + number for number, distance in enumerate(new)}
        return True

    def _plan(self, spans: Sequence[SpanRows]) -> _PlannedStep | None:
        """The whole numbers of a step; None if it needs masks, or much memory.

        Tokens, positions, slots, rows of logits; then of every mask the rows and distances of its stacked queries, and
        the work lists of its kinds of heads.
        """
        firsts = [0, *accumulate(len(span.token_ids) for span in spans)]
        groups = [
            RowGroup(first, len(span.token_ids), span.position, span.reads, span.reads_itself)
            for first, span in zip(firsts, spans, strict=False)
        ]
        plans = {mask: plan_reads(groups, mask, _CPU) for mask in self._kinds}
        if any(call.mask is not None for plan in plans.values() for call in plan.calls):
            return None
        distances = {mask: plan.distances.tolist() for mask, plan in plans.items()}
        if not self._keep([*chain.from_iterable(distances.values())]):
            return None
        num_rows = rounded(firsts[-1])
        parts = _of_rows(spans, num_rows)
        rooms = [num_rows, num_rows, num_rows, rounded(len(parts[3]))]
        grows: list[tuple[int, Numbers]] = []
        is_growing = [*plans] == [FULL] and all(span.reads_itself for span in spans)
        num_left = room_in_walks(plans[FULL]) if is_growing else 0
        for mask, plan in plans.items():
            places = [self._places[distance] for distance in distances[mask]]
            parts += [np.array(part, dtype=np.int64) for part in (plan.row_numbers, places)]
            rooms += [room_for(len(places))] * 2
            for kind in self._kinds[mask]:
                listed = flat_work(replace(plan, num_rows=num_rows), *kind)
                if num_left:
                    grows.append((len(parts), tails(listed[0], _REQUEST, [span.slots[0] + 1 for span in spans])))
                parts += listed
                rooms += rooms_of(listed)
                if rooms[-2] * self._row_bytes > MAX_PARTIAL_BYTES:
                    return None
        shape = StepShape(num_rows, tuple(plan.is_moved for plan in plans.values()), tuple(rooms))
        return _PlannedStep(shape, parts, spans, grows, num_left)

    def _forward(self, shape: StepShape, parts: Sequence[Tensor]) -> Tensor:
        """[R, V] logits of the step whose numbers are in the parts of a buffer."""
        tokens, positions, slots, rows, *rest = parts
        left = iter(rest)
        whole = (
            Call(0, 0, None, 0, shape.num_rows),
            *(Call(0, 0, pool, 0, storage.num_slots) for pool, storage in self._storages.items()),
        )
        prepared: dict[MaskSpec, PreparedReads] = {}
        for (mask, kinds), is_moved in zip(self._kinds.items(), shape.moved, strict=True):
            stacked, places = next(left), next(left)
            works = {kind: work_of(left) for kind in kinds}
            plan = ReadPlan(whole, stacked, places, shape.num_rows, is_moved, is_single=False, row_numbers=())
            kept = {turn: self._tables[turn] for turn in self._turns[mask] if is_moved}
            tables = {turn: replace(all_, cos=all_.cos[places], sin=all_.sin[places]) for turn, all_ in kept.items()}
            prepared[mask] = PreparedReads(plan, _KernelReader(plan, works), tables)
        attention = _StoringAttention(self._model.layers, self._storages, slots, self._backend, prepared)
        logits = self._model.forward(tokens, positions, rows, attention)
        if attention.num_calls != len(self._model.layers):
            raise ModelError(f"our attention was called in {attention.num_calls} of {len(self._model.layers)} layers")
        return logits


@dataclass(slots=True)
class _PlannedStep:
    """The whole numbers of a step, and where they change in the next one."""

    shape: StepShape
    parts: list[Numbers]
    spans: Sequence[SpanRows]
    tails: list[tuple[int, Numbers]]
    """Parts with segments, and the places in them of the lengths of runs that answers are appended to."""
    num_left: int
    """Steps for which these runs stay in their walks."""

    def grow(self, spans: Sequence[SpanRows]) -> bool:
        """Goes on to the next step; False if that is not these rows with a token more each, or begins a walk."""
        if not self.num_left or len(spans) != len(self.spans) or not all(map(_is_next, self.spans, spans)):
            return False
        self.num_left -= 1
        self.spans = spans
        self.parts[:4] = _of_rows(spans, self.shape.num_rows)
        for part, places in self.tails:
            self.parts[part][places] += 1
        return True


class _StoringAttention(StepAttention):
    """Step attention whose keys and values are stored in one launch."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        storages: Mapping[PoolName, BlockStorage],
        slots: Tensor,
        backend: TritonBackend,
        prepared: Mapping[MaskSpec, PreparedReads],
    ) -> None:
        super().__init__(layers, storages, (), (), backend, prepared=prepared)
        self._pool = storages["request"]
        self._slots = slots

    def _write(self, call: AttentionCall) -> None:
        index = call.layer_index
        if self._pool.layers[index].source_layer == index:
            store(call.key, call.value, self._pool.run(index, 0, self._pool.num_slots), self._slots)


class _KernelReader(TritonReader):
    """A reader of layers that the kernels support; others would wait for the host."""

    def attend(self, query: Tensor, pools: Pools, **how: Any) -> tuple[Tensor, Tensor]:
        """See `PlanReader.attend`.

        Raises:
            ModelError: a layer that the kernels do not support.
        """
        result = super().attend(query, pools, **how)
        if result is None:
            raise ModelError(f"the kernels do not take heads of {query.shape[-1]} numbers in {query.dtype}")
        return result


def _is_ordinary(span: SpanRows) -> bool:
    """Whether rows are of a prompt or an answer, computed by the base model, without an observer."""
    return span.pool == "request" and not span.adapter and span.rules == ORDINARY_ROWS


def _is_next(before: SpanRows, span: SpanRows) -> bool:
    """Whether a row reads what another one did, and itself right after it."""
    *others, last = before.reads
    return span.reads_itself and span.reads == (*others, replace(last, num_tokens=last.num_tokens + 1))


def _of_rows(spans: Sequence[SpanRows], num_rows: int) -> list[Numbers]:
    """Tokens, positions, slots and rows of logits; zeros and no slot beyond them."""
    filled = np.array([[0], [0], [-1]]).repeat(num_rows, 1)
    logits: list[int] = []
    first = 0
    for span in spans:
        last = first + len(span.token_ids)
        filled[:, first:last] = (span.token_ids, range(span.position, span.position + last - first), span.slots)
        logits.extend(range(last - span.num_logits, last))
        first = last
    return [*filled, np.array(logits, dtype=np.int64)]
