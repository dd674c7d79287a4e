"""Turns: whose request comes first, by priority and by how long it waits, and how long it may run before others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvmosaic.errors import InvalidPriority

MAX_PRIORITY = 100
"""Of a request, up and down."""
PriorityClass = Literal["low", "normal", "high"]
PRIORITY_CLASSES: tuple[PriorityClass, ...] = ("low", "normal", "high")


def check_priority(priority: object) -> int:
    """The priority of a request itself, if it may have it.

    Raises:
        InvalidPriority: not a whole number between -100 and 100.
    """
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise InvalidPriority(
            f"the priority of a request is a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY} (0 by default, higher "
            f"runs first), got {priority!r:.80}"
        )
    return priority


def priorities_for(priority: int | Sequence[int], count: int) -> list[int]:
    """One priority for each of so many requests: the same for all of them, or one each.

    Raises:
        InvalidPriority: another number of them, or one outside its range.
    """
    if not isinstance(priority, Sequence) or isinstance(priority, str | bytes):
        return [check_priority(priority)] * count
    if len(priority) != count:
        raise InvalidPriority(f"{len(priority)} priorities for {count} prompts; give one, or one each")
    return [check_priority(each) for each in priority]


def sort_key_of(priority: int, arrival_time: float, aging_seconds: float | None) -> float:
    """The place of a request in the line; the smallest comes first.

        effective priority = priority + seconds waited / aging_seconds

    All that wait age alike. So their order does not change while they wait, and this number, which does not change
    either, stands for it:

        turn = arrival_time - aging_seconds * priority

    A request never stands behind one that comes more than aging_seconds * (difference of their priorities) later.
    Without aging (None) the turn is the priority alone, and whoever has a low one may wait for ever.
    """
    if aging_seconds is None:
        return float(-priority)
    return arrival_time - aging_seconds * priority


class TimeSlice:
    """How long a sequence has run since it was last taken in.

        taken in ──▶ what it had is computed again ──▶ it goes on ──────────▶ its turn is over
                                                       a time slice, or as long as it took to come to here

    So however often it gives way, no more than half of its time is spent on what it had before.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._went_on: float | None = None
        self._num_before = 0

    def begin(self, now: float) -> None:
        """Notes that it is taken in."""
        self._began, self._went_on = now, None

    def end(self, num_done: int) -> None:
        """Notes that it gives way, with so many tokens done."""
        self._num_before = num_done

    def note(self, num_done: int, now: float) -> None:
        """Notes how many tokens are done."""
        if self._went_on is None and num_done >= self._num_before:
            self._went_on = now

    def is_over(self, now: float, slice_seconds: float) -> bool:
        """Whether it may be made to give way to whoever would wait for ever otherwise."""
        if self._went_on is None:
            return False
        return now - self._went_on >= max(slice_seconds, self._went_on - self._began)


def class_of(priority: int) -> PriorityClass:
    """In which of three classes a priority is counted: metrics must not have a label per number."""
    return "low" if priority < 0 else "high" if priority > 0 else "normal"
