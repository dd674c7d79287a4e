"""Replays: a forward that is captured once per shape as a CUDA graph, and reads whole numbers from a buffer.

whole numbers ──▶ pinned memory ──▶ buffer, whose address the graph knows ──▶ replay ──▶ result at its address
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from kvmosaic.attention.reads import ReadPlan
from kvmosaic.attention.triton import work
from kvmosaic.attention.triton.work import Numbers, pinned
from kvmosaic.errors import ModelError

logger = logging.getLogger("kvmosaic.engine")

MAX_ROWS = 512
"""Max rows of a step that is replayed: the launches of more rows take less time than their work."""
MAX_GRAPHS = 64
MAX_REFUSED = 3
"""Shapes whose capture fails, until no other is tried."""
MAX_PARTIAL_BYTES = 2**27
"""Max bytes of partial results of a layer: graphs keep the memory that they take."""
_LEAST_ROOM = 16
_TOLERANCE = 0.02
"""Max difference of replayed results, by the largest of them: the same kernels ran on the same numbers."""

Result = Shaped[Tensor, "R *S"]
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Of a function: its result, at an address that stays, and what computes it anew there."""
Forward = Callable[[Sequence[Tensor]], Tensor]  # of the numbers of a step, in parts of a buffer


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: its rows, whether keys are moved (of each mask), and numbers per part."""

    num_rows: int
    moved: tuple[bool, ...]
    rooms: tuple[int, ...]
    addresses: tuple[int, ...] = ()
    """Of tensors that the forward is given by others, and reads anew in each replay."""


class Replays:
    """The captured steps of one model."""

    def __init__(self, device: torch.device, capture: Capture | None = None) -> None:
        """Captures nothing yet; `capture` is a `GraphCapture`, or a twin for machines without a GPU."""
        self.problem = ""
        """Why no step is replayed any more; empty: they are."""
        self.num_replays = 0
        self.refused: set[StepShape] = set()
        self.steps: OrderedDict[StepShape, _CapturedStep | None] = OrderedDict()
        self._device = device
        self._capture = capture or GraphCapture(device)

    def run(self, shape: StepShape, parts: Sequence[Numbers], num_checked: int, forward: Forward) -> Result | None:
        """The result of `forward`, valid until the next run; None if the step is not replayed.

        It is not when its shape occurs for the first time, or could not be captured. After a capture, the first rows
        of its result, `num_checked`, are compared with those of the same launches, one by one.
        """
        if self.problem or shape in self.refused:
            return None
        if shape not in self.steps:
            self.steps[shape] = None
            if len(self.steps) > MAX_GRAPHS:
                self.steps.popitem(last=False)
            return None
        self.steps.move_to_end(shape)
        try:
            step = self.steps[shape]
            if step is None:
                step = self.steps[shape] = _CapturedStep(shape, self._device)
            step.load(parts)
            result = step.compute(forward, self._capture, num_checked)
        except Exception as error:
            # a forward that waits for the device, say, or has no memory left: it runs launch by launch
            problem = f"{type(cause := error.__context__ or error).__name__}: {cause}"
            logger.warning("steps of %d rows are not replayed as CUDA graphs: %.500s", shape.num_rows, problem)
            self.refused.add(shape)
            del self.steps[shape]
            if len(self.refused) == MAX_REFUSED:
                self.problem = problem
                self.steps.clear()
            return None
        self.num_replays += 1
        return result


class _CapturedStep:
    """A buffer of whole numbers, and the graph of the forward that reads them."""

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self._shape = shape
        self._buffer = torch.zeros(sum(shape.rooms), dtype=torch.long, device=device)
        self._result: Tensor | None = None
        self._replay: Callable[[], None] | None = None

    def load(self, parts: Sequence[Numbers]) -> None:
        """Copies the numbers of a step into the buffer; zeros beyond them. The host does not wait for it."""
        flat, first = np.zeros(len(self._buffer), dtype=np.int64), 0
        for part, room in zip(parts, self._shape.rooms, strict=True):
            flat[first : first + len(part)] = part
            first += room
        self._buffer.copy_(pinned(torch.from_numpy(flat), self._buffer.device), non_blocking=True)

    def compute(self, forward: Forward, capture: Capture, num_checked: int) -> Tensor:
        """The result; the first time, it is compared with that of the same launches, one by one."""
        if self._result is not None and self._replay is not None:
            self._replay()
            return self._result
        parts = torch.split(self._buffer, list(self._shape.rooms))
        expected = forward(parts)[:num_checked].float()
        self._result, self._replay = capture(lambda: forward(parts))
        self._replay()
        found = self._result[:num_checked].float()
        error, largest = (float(part.abs().max()) for part in (found - expected, expected))
        if not error <= _TOLERANCE * largest:
            raise ModelError(
                f"replayed results of {self._shape.num_rows} rows differ by {error:.3g} from {largest:.3g}"
            )
        return self._result


class GraphCapture:
    """Captures CUDA graphs; all of a model share one pool of memory, as they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """See `Capture`. Other threads may use the device meanwhile, as those of the tiers do."""
        with torch.cuda.device(self._device):
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = function()
        return result, graph.replay


def tails(segments: Numbers, pool: int, ends: Sequence[int]) -> Numbers:
    """In a row of segments, the places of the lengths of runs of a pool that end before these slots."""
    listed = enumerate(segments.reshape(-1, 7)[:, :3].tolist())
    numbers = {first + count: number for number, (found, first, count) in listed if found == pool}
    return np.array([7 * numbers[end] + 2 for end in ends], dtype=np.int64)


def room_in_walks(plan: ReadPlan) -> int:
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


def rooms_of(listed: Sequence[Numbers]) -> list[int]:
    """Of the rows of `flat_work`; that of starts has its own length."""
    segments, *units, partial_slots, starts = listed
    wide = [room_for(len(segments) // 7) * 7, *(room_for(len(part) // 5) * 5 for part in units)]
    return [*wide, room_for(len(partial_slots)), len(starts)]
