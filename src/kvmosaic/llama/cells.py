"""Cells: which cell of llama.cpp's memory holds the token of each slot of our pools.

Our KV cache counts slots, llama.cpp has cells. A slot that was written has a cell; after a copy of a block two slots
have the same one. So there are never more cells than slots, and whatever our pools allow fits.

    slot 7 ──▶ cell (home 3, position 41)        home: a sequence in which no two cells have the same position,
    slot 8 ──▶ cell (home 3, position 42)        so that a range of positions names them
    slot 9 ──▶ cell (home 5, position 0)

Of models with sliding windows, llama.cpp takes a cell that one sequence alone sees for free once it has left the window
before that sequence's next position, and saves no such cell. So no home, and no moved copy, spans a whole window.

A forward needs a sequence with exactly the cells that its rows see: a *view*, built by tags. Views are kept, since the
next token of an answer sees the same cells and one more. Cells that are read at another distance are copied and shifted
first. When sequences run out, views go first, then moved copies, then homes: their cells move to host memory until they
are read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmosaic.llama.memory import SequenceMemory
from kvmosaic.llama.state import SequenceState, gather, pack, parse, relabelled

UNLIMITED = 1 << 31
"""More than any span."""


class SlotRun(NamedTuple):
    """Consecutive slots, as rows read them."""

    first: int
    num_tokens: int
    distance: int = 0
    """By how much their keys are moved for the reader."""
    label: int = 0
    """By how much their positions differ from that, with their keys as they are."""

    @property
    def is_copied(self) -> bool:
        """Whether it cannot be read where it is."""
        return bool(self.distance or self.label)


class Target(NamedTuple):
    """Where tokens will be written."""

    positions: range
    after: int | None = None
    """The slot of the token before, if it belongs to the same span."""


class NoSequence(Exception):
    """All sequences, or all room for moved cells, belong to views in use."""


@dataclass(eq=False, slots=True)
class Home:
    """Cells that a range of positions names. While `sequence` is None, they are in `saved`, in host memory."""

    sequence: int | None
    uses: dict[int, int] = field(default_factory=dict)
    """Number of slots of each position's cell."""
    saved: bytes = b""
    freed: list[int] = field(default_factory=list)
    """Positions of saved cells that were freed since."""


@dataclass(eq=False, slots=True)
class SequenceView:
    """A sequence with the cells that some rows see."""

    sequence: int
    runs: tuple[SlotRun, ...]
    """The slots that it shows, in order."""
    homes: set[Home] = field(default_factory=set)
    """Of these cells."""
    home: Home | None = None
    """Of the tokens that will be written through it."""


class Cells:
    """Cells of all slots: homes, views and moved copies over one memory."""

    def __init__(self, memory: SequenceMemory, num_slots: int, max_moved: int, max_span: int = UNLIMITED) -> None:
        """Describes an empty memory.

        Args:
            memory: where the cells are.
            num_slots: slots of all pools, numbered through.
            max_moved: maximum cells of moved copies.
            max_span: maximum positions from the first to the last cell of a home or a moved copy.
        """
        self.memory = memory
        self.max_span = max_span
        self._homes: list[Home | None] = [None] * num_slots
        self._positions = [0] * num_slots
        self._free = list(range(memory.num_sequences))
        self._stored: OrderedDict[Home, None] = OrderedDict()
        """Homes that have a sequence, the least recently used first; the same order in all of these."""
        self._views: OrderedDict[tuple[SlotRun, ...], SequenceView] = OrderedDict()
        self._taken: list[SequenceView] = []
        self._moved: OrderedDict[SlotRun, int] = OrderedDict()
        """Sequences of moved copies."""
        self._num_moved = 0
        self._max_moved = max_moved

    @property
    def num_slots(self) -> int:
        """Slots of all pools."""
        return len(self._homes)

    def take(self, runs: Iterable[SlotRun], target: Target | None = None) -> SequenceView:
        """Returns a view with exactly the cells of these runs, for one group of rows, until `put_back` or `drop`.

        Args:
            runs: what the rows see.
            target: where their tokens will be written, at most `max_span`; None: nothing will be.

        Raises:
            NoSequence: other taken views hold what it needs.
        """
        wanted = self._normal(runs)
        view = self._views.pop(wanted, None)
        if view is None:
            view = SequenceView(self._take_sequence(), wanted)
            parts = wanted
        else:
            parts = ()
        self._taken.append(view)  # from here on, nothing that it has makes room for others
        try:
            self._move(view, [run for run in parts if run.is_copied and run not in self._moved])
            for run in parts:
                self._show(run, view)
            self._touch(view)
            if target is not None:
                view.home = self._home_for(target)
        except BaseException:
            self.drop(view)
            raise
        return view

    def write(self, view: SequenceView, slots: Sequence[int], position: int) -> None:
        """Records that a forward through a taken view has written tokens into slots, from a position on.

        The view then shows them, too.
        """
        home = view.home
        assert home is not None and home.sequence is not None, "it was taken with a target"
        self.memory.tag(view.sequence, home.sequence, position, position + len(slots))
        for number, slot in enumerate(slots, position):
            assert self._homes[slot] is None, "slots are freed before they are written"
            self._homes[slot], self._positions[slot] = home, number
            home.uses[number] = 1
        view.homes.add(home)
        view.home = None
        view.runs = self._normal((*view.runs, *(SlotRun(slot, 1) for slot in slots)))

    def put_back(self, view: SequenceView) -> None:
        """Ends the use of a view; it is kept for rows that see the same."""
        self._taken.remove(view)
        if (other := self._views.pop(view.runs, None)) is not None:
            self._drop_sequence(other.sequence)
        self._views[view.runs] = view

    def drop(self, view: SequenceView) -> None:
        """Ends the use of a view, for good."""
        self._taken.remove(view)
        self._drop_sequence(view.sequence)
        home, view.home = view.home, None
        if home is not None and not home.uses:
            assert home.sequence is not None
            del self._stored[home]
            self._free.append(home.sequence)

    def free(self, slots: Iterable[int]) -> None:
        """Frees the cells of slots that are about to be written again, and drops the views that show them."""
        stale = {slot for slot in slots if self._homes[slot] is not None}
        if not stale:
            return
        for runs in [runs for runs in self._views if any(_meets(run, stale) for run in runs)]:
            self._drop_sequence(self._views.pop(runs).sequence)
        for run in [run for run in self._moved if _meets(run, stale)]:
            self._drop_moved(run)
        for slot in stale:
            self._release(slot)

    def copy(self, source: int, target: int, num_slots: int) -> None:
        """Gives `num_slots` slots from `target` on the cells of those from `source` on."""
        self.free(range(target, target + num_slots))
        for offset in range(num_slots):
            home, position = self._homes[source + offset], self._positions[source + offset]
            if home is not None:
                self._homes[target + offset], self._positions[target + offset] = home, position
                home.uses[position] += 1

    def read(self, slots: Sequence[int]) -> SequenceState:
        """Copies of the cells of some slots, in order; those in host memory stay there."""
        saved: dict[Home, SequenceState] = {}
        live = [slot for slot in slots if self._home_of(slot).sequence is not None]
        found: dict[int, tuple[SequenceState, int]] = {}
        for part in _spans([self._positions[slot] for slot in live], self.max_span):
            view = self.take(SlotRun(live[number], 1) for number in part)
            try:
                state = parse(self.memory.save(view.sequence))
            finally:
                self.drop(view)
            found.update((position, (state, number)) for number, position in enumerate(state.positions))
        for slot in slots:
            home = self._home_of(slot)
            if home.sequence is None and home not in saved:
                state = saved[home] = parse(home.saved)
                places = {position: number for number, position in enumerate(state.positions)}
                mine = [self._positions[other] for other in slots if self._homes[other] is home]
                found.update((position, (state, places[position])) for position in mine)
        return gather([found[self._positions[slot]] for slot in slots])

    def load(self, slots: Sequence[int], positions: Sequence[int], state: bytes) -> None:
        """Records saved cells as those of some slots, each at its position; they are written when they are read."""
        self.free(slots)
        order = sorted(range(len(slots)), key=positions.__getitem__)  # as `parse` gives them
        parts = _spans([positions[number] for number in order], self.max_span)
        parsed = parse(state) if len(parts) > 1 else None
        for part in parts:
            home = Home(None, saved=state if parsed is None else pack(parsed.take(part)))
            for number in (order[index] for index in part):
                self._homes[slots[number]], self._positions[slots[number]] = home, positions[number]
                home.uses[positions[number]] = 1

    def position_of(self, slot: int) -> int:
        """The position at which the token of a slot was computed."""
        assert self._homes[slot] is not None, "rows read written slots"
        return self._positions[slot]

    def _home_of(self, slot: int) -> Home:
        home = self._homes[slot]
        assert home is not None, "rows read written slots"
        return home

    def save_all(self) -> None:
        """Moves all cells to host memory and drops all views, so that the memory may be replaced by an empty one."""
        assert not self._taken
        while self._views or self._moved or self._stored:
            self._make_room()

    def check_invariants(self) -> None:
        """Asserts that slots, homes and sequences agree; for tests."""
        uses: dict[Home, dict[int, int]] = {}
        for home, position in zip(self._homes, self._positions, strict=True):
            if home is not None:
                counts = uses.setdefault(home, {})
                counts[position] = counts.get(position, 0) + 1
        for home, counts in uses.items():
            assert home.uses == counts and (home.sequence is None) == (home not in self._stored)
            assert max(counts) - min(counts) < self.max_span
        assert set(self._stored) <= set(uses)
        views = [*self._views.values(), *self._taken]
        used = [home.sequence for home in self._stored] + [view.sequence for view in views] + [*self._moved.values()]
        assert sorted([*used, *self._free]) == list(range(self.memory.num_sequences))  # type: ignore[type-var]
        assert self._num_moved == sum(run.num_tokens for run in self._moved) <= self._max_moved

    def _home_for(self, target: Target) -> Home:
        """The home of the token before if it has no cells at these positions, and no other view writes to it."""
        if target.after is not None:
            home = self._home_of(target.after)
            is_free = not any(position in home.uses for position in target.positions)
            is_free = is_free and self._fits(home, target.positions)
            if home.sequence is not None and is_free and all(view.home is not home for view in self._taken):
                self._stored.move_to_end(home)
                return home
        home = Home(self._take_sequence())
        self._stored[home] = None
        return home

    def _fits(self, home: Home, positions: range) -> bool:
        """Whether a home may have these positions, too."""
        if self.max_span == UNLIMITED:
            return True
        return len(_spans([min(home.uses), max(home.uses), *positions], self.max_span)) == 1

    def _normal(self, runs: Iterable[SlotRun]) -> tuple[SlotRun, ...]:
        """Runs in order, as few as possible; copied ones are cut by `max_span`."""
        parts: list[SlotRun] = []
        for run in _joined(runs):
            slots = range(run.first, run.first + run.num_tokens) if run.is_copied else ()
            spans = _spans([self._positions[slot] for slot in slots], self.max_span)
            parts.extend(SlotRun(slots[span[0]], len(span), *run[2:]) for span in spans)
            parts.extend(() if spans else (run,))
        return tuple(parts)

    def _touch(self, view: SequenceView) -> None:
        """Makes what a view shows the last to make room for others."""
        for home in view.homes:
            self._stored.move_to_end(home)
        for run in view.runs:
            if run.is_copied:
                self._moved.move_to_end(run)

    def _show(self, run: SlotRun, view: SequenceView) -> None:
        """Adds the cells of a run to a view."""
        if run.is_copied:
            self.memory.tag(self._moved[run], view.sequence, 0, -1)
            return
        for home, start, stop in self._segments(run.first, run.num_tokens):
            self.memory.tag(self._sequence_of(home), view.sequence, start, stop)
            view.homes.add(home)

    def _segments(self, first: int, count: int) -> list[tuple[Home, int, int]]:
        """Homes and ranges of positions [first, last) of a run of slots, in order."""
        found: list[tuple[Home, int, int]] = []
        for slot in range(first, first + count):
            home, position = self._home_of(slot), self._positions[slot]
            if found and found[-1][0] is home and found[-1][2] == position:
                found[-1] = (home, found[-1][1], position + 1)
            else:
                found.append((home, position, position + 1))
        return found

    def _sequence_of(self, home: Home) -> int:
        """The sequence of a home, loaded if it was saved."""
        if home.sequence is None:
            sequence = self._take_sequence()
            self.memory.load(sequence, home.saved)
            home.sequence, home.saved = sequence, b""
            for position in home.freed:
                self.memory.untag(sequence, position, position + 1)
            home.freed.clear()
        self._stored[home] = None
        self._stored.move_to_end(home)
        return home.sequence

    def _move(self, view: SequenceView, runs: Sequence[SlotRun]) -> None:
        """Copies the cells of runs to where a taken view shows them."""
        states: list[tuple[bytes, int]] = []
        for run in runs:
            gathered = SequenceView(self._take_sequence(), ())
            self._taken.append(gathered)
            try:
                self._show(SlotRun(run.first, run.num_tokens), gathered)
                state = self.memory.save(gathered.sequence)
            finally:
                self.drop(gathered)
            states.append((state, run.distance))
        for run, state in zip(runs, self.memory.shifted(states) if states else (), strict=True):
            while self._num_moved + run.num_tokens > self._max_moved:
                self._drop_moved(self._unused_moved())
            sequence = self._take_sequence()
            try:
                self.memory.load(sequence, relabelled(state, run.label) if run.label else state)
            except BaseException:
                self._drop_sequence(sequence)
                raise
            self._moved[run] = sequence
            self._num_moved += run.num_tokens

    def _unused_moved(self) -> SlotRun:
        """The least recently used moved copy that no taken view shows."""
        shown = {run for view in self._taken for run in view.runs}
        for run in self._moved:
            if run not in shown:
                return run
        raise NoSequence

    def _drop_moved(self, run: SlotRun) -> None:
        for runs in [runs for runs in self._views if run in runs]:
            self._drop_sequence(self._views.pop(runs).sequence)
        self._drop_sequence(self._moved.pop(run))
        self._num_moved -= run.num_tokens

    def _take_sequence(self) -> int:
        """A sequence without cells; what was not used for longest makes room: views, then moved copies, then homes."""
        if not self._free:
            self._make_room()
        return self._free.pop()

    def _make_room(self) -> None:
        if self._views:
            self._drop_sequence(self._views.popitem(last=False)[1].sequence)
            return
        try:
            self._drop_moved(self._unused_moved())
            return
        except NoSequence:
            pass
        held = {home for view in self._taken for home in (*view.homes, view.home)}
        for home in self._stored:
            if home not in held:
                assert home.sequence is not None
                home.saved = self.memory.save(home.sequence)
                self._drop_sequence(home.sequence)
                home.sequence = None
                del self._stored[home]
                return
        raise NoSequence

    def _drop_sequence(self, sequence: int) -> None:
        self.memory.untag(sequence)
        self._free.append(sequence)

    def _release(self, slot: int) -> None:
        home, position = self._homes[slot], self._positions[slot]
        assert home is not None
        self._homes[slot] = None
        home.uses[position] -= 1
        if home.uses[position]:
            return
        del home.uses[position]
        if home.sequence is None:
            home.freed.append(position)
            return
        self.memory.untag(home.sequence, position, position + 1)
        if not home.uses:
            self._free.append(home.sequence)
            del self._stored[home]


def _joined(runs: Iterable[SlotRun]) -> tuple[SlotRun, ...]:
    """Runs in order, neighbours that are read alike as one."""
    joined: list[SlotRun] = []
    for run in runs:
        before = joined[-1] if joined else None
        if before is not None and before.first + before.num_tokens == run.first and before[2:] == run[2:]:
            joined[-1] = before._replace(num_tokens=before.num_tokens + run.num_tokens)
        elif run.num_tokens:
            joined.append(run)
    return tuple(joined)


def _spans(positions: Sequence[int], max_span: int) -> list[range]:
    """Indexes of positions, in order, cut where first and last would be further apart than allowed."""
    if max_span == UNLIMITED:
        return [range(len(positions))] if positions else []
    spans: list[range] = []
    low = high = 0
    for number, position in enumerate(positions):
        low, high = min(low, position), max(high, position)
        if spans and high - low < max_span:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
            low = high = position
    return spans


def _meets(run: SlotRun, slots: set[int]) -> bool:
    """Whether a run has any of these slots."""
    last = run.first + run.num_tokens
    if run.num_tokens > len(slots):
        return any(run.first <= slot < last for slot in slots)
    return any(slot in slots for slot in range(run.first, last))
