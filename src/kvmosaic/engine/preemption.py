"""Preemption: which running sequences give way, and what becomes of what they have computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal

from kvmosaic.cache import Planner
from kvmosaic.cache.yielding import freed_by
from kvmosaic.config import EngineConfig
from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.step import Step
from kvmosaic.engine.swap_space import SwapSpace
from kvmosaic.engine.victims import computes_for_others, in_order, is_resting
from kvmosaic.errors import QuotaInUse

PreemptionKind = Literal["recompute", "swap"]


class Preemption:
    """Chooses who gives way, on two occasions.

    - A running answer needs a block and there is none. Those behind it in rank give way, or it does itself. So whoever
      is first in rank is never taken anything from: it ends, then the next one is first.
    - A request waits whose priority is higher than that of running ones by `preemption_gap`. They give way if that
      makes room for it, if it is before them in rank (they may have waited so long that it is not), and if they are
      not resting from the last time (see `is_resting`).
    """

    def __init__(self, planner: Planner, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.swap: SwapSpace | None = None
        """Where blocks may be moved to; None: their tokens are always computed again."""
        self.counts: dict[PreemptionKind, int] = {"recompute": 0, "swap": 0}
        """Sequences that gave way, by what became of their blocks."""
        self._planner = planner
        self._config = config
        self._clock = clock

    def save(self, sequence: Sequence) -> None:
        """Moves what a sequence has computed to the host, if that is worth it; it holds its blocks until later."""
        assert sequence.attachment is not None
        is_saved = self.swap is not None and not sequence.attachment.is_stale and self.swap.save(sequence)
        self.counts["swap" if is_saved else "recompute"] += 1

    def victim(self, sequence: Sequence, running: Collection[Sequence], step: Step) -> Sequence | None:
        """Who gives a block to a running sequence: one behind it that is not in this step, or itself; None if alone."""
        busy = {id(work.sequence) for work in step.works}
        behind = [
            other
            for other in running
            if other is not sequence and other.rank >= sequence.rank and id(other) not in busy
        ]
        if behind:
            return in_order(behind, self._clock())[0]
        return None if len(running) == 1 else sequence

    def make_way(self, waiting: Sequence, running: Collection[Sequence]) -> list[Sequence]:
        """Who gives way to the first one that waits; nobody, unless that makes room for it."""
        able = [other for other in running if self._goes_before(waiting, other)]
        if not able:
            return []
        prompt = waiting.request.prompt
        error = self._planner.lacks(self._planner.plan(waiting.layout, prompt.salt, prompt.tenant))
        if isinstance(error, QuotaInUse) or (error is not None and error.num_missing is None):
            return []
        if error is None:
            return in_order(able, self._clock())[:1] if len(running) >= self._config.max_running else []
        chosen: list[Sequence] = []
        missing = error.num_missing or 0
        if not self._makes_room(able, running, error.pool, missing):
            return []
        for other in in_order(able, self._clock()):
            chosen.append(other)
            if self._makes_room(chosen, running, error.pool, missing):
                break
        return chosen

    def _goes_before(self, waiting: Sequence, other: Sequence) -> bool:
        """Whether a running sequence may be made to give way to one that waits."""
        gap = self._config.preemption_gap
        if gap is None or waiting.request.priority - other.request.priority < gap or waiting.rank >= other.rank:
            return False
        return not computes_for_others(other) and not is_resting(other)

    def _makes_room(
        self, chosen: Collection[Sequence], running: Collection[Sequence], pool: str, num_missing: int
    ) -> bool:
        """Whether enough blocks are free when these have left and the others have grown by the next token."""
        if pool == self._planner.request_pool.name:
            staying = [other.attachment for other in running if other not in chosen and other.pending is not None]
            num_missing += sum(attached.last.table.blocks_to_append(1) for attached in staying if attached is not None)
        leaving = [other.attachment for other in chosen if other.attachment is not None]
        return freed_by(leaving, self._planner.request_pool)[pool] >= num_missing
