"""Staging of runs over all workers of an engine; `kvmosaic.engine` stages in one process. No torch, no vLLM."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvmosaic.vllm.operations import FetchReport, RunFetch, StoredRun

MISS_SECONDS = 2.0
"""Time during which a run that no tier had is not fetched again: it is being computed, or the tiers fail."""
MAX_MISSES = 4096


@dataclass(slots=True, eq=False)
class StagedRun:
    """A run being fetched, fetched, or missed."""

    run: StoredRun
    number: int
    num_bytes: int
    began: float
    waiters: set[str] = field(default_factory=set)
    """Requests that will load it, or still have to see that they cannot."""
    told: dict[int, str] = field(default_factory=dict)
    """By rank, the tier that had it; empty: none had it."""
    seconds: float | None = None
    """Time until all ranks had reported."""

    @property
    def is_over(self) -> bool:
        """Whether every rank has reported."""
        return self.seconds is not None

    @property
    def tier(self) -> str:
        """The tier that had it; empty if some rank misses it, so that none can use it."""
        return self.told[min(self.told)] if self.is_over and all(self.told.values()) else ""


class Staging:
    """Fetches runs on all workers, once for all waiting requests, and tracks the memory they take.

        want ──▶ `fetches` ──▶ reported by every rank ──┬─ all have it: `tier`, until no request waits for it
                                                        └─ one misses it: dropped on all ranks at once

    Staged runs take at most `max_bytes` on each worker, or one prompt's runs if these are larger.
    """

    def __init__(self, num_workers: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_workers, self._max_bytes, self._clock = num_workers, max_bytes, clock
        self._runs: dict[bytes, StagedRun] = {}
        self._by_number: dict[int, StagedRun] = {}
        self._of_request: dict[str, list[StagedRun]] = {}
        self._misses: OrderedDict[bytes, float] = OrderedDict()
        self._last_number = 0
        self.num_bytes = 0
        self.fetches: list[RunFetch] = []
        """Fetches to send in the next step."""
        self.drops: list[int] = []
        """Numbers of runs that workers need not hold any longer."""

    def __len__(self) -> int:
        return len(self._runs)

    def want(
        self, request_id: str, runs: Sequence[StoredRun], bytes_per_token: int, token_seconds: float | None = None
    ) -> list[StagedRun | None] | None:
        """Starts to fetch runs for a request, or joins in-flight fetches; None if there is no room for them now.

        A request that waits for room holds nothing meanwhile: partial holds could deadlock.

        Returns:
            The state of each run; None for one that was recently missed everywhere.
        """
        new = self._new(runs)
        if not self._has_room(new, bytes_per_token):
            self.release(request_id)
            new = self._new(runs)
            if not self._has_room(new, bytes_per_token):
                return None
        for run in new:
            self._last_number += 1
            staged = StagedRun(run, self._last_number, run.num_tokens * bytes_per_token, self._clock())
            self._runs[run.key] = self._by_number[staged.number] = staged
            self.num_bytes += staged.num_bytes
            seconds = None if token_seconds is None else token_seconds * run.num_tokens
            self.fetches.append(RunFetch(staged.number, run, seconds))
        found = [self._runs.get(run.key) for run in runs]
        for each in found:
            if each is not None and request_id not in each.waiters:
                each.waiters.add(request_id)
                self._of_request.setdefault(request_id, []).append(each)
        return found

    def on_report(self, report: FetchReport) -> StagedRun | None:
        """Handles a worker's fetch report; returns the run, if this was its last report."""
        staged = self._by_number.get(report.number)
        if staged is None or staged.is_over:
            return None
        staged.told[report.rank] = report.tier
        if len(staged.told) < self._num_workers:
            return None
        staged.seconds = self._clock() - staged.began
        if not staged.tier:
            self._note_miss(staged.run.key)
            self._forget_bytes(staged)
        return staged

    def release(self, request_id: str) -> None:
        """Releases the runs of a request that has loaded them, or is finished; safe for one that waits for nothing."""
        for staged in self._of_request.pop(request_id, ()):
            staged.waiters.discard(request_id)
            if not staged.waiters:
                self._forget_bytes(staged)
                if self._runs.get(staged.run.key) is staged:
                    del self._runs[staged.run.key]

    def stored(self, keys: Iterable[bytes]) -> None:
        """Records that these are now being written to the tiers."""
        for key in keys:
            self._misses.pop(key, None)

    def clear(self) -> None:
        """Drops everything: the weights have changed, and with them all keys."""
        for staged in self._runs.values():
            self._forget_bytes(staged)
        self._runs.clear()
        self._of_request.clear()
        self._misses.clear()
        self.fetches.clear()

    def check_invariants(self) -> None:
        """Checks that bytes match the runs that workers may hold, and that every run has a waiter."""
        assert self.num_bytes == sum(staged.num_bytes for staged in self._by_number.values())
        assert all(staged.waiters for staged in self._runs.values())
        waiters = {request_id for staged in self._runs.values() for request_id in staged.waiters}
        assert waiters == set(self._of_request)

    def _new(self, runs: Sequence[StoredRun]) -> list[StoredRun]:
        self._expire_misses()
        return [run for run in runs if run.key not in self._runs and run.key not in self._misses]

    def _has_room(self, new: Sequence[StoredRun], bytes_per_token: int) -> bool:
        num_bytes = sum(run.num_tokens for run in new) * bytes_per_token
        return not self.num_bytes or not num_bytes or self.num_bytes + num_bytes <= self._max_bytes

    def _forget_bytes(self, staged: StagedRun) -> None:
        if self._by_number.pop(staged.number, None) is None:
            return
        self.num_bytes -= staged.num_bytes
        unsent = [fetch for fetch in self.fetches if fetch.number == staged.number]
        if unsent:
            self.fetches.remove(unsent[0])
        else:
            self.drops.append(staged.number)

    def _note_miss(self, key: bytes) -> None:
        self._misses[key] = self._clock()
        self._misses.move_to_end(key)
        if len(self._misses) > MAX_MISSES:
            self._misses.popitem(last=False)

    def _expire_misses(self) -> None:
        """Drops misses that are too old; they are in the order of their times."""
        oldest = self._clock() - MISS_SECONDS
        while self._misses and next(iter(self._misses.values())) < oldest:
            self._misses.popitem(last=False)
