"""Runner of llama.cpp: the rows of a step as forwards over its sequences."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import numpy as np

from kvmosaic.attention import Piece, PoolName, SpanRows
from kvmosaic.cache import BlockCopy
from kvmosaic.llama.cells import Cells, NoRoom
from kvmosaic.llama.library import LlamaContext, Logits, Rows
from kvmosaic.llama.model import LlamaModel
from kvmosaic.llama.state import SequenceState, parse
from kvmosaic.llama.storage import LlamaStorage
from kvmosaic.llama.views import (
    NUM_SEQUENCES,
    TILE,
    TILED_TYPES,
    UNLIMITED,
    Part,
    SequenceView,
    SlotRun,
    Target,
    is_shorter_apart,
    num_padding,
    row_cost,
    spans_of,
)

_SPARE_CELLS = 1
"""Cells for the copy of a last token whose position would leave a gap."""
_FIRST_CELLS = 4096
"""Allocated at the start: llama.cpp touches all of their memory, which takes seconds for as many as may be needed."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with consecutive positions that see the same, and where their tokens go."""

    token_ids: Sequence[int]
    position: int
    slots: Sequence[int]
    runs: tuple[SlotRun, ...]
    num_logits: int
    after: int | None
    """The slot of the token before, if it belongs to the same span."""
    number: int = 0
    """Its place among all groups of the step."""

    @property
    def target(self) -> Target:
        """Where its tokens are written."""
        return Target(range(self.position, self.position + len(self.token_ids)), self.after)


class LlamaRunner:
    """Runs steps of our engine in llama.cpp.

        rows of a step ──▶ groups that see the same ──▶ a view each ──▶ forwards ──▶ logits
                           readers of what others write come later

    Slots of both pools are numbered through: first those of requests, then those of chunks.
    """

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: Mapping[PoolName, int],
        block_size: int,
        *,
        max_moved: int,
        num_threads: int,
        max_cells: int | None = None,
        num_sequences: int = NUM_SEQUENCES,
        max_rows: int = 2048,
    ) -> None:
        """Allocates the cells.

        Args:
            model: what runs.
            num_blocks: blocks of each pool.
            block_size: tokens of a block.
            max_moved: cells for documents that are read elsewhere than they were computed.
            num_threads: compute threads of llama.cpp.
            max_cells: the most cells that are allocated; slots beyond them are in host memory. None: one for every
                slot.
            num_sequences: sequences of the context, at most 255.
            max_rows: maximum rows of one forward.

        Raises:
            ModelError: llama.cpp cannot allocate the cells.
        """
        self.model = model
        self._block_size = block_size
        self._offsets: dict[PoolName, int] = {"request": 0, "chunk_cache": num_blocks["request"] * block_size}
        num_slots = sum(num_blocks.values()) * block_size
        max_moved += _SPARE_CELLS
        self._max_cells = min(num_slots + max_moved, (max_cells or num_slots + max_moved) + _SPARE_CELLS)
        self.num_cells = min(self._max_cells, max(_FIRST_CELLS, num_sequences))
        """Cells that are allocated."""
        self._context_of: Callable[..., LlamaContext] = partial(
            model.file.context,
            num_sequences=num_sequences,
            num_threads=num_threads,
            max_rows=max_rows,
            cache_type=model.cache_type,
        )
        self._context = self._context_of(num_cells=self.num_cells + TILE)
        self._window = model.window
        span = self._window - 1 if self._window else UNLIMITED
        self.cells = Cells(self._context, num_slots, max_moved, self.num_cells, span)
        self._lock = threading.RLock()
        template = _template(self._context)
        self.storages: dict[PoolName, LlamaStorage] = {
            pool: LlamaStorage(
                self.cells,
                self._lock,
                model.layers,
                self._offsets[pool],
                num_blocks[pool],
                block_size,
                template,
                model.file.window_layers,
            )
            for pool in num_blocks
        }
        self._is_tiled = model.cache_type in TILED_TYPES and not model.file.is_on_gpu and max_rows >= TILE
        per_token = sum(layer.flops_per_pair // 2 for layer in model.layers)
        self._row_cost = row_cost(model.num_parameters, model.weight_type, per_token)
        self.is_asleep = False
        requests = num_blocks["request"] * block_size
        self.max_chunk_tokens = self._max_cells - _SPARE_CELLS - requests

    def sleep(self, request_blocks: Sequence[int], chunk_blocks: Sequence[int]) -> None:
        """Frees the context; the cells of these blocks move to host memory."""
        blocks: dict[PoolName, Sequence[int]] = {"request": request_blocks, "chunk_cache": chunk_blocks}
        kept = {slot for pool, ids in blocks.items() for block in ids for slot in self.slots_of(pool, block)}
        with self._lock:
            self.cells.free(slot for slot in range(self.cells.num_slots) if slot not in kept)
            self.cells.save_all()
            self._context.close()
            self.is_asleep = True

    def wake(self) -> None:
        """Allocates the context again; cells come back when they are read."""
        with self._lock:
            if self.is_asleep:
                self._open_context()
                self.is_asleep = False

    def close(self) -> None:
        """Frees the context; calling it again is safe."""
        with self._lock:
            self._context.close()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks of the request pool, in order; they share their cells."""
        with self._lock:
            for copy in copies:
                source, target = (self.slots_of("request", block)[0] for block in (copy.source, copy.target))
                self.cells.copy(source, target, self._block_size)

    def run(self, spans: Sequence[SpanRows]) -> Logits:
        """Computes the keys and values of all given rows and stores them; see `kvmosaic.model.runner.Runner.run`.

        The logits may be llama.cpp's own, which the next forward overwrites.
        """
        with self._lock:
            groups = [group for span in spans for group in self._groups(span)]
            groups = [replace(group, number=number) for number, group in enumerate(groups)]
            self.cells.free(slot for group in groups for slot in group.slots)
            self._grow_for(groups)
            forwards = [forward for forward in self._run_groups(groups) if forward[0]]
            numbers = [number for found, _ in forwards for number in found]
            if not numbers:
                return np.empty((0, self.model.vocab_size), np.float32)
            logits = forwards[0][1] if len(forwards) == 1 else np.concatenate([part for _, part in forwards])
            order = sorted(range(len(numbers)), key=numbers.__getitem__)
            return logits if order == list(range(len(order))) else logits[order]

    def check_invariants(self) -> None:
        """Asserts that the cells are consistent; for tests."""
        with self._lock:  # a tier's thread may be about to read a chunk
            self.cells.check_invariants()

    def slots_of(self, pool: PoolName, block: int) -> range:
        """The slots of a block, numbered through both pools."""
        first = self._offsets[pool] + block * self._block_size
        return range(first, first + self._block_size)

    def _grow_for(self, groups: Sequence[_Group]) -> None:
        """Allocates more cells, if there may be more, before any make room for those of these rows."""
        if self.num_cells < self._max_cells:
            num_rows = sum(len(group.token_ids) for group in groups) + _SPARE_CELLS
            self._grow(self.cells.num_needed((run for group in groups for run in group.runs), num_rows))

    def _grow(self, needed: int) -> bool:
        """Allocates at least so many cells, as far as there may be as many; False if nothing changes."""
        if needed <= self.num_cells or self.num_cells == self._max_cells:
            return False
        self.cells.save_all()
        self._context.close()
        self.num_cells = min(self._max_cells, max(2 * self.num_cells, needed))
        self._open_context()
        return True

    def _open_context(self) -> None:
        """Allocates `num_cells` again, after `Cells.save_all`."""
        self._context = self._context_of(num_cells=self.num_cells + TILE)
        self.cells.replace_memory(self._context, self.num_cells)

    def _run_groups(self, groups: Sequence[_Group]) -> list[tuple[list[int], Logits]]:
        """Runs groups; returns the number of each row's group, and the logits, of each forward."""
        found: list[tuple[list[int], Logits]] = []
        for part in (part for level in _levels(groups) for part in self._parts(level)):
            waiting = list(reversed(part))
            while waiting:
                if found:  # the next forward overwrites them
                    found[-1] = (found[-1][0], found[-1][1].copy())
                found.append(self._forward(self._fill(waiting)))
        return found

    def _parts(self, groups: list[_Group]) -> list[list[_Group]]:
        """Groups that are to share a forward; without views that others take, `Cells.rest` moves their cells away."""
        if not self._is_tiled or len(groups) < 2:
            return [groups]
        parts: list[tuple[Part, list[_Group]]] = []
        for group in groups:
            added = Part(len(group.token_ids), {run: run.num_tokens for run in group.runs})
            for number, (part, members) in enumerate(parts):
                if not is_shorter_apart(part, added, self._row_cost):
                    joined = Part(part.num_rows + added.num_rows, {**part.reads, **added.reads})
                    parts[number] = (joined, [*members, group])
                    break
            else:
                parts.append((added, [group]))
        return [members for _, members in parts]

    def _fill(self, waiting: list[_Group]) -> list[tuple[_Group, SequenceView]]:
        """Takes groups from the end of a list, as many as one forward has rows and sequences for."""
        taken: list[tuple[_Group, SequenceView]] = []
        room = self._context.max_rows
        while waiting and room:
            group, rest = waiting[-1], None
            limit = min(room, self.cells.max_span, self._max_rows(group))
            if len(group.token_ids) > limit:
                group, rest = _cut(group, limit)
            try:
                view = self.cells.take(self._continuous(group), group.target, may_copy=not taken)
            except NoRoom:
                if not taken and self._grow(self.num_cells + 1):
                    continue
                assert taken, "the tokens of a prompt fit: more than `max_chunk_tokens` are refused when it arrives"
                break
            waiting.pop()
            taken.append((group, view))
            room -= len(group.token_ids)
            if rest is not None:
                waiting.append(rest)
                break
        return taken

    def _forward(self, taken: Sequence[tuple[_Group, SequenceView]]) -> tuple[list[int], Logits]:
        rows = [Rows(group.token_ids, group.position, view.sequence, group.num_logits) for group, view in taken]
        self.cells.rest(sum(len(group.token_ids) for group, _ in taken))
        padding = self._num_padding([group for group, _ in taken])
        try:
            logits = self._context.forward(rows, padding)
        except BaseException:
            for _, view in taken:
                self.cells.drop(view)
            raise
        for group, view in taken:
            self.cells.write(view, group.slots, group.position)
            self.cells.put_back(view)
        return [group.number for group, _ in taken for _ in range(group.num_logits)], logits

    def _num_padding(self, groups: Sequence[_Group]) -> int:
        """Further rows with which a forward takes less time."""
        if not self._is_tiled:
            return 0
        reads = [(len(group.token_ids), sum(run.num_tokens for run in group.runs)) for group in groups]
        return num_padding(reads, self._row_cost)

    def _groups(self, span: SpanRows) -> Iterator[_Group]:
        """The rows of a span, cut where positions are not consecutive or rows see something else."""
        rules = span.rules
        assert not rules.window and rules.watch is None, "refused when the request was added"
        slots = [self._offsets[span.pool] + slot for slot in span.slots]
        positions = rules.positions or range(span.position, span.position + len(slots))
        own: list[SlotRun] = []
        numbers = range(len(slots))
        keys = [(positions[number] - number, self._seen(span, number)) for number in numbers]
        for (_, runs), members in groupby(numbers, key=lambda number: keys[number]):
            rows = list(members)
            first, last = rows[0], rows[-1] + 1
            seen = (*runs, *own)
            before = slots[first] - 1
            is_own = bool(seen) and not seen[-1].is_copied and seen[-1].first + seen[-1].num_tokens - 1 == before
            yield _Group(
                span.token_ids[first:last],
                positions[first],
                slots[first:last],
                seen,
                max(0, min(last, len(slots)) - max(first, len(slots) - span.num_logits)),
                before if is_own else None,
            )
            own.extend(SlotRun(slot, 1) for slot in slots[first:last])

    def _seen(self, span: SpanRows, row: int) -> tuple[SlotRun, ...]:
        """The runs that a row of a span sees, without rows of its own step."""
        runs = [run for piece in span.reads for run in self._runs_of(piece, row)]
        if span.reads_itself:  # its own slot is the last that it reads
            last = runs.pop()
            runs.append(last._replace(num_tokens=last.num_tokens - 1))
        return tuple(run for run in runs if run.num_tokens)

    def _runs_of(self, piece: Piece, row: int) -> Iterator[SlotRun]:
        """The parts of a piece that a row sees."""
        assert not piece.follows, "refused when the request was added"
        first = self._offsets[piece.pool] + piece.first_slot
        seen = piece.visibility
        if seen is None:
            yield SlotRun(first, piece.num_tokens, piece.distance)
            return
        count = min(piece.num_tokens, seen.ends[row]) if seen.ends else piece.num_tokens
        begin = 0
        for hidden in (*seen.hidden, count):
            end = min(hidden, count)
            if begin < end:
                yield SlotRun(first + begin, end - begin, piece.distance)
            begin = hidden + 1

    def _continuous(self, group: _Group) -> tuple[SlotRun, ...]:
        """The runs of a group, such that the last position before its rows is taken, and none after it.

        llama.cpp refuses rows after a gap, and hides what is not before them, as of documents that overlap at their own
        offsets. Once a key is rotated, its position is only compared: what is not before the rows is copied to before
        them with its keys as they are, or else the last token that they see to the position before them.
        """
        runs = tuple(part for run in group.runs for part in self._before(run, group.position))
        if not runs:
            return ()
        ends = [self._last_position(run) for run in runs]
        last = max(ends)
        if last == group.position - 1:
            return runs
        index = ends.index(last)
        run = runs[index]
        number = self.cells.positions_of(run.first, run.num_tokens).index(last - run.distance - run.label)
        token = SlotRun(run.first + number, 1, run.distance, group.position - 1 - last)
        head = run._replace(num_tokens=number)
        tail = run._replace(first=token.first + 1, num_tokens=run.num_tokens - number - 1)
        return (*runs[:index], *(part for part in (head, tail) if part.num_tokens), *runs[index + 1 :], token)

    def _before(self, run: SlotRun, position: int) -> Iterator[SlotRun]:
        """The parts of a run, each labelled so that it ends before a position."""
        if self._last_position(run) < position:
            yield run
            return
        assert not self._window, "refused when the request was added"
        positions = [number + run.distance for number in self.cells.positions_of(run.first, run.num_tokens)]
        for part in spans_of(positions, position):
            last = max(positions[part.start : part.stop])
            yield SlotRun(run.first + part.start, len(part), run.distance, min(0, position - 1 - last))

    def _max_rows(self, group: _Group) -> int:
        """Rows of a group, from the first, that may see its last token with another position: it is in their window."""
        if not self._window or not group.runs:
            return len(group.token_ids)
        distance = group.position - max(self._last_position(run) for run in group.runs)
        if distance == 1:
            return len(group.token_ids)
        assert distance < self._window, "refused when the request was added"
        return self._window - distance

    def _last_position(self, run: SlotRun) -> int:
        return max(self.cells.positions_of(run.first, run.num_tokens)) + run.distance + run.label


def _cut(group: _Group, count: int) -> tuple[_Group, _Group]:
    """The first rows of a group, and the rest, which sees them."""
    kept_logits = max(0, count - (len(group.token_ids) - group.num_logits))
    head = replace(group, token_ids=group.token_ids[:count], slots=group.slots[:count], num_logits=kept_logits)
    rest = replace(
        group,
        token_ids=group.token_ids[count:],
        position=group.position + count,
        slots=group.slots[count:],
        runs=(*group.runs, *(SlotRun(slot, 1) for slot in head.slots)),
        num_logits=group.num_logits - kept_logits,
        after=head.slots[-1],
    )
    return head, rest


def _levels(groups: Sequence[_Group]) -> Iterator[list[_Group]]:
    """Groups in the order in which they can run: readers of what others write come after these."""
    written = sorted((slot, group.number) for group in groups for slot in group.slots)
    slots = [slot for slot, _ in written]
    needs: list[set[int]] = []
    for group in groups:
        needed: set[int] = set()
        for run in group.runs:
            low, high = bisect_left(slots, run.first), bisect_left(slots, run.first + run.num_tokens)
            needed.update(number for _, number in written[low:high])
        needs.append(needed)
    left = set(range(len(groups)))
    while left:
        ready = sorted(number for number in left if not needs[number] & left)
        assert ready, "rows read each other in a circle"
        yield [groups[number] for number in ready]
        left.difference_update(ready)


def _template(context: LlamaContext) -> SequenceState:
    """A saved sequence of one token, which tells the form of all."""
    context.forward([Rows([0], 0, 0)])
    try:
        return parse(context.save(0))
    finally:
        context.untag(0)
