"""Cells: which cell of llama.cpp's memory holds the token of each slot of our pools.

Our KV cache counts slots, llama.cpp has cells. A slot that was written has a cell; after a copy of a block two slots
have the same one. So there are never more cells than slots, and whatever our pools allow fits.

    slot 7 ──▶ cell (home 3, position 41)        home: a sequence in which no two cells have the same position,
    slot 8 ──▶ cell (home 3, position 42)        so that a range of positions names them
    slot 9 ──▶ cell (home 5, position 0)

Of models with sliding windows, llama.cpp takes a cell that one sequence alone sees for free once it has left the window
before that sequence's next position, and saves no such cell. So no home, and no moved copy, spans a whole window, and
the cells of a view of its own are seen by a second sequence, its guard.

A forward needs a sequence with exactly the cells that its rows see: a *view*, built by tags. Views are kept, since the
next token of an answer sees the same cells and one more. Cells that are read at another distance are copied and shifted
first.

Every row looks at every cell in use, if only to skip it. So cells that were not read for some rows move to host memory
until they are read again; the same when sequences or cells run out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from kvmosaic.llama.library import LlamaContext
from kvmosaic.llama.state import SavedState, SequenceState, gather, joined, pack, parse, relabelled
from kvmosaic.llama.views import (
    UNLIMITED,
    Home,
    MovedCopy,
    PendingTag,
    SequenceView,
    SlotRun,
    Target,
    joined_runs,
    meets,
    overlap,
    spans_of,
)

IDLE_ROWS = 64
"""Rows after which unread cells move to host memory: moving there and back takes as long as being skipped so often."""


class NoRoom(Exception):
    """All sequences, cells, or room for moved copies, belong to views in use."""


class Cells:
    """Cells of all slots: homes, views and moved copies over one memory."""

    def __init__(
        self,
        memory: LlamaContext,
        num_slots: int,
        max_moved: int,
        max_cells: int | None = None,
        max_span: int = UNLIMITED,
    ) -> None:
        """Describes an empty memory.

        Args:
            memory: where the cells are.
            num_slots: slots of all pools, numbered through.
            max_moved: maximum cells of moved copies.
            max_cells: cells of the memory; None: enough for all slots and moved copies.
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
        self._moved: OrderedDict[SlotRun, MovedCopy] = OrderedDict()
        self._num_moved = 0
        self._max_moved = max_moved
        self._max_cells = num_slots + max_moved if max_cells is None else max_cells
        self._num_cells = 0
        """Cells in use, and cells that taken views will write."""
        self._num_shared = 0
        """Slots whose cell another slot has, too."""
        self._num_rows = 0
        """Rows computed so far."""

    @property
    def num_slots(self) -> int:
        """Slots of all pools."""
        return len(self._homes)

    def take(self, runs: Iterable[SlotRun], target: Target | None = None, *, may_copy: bool = False) -> SequenceView:
        """Returns a view with exactly the cells of these runs, for one group of rows, until `put_back` or `drop`.

        Args:
            runs: what the rows see.
            target: where their tokens will be written, at most `max_span`; None: nothing will be.
            may_copy: whether it may have cells of its own, where there is no room for those of all its runs. If no
                other view is taken, there is room for as many as the memory has, less the target's.

        Raises:
            NoRoom: other taken views hold what it needs.
        """
        wanted = self._normal(self._counted(joined_runs(runs)))
        try:
            return self._ready(self._kept(wanted) or self._tagged(wanted), target)
        except NoRoom:
            if not may_copy or not wanted:
                raise
        return self._ready(self._copied(wanted), target)

    def write(self, view: SequenceView, slots: Sequence[int], position: int) -> None:
        """Records that a forward through a taken view has written tokens into slots, from a position on.

        The view then shows them, too.
        """
        home = view.home
        assert home is not None and home.sequence is not None, "it was taken with a target"
        self._owe(view, home, position, position + len(slots))
        for number, slot in enumerate(slots, position):
            assert self._homes[slot] is None, "slots are freed before they are written"
            self._homes[slot], self._positions[slot] = home, number
            home.uses[number] = 1
        view.homes.add(home)
        self._num_cells += len(slots) - view.num_rows  # all of the rows may not have been computed
        view.home, view.num_rows = None, 0
        self._num_rows += len(slots)
        view.runs = self._normal(joined_runs((*view.runs, *(SlotRun(slot, 1) for slot in slots))))

    def _owe(self, view: SequenceView, home: Home, first: int, last: int) -> None:
        """Notes that a home is to have cells of a view: a tag passes over all cells, one for each token is too many."""
        if view.owing is not None and view.owing is not home:
            self._settle(view.owing)
        if home.pending is not None and (home.pending.view is not view or home.pending.last != first):
            self._settle(home)
        if home.pending is not None:
            first = home.pending.first
        home.pending, view.owing = PendingTag(view, first, last), home
        if self.max_span != UNLIMITED:
            self._settle(home)  # llama.cpp takes cells that one sequence sees

    def _settle(self, home: Home) -> None:
        """Tags what a home is to have."""
        if (tag := home.pending) is not None:
            assert home.sequence is not None
            self.memory.tag(tag.view.sequence, home.sequence, tag.first, tag.last)
            home.pending = tag.view.owing = None

    def put_back(self, view: SequenceView) -> None:
        """Ends the use of a view; it is kept for rows that see the same."""
        self._taken.remove(view)
        if (other := self._views.pop(view.runs, None)) is not None:
            self._forget(other)
        self._views[view.runs] = view

    def drop(self, view: SequenceView) -> None:
        """Ends the use of a view, for good."""
        self._taken.remove(view)
        self._forget(view)
        self._num_cells -= view.num_rows
        home, view.home, view.num_rows = view.home, None, 0
        if home is not None and not home.uses:
            assert home.sequence is not None
            del self._stored[home]
            self._free.append(home.sequence)

    def free(self, slots: Iterable[int]) -> None:
        """Frees the cells of slots that are about to be written again, and drops the views that show them."""
        stale = {slot for slot in slots if self._homes[slot] is not None}
        if not stale:
            return
        for runs in [runs for runs in self._views if any(meets(run, stale) for run in runs)]:
            self._forget(self._views.pop(runs))
        for run in [run for run in self._moved if meets(run, stale)]:
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
                self._num_shared += 1

    def read(self, slots: Sequence[int]) -> SequenceState:
        """Copies of the cells of some slots, in order; those in host memory stay there."""
        by_home: dict[Home, list[int]] = {}
        for slot in slots:
            by_home.setdefault(self._home_of(slot), []).append(slot)
        found: dict[tuple[Home, int], tuple[SequenceState, int]] = {}
        for home, own in by_home.items():
            state = parse(home.saved if home.sequence is None else self._saved(own))
            found.update(((home, position), (state, number)) for number, position in enumerate(state.positions))
        return gather([found[self._home_of(slot), self._positions[slot]] for slot in slots])

    def _saved(self, slots: Sequence[int]) -> SavedState:
        """Saved cells of some slots of one home."""
        view = self.take(SlotRun(slot, 1) for slot in {self._positions[slot]: slot for slot in slots}.values())
        try:
            return self.memory.save(view.sequence)
        finally:
            self.drop(view)

    def load(self, slots: Sequence[int], positions: Sequence[int], state: SavedState) -> None:
        """Records saved cells as those of some slots, each at its position; they are written when they are read."""
        self.free(slots)
        order = sorted(range(len(slots)), key=positions.__getitem__)  # as `parse` gives them
        parts = spans_of([positions[number] for number in order], self.max_span)
        parsed = parse(state) if len(parts) > 1 else None
        for part in parts:
            home = Home(None, saved=state if parsed is None else pack(parsed.take(part)))
            for number in (order[index] for index in part):
                self._homes[slots[number]], self._positions[slots[number]] = home, positions[number]
                home.uses[positions[number]] = 1

    def positions_of(self, first: int, num_slots: int) -> list[int]:
        """The positions at which the tokens of consecutive slots were computed."""
        assert self._homes[first] is not None, "rows read written slots"
        return self._positions[first : first + num_slots]

    def _home_of(self, slot: int) -> Home:
        home = self._homes[slot]
        assert home is not None, "rows read written slots"
        return home

    def rest(self, num_rows: int) -> None:
        """Moves to host memory what no taken view shows and was not read for long, before a forward of so many rows."""
        since = self._num_rows + num_rows - IDLE_ROWS
        for runs in self._copied_views():
            if self._views[runs].read_at < since:
                self._forget(self._views.pop(runs))
        for home in self._idle_homes():
            if home.read_at < since:
                self._save_home(home)
        for run, copy in self._idle_copies():
            if copy.read_at < since:
                self._save_copy(run, copy)

    def save_all(self) -> None:
        """Moves all cells to host memory and drops all views, so that the memory may be replaced by an empty one."""
        assert not self._taken
        for run, copy in self._idle_copies():
            self._save_copy(run, copy)
        for home in self._idle_homes():
            self._save_home(home)
        while self._views:
            self._make_room()

    def num_needed(self, runs: Iterable[SlotRun], num_rows: int) -> int:
        """About how many cells are in use once these runs can be read and so many rows are written; rather too many."""
        missing = self._num_cells + num_rows
        saved: set[Home | None] = set()
        for run in set(runs):
            if not run.is_copied:
                saved.update(self._homes[run.first : run.first + run.num_tokens])
            elif (copy := self._moved.get(run)) is None or copy.sequence is None:
                missing += run.num_tokens
        return missing + sum(home.num_cells for home in saved if home is not None and home.sequence is None)

    def replace_memory(self, memory: LlamaContext, max_cells: int) -> None:
        """Goes on with an empty memory of so many cells, after `save_all`."""
        self.memory, self._max_cells = memory, max_cells

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
        copies = [copy for copy in self._moved.values() if copy.sequence is not None]
        used = [*(home.sequence for home in self._stored), *(copy.sequence for copy in copies)]
        guards = [view.guard for view in views if view.guard is not None]
        taken = [*used, *(view.sequence for view in views), *guards, *self._free]
        assert sorted(taken) == list(range(self.memory.num_sequences))  # type: ignore[type-var]
        assert self._num_moved == sum(run.num_tokens for run in self._moved) <= self._max_moved
        assert self._num_shared == sum(count - 1 for home in uses for count in home.uses.values())
        promised = sum(view.num_rows for view in self._taken)
        promised += sum(view.num_copied for view in views)
        in_use = sum(home.num_cells for home in self._stored) + sum(copy.num_cells for copy in copies)
        assert self._num_cells == in_use + promised <= self._max_cells

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
        return len(spans_of([min(home.uses), max(home.uses), *positions], self.max_span)) == 1

    def _normal(self, runs: Iterable[SlotRun]) -> tuple[SlotRun, ...]:
        """Joined runs, of which copied ones are cut by `max_span`."""
        if self.max_span == UNLIMITED:
            return tuple(runs)
        parts: list[SlotRun] = []
        for run in runs:
            slots = range(run.first, run.first + run.num_tokens) if run.is_copied else ()
            spans = spans_of([self._positions[slot] for slot in slots], self.max_span)
            parts.extend(SlotRun(slots[span[0]], len(span), *run[2:]) for span in spans)
            parts.extend(() if spans else (run,))
        return tuple(parts)

    def _counted(self, runs: tuple[SlotRun, ...]) -> tuple[SlotRun, ...]:
        """Runs in which `copy` numbers cells that are seen again at the same position.

        The same document twice, or two that share their beginning, in shared positions: each counts.
        """
        if not self._num_shared and not overlap(runs):
            return runs
        seen: Counter[tuple[Home | None, int, int, int]] = Counter()
        counted: list[SlotRun] = []
        for run in runs:
            for slot in range(run.first, run.first + run.num_tokens):
                place = (self._homes[slot], self._positions[slot], run.distance, run.label)
                counted.append(SlotRun(slot, 1, run.distance, run.label, seen[place]))
                seen[place] += 1
        return joined_runs(counted)

    def _kept(self, wanted: tuple[SlotRun, ...]) -> SequenceView | None:
        """A view that was put back, taken again."""
        view = self._views.pop(wanted, None)
        if view is not None:
            self._taken.append(view)
        return view

    def _tagged(self, wanted: tuple[SlotRun, ...]) -> SequenceView:
        """A view that shares the cells of its runs."""
        view = SequenceView(self._take_sequence(), wanted)
        self._taken.append(view)  # from here on, nothing that it has makes room for others
        try:
            self._move(view, [run for run in wanted if run.is_copied and run not in self._moved])
            for run in wanted:
                self._show(run, view)
        except BaseException:
            self.drop(view)
            raise
        return view

    def _copied(self, wanted: tuple[SlotRun, ...]) -> SequenceView:
        """A view with cells of its own: copies of its runs, gathered one by one.

        They have the order of their slots, so that the order of documents in a prompt changes nothing.
        """
        runs = sorted(wanted)
        state = pack(joined(self._shifted(runs)))
        num_cells = sum(run.num_tokens for run in runs)
        guard = None if self.max_span == UNLIMITED else self._take_sequence()
        try:
            sequence = self._load(state, num_cells)
        except BaseException:
            if guard is not None:
                self._drop_sequence(guard)
            raise
        if guard is not None:
            self.memory.tag(sequence, guard, 0, -1)
        view = SequenceView(sequence, wanted, num_copied=num_cells, guard=guard)
        self._taken.append(view)
        return view

    def _ready(self, view: SequenceView, target: Target | None) -> SequenceView:
        """A taken view through which tokens can be written."""
        try:
            self._touch(view)
            if target is not None:
                self._make_room_for(len(target.positions))
                view.home, view.num_rows = self._home_for(target), len(target.positions)
                self._num_cells += view.num_rows
        except BaseException:
            self.drop(view)
            raise
        return view

    def _touch(self, view: SequenceView) -> None:
        """Makes what a view shows the last to make room for others."""
        view.read_at = self._num_rows
        for home in view.homes:
            self._stored.move_to_end(home)
            home.read_at = self._num_rows
        for run in view.runs:
            if run in self._moved:
                self._moved.move_to_end(run)
                self._moved[run].read_at = self._num_rows

    def _show(self, run: SlotRun, view: SequenceView) -> None:
        """Adds the cells of a run to a view."""
        if run.is_copied:
            self.memory.tag(self._sequence_of_copy(self._moved[run]), view.sequence, 0, -1)
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
            home.sequence = self._load(home.saved, home.num_cells)
            home.saved = b""
            for position in home.freed:
                self.memory.untag(home.sequence, position, position + 1)
            self._num_cells -= len(home.freed)
            home.freed.clear()
        self._settle(home)
        self._stored[home] = None
        self._stored.move_to_end(home)
        return home.sequence

    def _sequence_of_copy(self, copy: MovedCopy) -> int:
        """The sequence of a moved copy, loaded if it was saved."""
        if copy.sequence is None:
            copy.sequence, copy.saved = self._load(copy.saved, copy.num_cells), b""
        return copy.sequence

    def _load(self, state: SavedState, num_cells: int) -> int:
        """Writes saved cells into a sequence of their own."""
        self._make_room_for(num_cells)
        sequence = self._take_sequence()
        try:
            self.memory.load(sequence, state)
        except BaseException:
            self._drop_sequence(sequence)
            raise
        self._num_cells += num_cells
        return sequence

    def _move(self, view: SequenceView, runs: Sequence[SlotRun]) -> None:
        """Copies the cells of runs to where a taken view shows them."""
        for run, state in zip(runs, self._shifted(runs), strict=True):
            while self._num_moved + run.num_tokens > self._max_moved:
                self._drop_moved(self._unused_moved())
            sequence = self._load(pack(state), run.num_tokens)
            self._moved[run] = MovedCopy(run.num_tokens, sequence, read_at=self._num_rows)
            self._num_moved += run.num_tokens

    def _shifted(self, runs: Sequence[SlotRun]) -> list[SequenceState]:
        """Copies of the cells of runs, each moved by its distance and with its label."""
        found = [self.read(range(run.first, run.first + run.num_tokens)) for run in runs]
        moved = [number for number, run in enumerate(runs) if run.distance]
        if moved:
            states = self.memory.shifted([(found[number], runs[number].distance) for number in moved])
            for number, state in zip(moved, states, strict=True):
                found[number] = state
        return [relabelled(state, run.label) if run.label else state for run, state in zip(runs, found, strict=True)]

    def _unused_moved(self) -> SlotRun:
        """The least recently used moved copy that no taken view shows."""
        shown = self._shown_runs()
        for run in self._moved:
            if run not in shown:
                return run
        raise NoRoom

    def _drop_moved(self, run: SlotRun) -> None:
        copy = self._moved.pop(run)
        self._num_moved -= run.num_tokens
        if copy.sequence is not None:
            self._forget_copy(run, copy)

    def _save_copy(self, run: SlotRun, copy: MovedCopy) -> None:
        assert copy.sequence is not None
        copy.saved = self.memory.save(copy.sequence)
        self._forget_copy(run, copy)

    def _forget_copy(self, run: SlotRun, copy: MovedCopy) -> None:
        """Frees the cells of a moved copy."""
        assert copy.sequence is not None
        for runs in [runs for runs in self._views if run in runs]:
            self._forget(self._views.pop(runs))
        self._drop_sequence(copy.sequence)
        copy.sequence = None
        self._num_cells -= copy.num_cells

    def _save_home(self, home: Home) -> None:
        """Moves the cells of a home to host memory."""
        assert home.sequence is not None
        for runs in [runs for runs, view in self._views.items() if home in view.homes]:
            self._forget(self._views.pop(runs))
        home.saved = self.memory.save(home.sequence)
        self._drop_sequence(home.sequence)
        home.sequence = None
        del self._stored[home]
        self._num_cells -= home.num_cells

    def _idle_homes(self) -> list[Home]:
        """Homes with a sequence that no taken view shows or writes to, the least recently used first."""
        held = {home for view in self._taken for home in (*view.homes, view.home)}
        return [home for home in self._stored if home not in held]

    def _idle_copies(self) -> list[tuple[SlotRun, MovedCopy]]:
        """Moved copies with a sequence that no taken view shows, the least recently used first."""
        shown = self._shown_runs()
        return [(run, copy) for run, copy in self._moved.items() if copy.sequence is not None and run not in shown]

    def _copied_views(self) -> list[tuple[SlotRun, ...]]:
        """What kept views with cells of their own show, the least recently used first."""
        return [runs for runs, view in self._views.items() if view.num_copied]

    def _shown_runs(self) -> set[SlotRun]:
        return {run for view in self._taken if not view.num_copied for run in view.runs}

    def _make_room_for(self, num_cells: int) -> None:
        """Drops kept copies, and moves what was not read for longest to host memory, until so many cells are free."""
        if self._num_cells + num_cells <= self._max_cells:
            return
        views, homes, copies = self._copied_views(), self._idle_homes(), self._idle_copies()
        while self._num_cells + num_cells > self._max_cells:
            if views:
                self._forget(self._views.pop(views.pop(0)))
            elif homes and (not copies or homes[0].read_at < copies[0][1].read_at):
                self._save_home(homes.pop(0))
            elif copies:
                self._save_copy(*copies.pop(0))
            else:
                raise NoRoom

    def _take_sequence(self) -> int:
        """A sequence without cells; what was not used for longest makes room: views, then moved copies, then homes."""
        if not self._free:
            self._make_room()
        return self._free.pop()

    def _make_room(self) -> None:
        """Frees a sequence."""
        if self._views:
            self._forget(self._views.popitem(last=False)[1])
        elif copies := self._idle_copies():
            self._save_copy(*copies[0])
        elif homes := self._idle_homes():
            self._save_home(homes[0])
        else:
            raise NoRoom

    def _forget(self, view: SequenceView) -> None:
        if view.owing is not None:
            self._settle(view.owing)
        self._drop_sequence(view.sequence)
        if view.guard is not None:
            self._drop_sequence(view.guard)
        self._num_cells -= view.num_copied

    def _drop_sequence(self, sequence: int) -> None:
        self.memory.untag(sequence)
        self._free.append(sequence)

    def _release(self, slot: int) -> None:
        home, position = self._homes[slot], self._positions[slot]
        assert home is not None
        self._homes[slot] = None
        home.uses[position] -= 1
        if home.uses[position]:
            self._num_shared -= 1
            return
        del home.uses[position]
        if home.sequence is None:
            home.freed.append(position)
            return
        self.memory.untag(home.sequence, position, position + 1)
        self._num_cells -= 1
        if not home.uses:
            self._free.append(home.sequence)
            del self._stored[home]
