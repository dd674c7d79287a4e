"""Cells: slots, homes, views and moved copies over a memory that is written out in Python."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmosaic.llama import cells
from kvmosaic.llama.cells import Cells, NoRoom
from kvmosaic.llama.state import LayerRows, MemoryState, SequenceState, pack, parse, relabelled
from kvmosaic.llama.views import UNLIMITED, SlotRun, Target

NUM_SLOTS = 24


class WrittenOutMemory:
    """What llama.cpp's memory does, cell by cell: a content, a position, and the sequences that see it.

    With a window, it forgets cells of one sequence that have left the window before its next position.
    """

    def __init__(self, num_sequences: int, num_cells: int, window: int = 1000) -> None:
        self.window = window
        self.num_sequences = num_sequences
        self.num_cells = num_cells
        self.cells: list[tuple[int, int, set[int]]] = []
        """Content, position, sequences."""

    def compute(self, sequence: int, position: int, contents: list[int]) -> None:
        """A forward of new tokens."""
        last = max((place for _, place, seen in self.cells if sequence in seen), default=position - 1)
        assert last == position - 1, "positions of a sequence have no gaps at their end"
        for number, content in enumerate(contents):
            self._add(sequence, [(position + number, content)])

    def seen(self, sequence: int) -> list[tuple[int, int]]:
        """Position and content of what a sequence sees."""
        return sorted((place, content) for content, place, seen in self.cells if sequence in seen)

    def tag(self, source: int, target: int, first: int, last: int) -> None:
        for _, place, seen in self.cells:
            if source in seen and place >= first and (last < 0 or place < last):
                seen.add(target)

    def untag(self, sequence: int, first: int = 0, last: int = -1) -> None:
        for _, place, seen in self.cells:
            if place >= first and (last < 0 or place < last):
                seen.discard(sequence)
        self.cells = [cell for cell in self.cells if cell[2]]

    def save(self, sequence: int) -> bytes:
        found = [(place, content) for content, place, seen in self.cells if sequence in seen]
        last = max((place for place, _ in found), default=0)
        found = [(place, content) for place, content in found if last - place < self.window]
        positions = np.asarray([place for place, _ in found], np.int32)
        rows = np.asarray([content for _, content in found], np.int32).reshape(-1, 1).view(np.uint8)
        layers = (LayerRows(1, rows),)
        return pack(SequenceState((7, sequence), (MemoryState(positions, layers, layers),)))

    def load(self, sequence: int, state: bytes) -> None:
        assert not self.seen(sequence)
        (memory,) = parse(state).memories
        contents = memory.keys[0].rows.copy().view(np.int32).flatten().tolist()
        self._add(sequence, list(zip(memory.positions.tolist(), contents, strict=True)))

    def shifted(self, states: list[tuple[SequenceState, int]]) -> list[SequenceState]:
        return [relabelled(state, distance) for state, distance in states]

    def _add(self, sequence: int, cells: list[tuple[int, int]]) -> None:
        """Takes what is free, for cells that are written at once."""
        last = {one: max(at for _, at, seen in self.cells if one in seen) for _, _, seen in self.cells for one in seen}
        self.cells = [cell for cell in self.cells if len(cell[2]) > 1 or last[min(cell[2])] + 1 - cell[1] < self.window]
        self.cells.extend((content, position, {sequence}) for position, content in cells)
        assert len(self.cells) <= self.num_cells, "our pools never let the memory overflow"


class Twin:
    """Cells, and beside them what each slot must hold."""

    def __init__(
        self, num_sequences: int, max_moved: int, max_cells: int | None = None, window: int | None = None
    ) -> None:
        self.memory = WrittenOutMemory(num_sequences, max_cells or NUM_SLOTS + max_moved, window or 1000)
        self.cells = Cells(self.memory, NUM_SLOTS, max_moved, max_cells, window - 1 if window else UNLIMITED)
        self.slots: dict[int, tuple[int, int]] = {}
        """Position and content."""
        self.next_content = 1
        self.rests, self.may_copy = False, False

    def write(self, runs: list[SlotRun], slots: list[int], position: int) -> None:
        self.cells.free(slots)
        for slot in slots:
            self.slots.pop(slot, None)
        runs = [run for run in runs if all(slot in self.slots for slot in range(run.first, run.first + run.num_tokens))]
        runs = self.continuous(runs, position)
        after = slots[0] - 1 if slots[0] - 1 in self.slots else None
        try:
            view = self.cells.take(runs, Target(range(position, position + len(slots)), after), may_copy=self.may_copy)
        except NoRoom:
            self.cells.check_invariants()
            num_cells = sum(run.num_tokens for run in runs) + len(slots)
            assert not self.may_copy or num_cells > self.memory.num_cells, "what fits has room"
            return
        expected = sorted(
            (self.slots[slot][0] + run.distance + run.label, self.slots[slot][1])
            for run in runs
            for slot in range(run.first, run.first + run.num_tokens)
        )
        assert self.memory.seen(view.sequence) == expected
        contents = list(range(self.next_content, self.next_content + len(slots)))
        self.next_content += len(slots)
        if self.rests:
            self.cells.rest(len(slots))
        self.memory.compute(view.sequence, position, contents)
        self.cells.write(view, slots, position)
        self.cells.put_back(view)
        for number, (slot, content) in enumerate(zip(slots, contents, strict=True)):
            self.slots[slot] = position + number, content

    def continuous(self, runs: list[SlotRun], position: int) -> list[SlotRun]:
        """Runs below a position whose last cell is right before it; they may have slots in common."""
        kept: list[SlotRun] = []
        for run in runs:
            places = self.places(run)
            if all(0 <= place < position for place in places) and len(set(places)) == len(places):
                kept.append(run)
        if not kept:
            return []
        last, index = max(
            (self.slots[run.first + run.num_tokens - 1][0] + run.distance, number) for number, run in enumerate(kept)
        )
        highest = max(
            self.slots[slot][0] + run.distance for run in kept for slot in range(run.first, run.first + run.num_tokens)
        )
        if highest != last:
            return []
        run = kept.pop(index)
        token = SlotRun(run.first + run.num_tokens - 1, 1, run.distance, position - 1 - last)
        rest = run._replace(num_tokens=run.num_tokens - 1)
        return [*kept, *([rest] if rest.num_tokens else []), token]

    def places(self, run: SlotRun) -> list[int]:
        """Positions of a run for its reader."""
        return [self.slots[slot][0] + run.distance for slot in range(run.first, run.first + run.num_tokens)]

    def copy(self, source: int, target: int) -> None:
        self.cells.copy(source, target, 4)
        for offset in range(4):
            self.slots.pop(target + offset, None)
            if source + offset in self.slots:
                self.slots[target + offset] = self.slots[source + offset]

    def load(self, slots: list[int]) -> None:
        """Reads slots with different positions, and writes what was read into the same ones."""
        slots = list({self.slots[slot][0]: slot for slot in slots}.values())
        if slots:
            state = self.cells.read(slots)
            self.cells.load(slots, [self.slots[slot][0] for slot in slots], pack(state))

    def check(self) -> None:
        self.cells.check_invariants()
        for slot, (position, content) in self.slots.items():
            state = self.cells.read([slot])
            assert state.positions == [position]
            assert int(state.memories[0].keys[0].rows.copy().view(np.int32)[0, 0]) == content


def some_runs(chance: random.Random, slots: list[int]) -> list[SlotRun]:
    """Up to four runs of written slots, some of them moved."""
    runs = []
    for _ in range(chance.randint(0, 4) if slots else 0):
        distance = chance.choice([0, 0, 0, 5, -3])
        runs.append(SlotRun(chance.choice(slots), chance.randint(1, 4), distance))
    return runs


@pytest.mark.parametrize("num_sequences", [4, 6, 9, 40])
@pytest.mark.parametrize("max_moved", [4, 40])
@pytest.mark.parametrize("max_cells", [None, 14])
@pytest.mark.parametrize(("seed", "window"), [(seed, 6 if seed % 3 == 1 else None) for seed in range(8)])
def test_every_view_shows_exactly_what_it_is_to_show(
    num_sequences: int,
    max_moved: int,
    max_cells: int | None,
    seed: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cells, "IDLE_ROWS", 6)
    chance, twin = random.Random(seed), Twin(num_sequences, max_moved, max_cells, window)
    twin.rests, twin.may_copy = seed % 2 == 0, seed % 4 < 2
    for _ in range(300):
        action = chance.random()
        if action < 0.7:
            first, count = chance.randrange(NUM_SLOTS - 3), chance.randint(1, 4)
            position = chance.choice([0, 0, 3, chance.randrange(40)])
            twin.write(some_runs(chance, list(twin.slots)), list(range(first, first + count)), position)
        elif action < 0.85:
            source, target = chance.sample(range(NUM_SLOTS // 4), 2)
            twin.copy(4 * source, 4 * target)
        elif action < 0.88:
            twin.cells.save_all()
            assert not twin.memory.cells
        else:
            slots = list(twin.slots)
            twin.load(chance.sample(slots, min(len(slots), chance.randint(1, 6))))
        twin.check()


def test_a_saved_sequence_is_read_back_as_it_was() -> None:
    memory = WrittenOutMemory(4, 10)
    memory.compute(1, 0, [5, 6, 7])
    state = memory.save(1)
    assert pack(parse(state)) == state
