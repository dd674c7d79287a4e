"""Step graphs: steps of few rows, of answers and questions, replayed as CUDA graphs.

A graph is captured for a *shape*: rows, runs, programs and partial results, each rounded up. What a step computes is
whole numbers in one buffer, whose address the graph knows; rows beyond the step read nothing and are stored nowhere.

    spans ──▶ plans, work lists ──▶ whole numbers ──▶ buffer ──▶ replay ──▶ logits

Rotations by all distances that have occurred stay on the device, in tables that the buffer has places of.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention import ORDINARY_ROWS, Call, PoolName, ReadPlan, RowGroup, SpanRows, StepAttention, plan_reads
from kvmosaic.attention.reads import POOLS
from kvmosaic.attention.step import PreparedReads
from kvmosaic.attention.torch_backend import Pools
from kvmosaic.attention.triton import TritonBackend, work
from kvmosaic.attention.triton.backend import TritonReader, store
from kvmosaic.attention.triton.work import TILE_HEIGHTS, Numbers, WorkList, list_arrays
from kvmosaic.errors import ModelError
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.layers.geometry import FULL
from kvmosaic.memory import BlockStorage
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.rope import Rotation, RotationTables

logger = logging.getLogger("kvmosaic.engine")

MAX_ROWS = 512
"""Max rows of a step that is replayed: the launches of more rows take less time than their work."""
MAX_GRAPHS = 64
MAX_REFUSED = 3
"""Shapes whose capture fails, until no other is tried."""
MAX_PARTIAL_BYTES = 2**27
"""Max bytes of partial results of a layer: graphs keep the memory that they take."""
MAX_DISTANCES = 4_096
"""Max distances whose rotations are kept on the device, 1 kB each for heads of 128 numbers."""
_LEAST_ROOM = 16
_TOLERANCE = 0.02
"""Max difference of replayed logits, by the largest of them: the same kernels ran on the same numbers."""
_CPU = torch.device("cpu")
_NO_UNITS = np.zeros((0, 5), dtype=np.int64)

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Of a function: its result, at an address that stays, and what computes it anew there."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: its rows, whether keys are moved (of each mask), and numbers per part."""

    num_rows: int
    moved: tuple[bool, ...]
    rooms: tuple[int, ...]


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
        self.problem = ""
        """Why no step is replayed any more; empty: they are."""
        self.num_replays = 0
        self._model = model
        self._storages = storages
        self._backend = backend
        self._capture = capture or GraphCapture(model.device)
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
        self._refused: set[StepShape] = set()
        self._steps: OrderedDict[StepShape, _CapturedStep | None] = OrderedDict()
        self._planned: _PlannedStep | None = None

    def clear(self) -> None:
        """Forgets what is captured, as when the pools move."""
        self._steps.clear()
        self._planned = None

    def run(self, spans: Sequence[SpanRows]) -> Tensor | None:
        """[R, V] logits in the model's dtype, valid until the next run; None if the step is not replayed.

        It is not if it has many rows, rows of documents, of a repair or of an adapter, or no logits; and when its shape
        occurs for the first time.
        """
        num_logits = sum(span.num_logits for span in spans)
        if self.problem or not num_logits or sum(len(span.token_ids) for span in spans) > MAX_ROWS:
            return None
        if not all(map(_is_ordinary, spans)):
            return None
        if self._planned is None or not self._planned.grow(spans):
            self._planned = self._plan(spans)
        if self._planned is None or (shape := self._planned.shape) in self._refused:
            return None
        if shape not in self._steps:
            self._steps[shape] = None
            if len(self._steps) > MAX_GRAPHS:
                self._steps.popitem(last=False)
            return None
        self._steps.move_to_end(shape)
        try:
            step = self._steps[shape]
            if step is None:
                step = self._steps[shape] = _CapturedStep(shape, self._model.device)
            step.load(self._planned.parts)
            logits = step.compute(self._forward, self._capture)
        except Exception as error:
            # a forward that waits for the device, say, or has no memory left: it runs launch by launch
            cause = error.__context__ or error
            problem = f"{type(cause).__name__}: {cause}"
            logger.warning("steps of %d rows are not replayed as CUDA graphs: %.500s", shape.num_rows, problem)
            self._refused.add(shape)
            del self._steps[shape]
            if len(self._refused) == MAX_REFUSED:
                self.problem = problem
                self.clear()
            return None
        self.num_replays += 1
        return logits[:num_logits]

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
        tails: list[tuple[int, Numbers]] = []
        is_growing = [*plans] == [FULL] and all(span.reads_itself for span in spans)
        num_left = _room_in_walks(plans[FULL]) if is_growing else 0
        for mask, plan in plans.items():
            places = [self._places[distance] for distance in distances[mask]]
            parts += [np.array(part, dtype=np.int64) for part in (plan.row_numbers, places)]
            rooms += [room_for(len(places))] * 2
            for kind in self._kinds[mask]:
                segments, units, partial_slots, starts = list_arrays(replace(plan, num_rows=num_rows), *kind)
                if num_left:
                    tails.append((len(parts), _tails(segments, spans)))
                if room_for(len(partial_slots)) * self._row_bytes > MAX_PARTIAL_BYTES:
                    return None
                tables = [segments, *(units.get(height, _NO_UNITS) for height in TILE_HEIGHTS)]
                parts += [*(table.reshape(-1) for table in tables), partial_slots, starts]
                rooms += [room_for(len(table)) * table.shape[1] for table in tables]
                rooms += [room_for(len(partial_slots)), len(starts)]
        shape = StepShape(num_rows, tuple(plan.is_moved for plan in plans.values()), tuple(rooms))
        return _PlannedStep(shape, parts, spans, tails, num_left)

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
            works: dict[tuple[int, int], WorkList] = {}
            for kind in kinds:
                segments = next(left)
                units = {height: next(left).view(-1, 5) for height in TILE_HEIGHTS}
                units = {height: listed for height, listed in units.items() if len(listed)}
                works[kind] = WorkList(segments, units, next(left), next(left), is_direct=False)
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


class _CapturedStep:
    """A buffer of whole numbers, and the graph of the forward that reads them."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self._shape = shape
        self._host = torch.zeros(sum(shape.rooms), dtype=torch.long, pin_memory=device.type == "cuda")
        self._buffer = self._host.to(device)
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def load(self, parts: Sequence[Numbers]) -> None:
        """Copies the numbers of a step into the buffer; zeros beyond them."""
        flat, first = self._host.numpy(), 0
        flat[:] = 0
        for part, room in zip(parts, self._shape.rooms, strict=True):
            flat[first : first + len(part)] = part
            first += room
        self._buffer.copy_(self._host)  # done when it returns: the next step fills the same memory

    def compute(self, forward: Callable[[StepShape, Sequence[Tensor]], Tensor], capture: Capture) -> Tensor:
        """[R, V] logits; the first time, they are compared with those of the same launches, one by one."""
        if self._logits is not None and self._replay is not None:
            self._replay()
            return self._logits
        parts = torch.split(self._buffer, list(self._shape.rooms))
        expected = forward(self._shape, parts).float()
        self._logits, self._replay = capture(lambda: forward(self._shape, parts))
        self._replay()
        error, largest = (float(part.abs().max()) for part in (self._logits.float() - expected, expected))
        if not error <= _TOLERANCE * largest:
            raise ModelError(f"replayed logits of {self._shape.num_rows} rows differ by {error:.3g} from {largest:.3g}")
        return self._logits


class GraphCapture:
    """Captures CUDA graphs; all of a model share one pool of memory, as they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See `Capture`. Other threads may use the device meanwhile, as those of the tiers do."""
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = function()
        return logits, graph.replay


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


def _tails(segments: Numbers, spans: Sequence[SpanRows]) -> Numbers:
    """In flat segments, the places of the lengths of runs that end with the slots of rows."""
    request = POOLS.index("request")
    ends = {
        first + count: number for number, (pool, first, count) in enumerate(segments[:, :3].tolist()) if pool == request
    }
    return np.array([7 * ends[span.slots[0] + 1] + 2 for span in spans], dtype=np.int64)


def _room_in_walks(plan: ReadPlan) -> int:
    """Keys that can be appended to what each row reads alone, until one of its walks is full."""
    alone = dict.fromkeys(range(plan.num_rows), 0)
    for call in plan.calls:
        if call.last - call.first == 1:
            alone[plan.row_numbers[call.first]] += call.num_tokens
    return min(-count % work.MIN_WALK for count in alone.values())


def rounded(count: int) -> int:
    """The next of 1, 2, 4, 8, 12, 16, 24, 32, 48, …: reading the weights takes longer than rows that are not needed."""
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if count > 8 and count <= power // 4 * 3 else power


def room_for(count: int) -> int:
    """The next power of two; 0 for nothing."""
    return max(_LEAST_ROOM, 1 << (count - 1).bit_length()) if count else 0
