"""Request order: sort keys from priority and waiting time, and time slices of running sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from kvmosaic.config import MAX_PRIORITY
from kvmosaic.errors import InvalidPriority

PriorityClass = Literal["low", "normal", "high"]

AGING_SECONDS = 60.0
"""Seconds of waiting that count as one step of priority: people notice minutes, and the gap between a batch job and an
interactive request, ten steps, is ten of them."""

WARM_PRIORITY = -10
"""Of warm-ups: a request of ordinary priority takes their slots and their turn, for ten minutes."""
START_PRIORITY = -20
"""Of those at a server's start, for which no client waits."""


def check_priority(priority: object) -> int:
    """Returns the priority of a request, if it is valid.

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
    """One priority for each of `count` requests: the same for all of them, or one each.

    Raises:
        InvalidPriority: a wrong number of them, or one outside its range.
    """
    if not isinstance(priority, Sequence) or isinstance(priority, str | bytes):
        return [check_priority(priority)] * count
    if len(priority) != count:
        raise InvalidPriority(f"{len(priority)} priorities for {count} prompts; give one, or one each")
    return [check_priority(each) for each in priority]


def sort_key_of(priority: int, arrival_time: float) -> float:
    """The sort key of a request; the smallest runs first.

        effective priority = priority + seconds waited / AGING_SECONDS

    All waiting requests age alike. So their order does not change while they wait, and a constant represents it:

        sort key = arrival_time - AGING_SECONDS * priority

    A request never sorts after one that arrives more than AGING_SECONDS * (difference of their priorities) later. So
    no request starves.
    """
    return arrival_time - AGING_SECONDS * priority


class TimeSlice:
    """Running time of a sequence since it was last allocated.

        allocated ──▶ what it had is recomputed ──▶ it continues ──────────▶ its slice is over
                                                    a time slice, or as long as recomputing took

    So however often it is preempted, at most half of its time is spent on recomputing.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._went_on: float | None = None
        self._num_before = 0

    def begin(self, now: float) -> None:
        """Starts the slice when it is allocated."""
        self._began, self._went_on = now, None

    def end(self, num_done: int) -> None:
        """Ends the slice at a preemption, with `num_done` tokens computed."""
        self._num_before = num_done

    def note(self, num_done: int, now: float) -> None:
        """Records how many tokens are computed."""
        if self._went_on is None and num_done >= self._num_before:
            self._went_on = now

    def is_over(self, now: float, slice_seconds: float) -> bool:
        """Whether it may be preempted for a request that would otherwise starve."""
        if self._went_on is None:
            return False
        return now - self._went_on >= max(slice_seconds, self._went_on - self._began)


def class_of(priority: int) -> PriorityClass:
    """Priority class of a priority, one of three: metrics must not have a label per number."""
    return "low" if priority < 0 else "high" if priority > 0 else "normal"
