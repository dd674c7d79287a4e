"""Repairer: recomputes runs of tokens in a step, in as few extra forwards as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Protocol

from kvmosaic.integrations.vllm.operations import RepairedRun


class Forward(Protocol):
    """The interface of `ExtraForward` that a repairer uses."""

    max_tokens: int
    max_runs: int

    def forward(self, runs: list[RepairedRun], *, compiled: bool = True) -> None:
        """Computes the runs in one forward."""


class Repairer:
    """Carries out the repairs of a step, of several requests at once."""

    def __init__(self, nested: Forward) -> None:
        self._nested = nested

    def run(self, repairs: Iterable[RepairedRun], *, compiled: bool = True) -> int:
        """Computes all runs; call it before the step's forward, and before its shifts are on.

        Returns:
            The number of forwards.
        """
        num_forwards = 0
        for runs in forwards(repairs, self._nested.max_tokens, self._nested.max_runs):
            self._nested.forward(runs, compiled=compiled)
            num_forwards += 1
        return num_forwards


def forwards(repairs: Iterable[RepairedRun], max_tokens: int, max_runs: int) -> Iterator[list[RepairedRun]]:
    """Splits the runs into batches of one forward each, such that no forward reads what a later one computes.

        max_tokens = 6:   runs of 4, 1 and 5 tokens   ->   │ 4 1 1 │ 4 │

    A token sees only tokens of lower index, in blocks of its own request or in blocks that another request shares at
    the same index. So runs are sorted by their start, and a run that does not fit is split.
    """
    runs: list[RepairedRun] = []
    room = max_tokens
    for repair in sorted(repairs, key=lambda repair: repair.start):
        rest = repair
        while rest.token_ids:
            if not room or len(runs) == max_runs:
                yield runs
                runs, room = [], max_tokens
            runs.append(replace(rest, token_ids=rest.token_ids[:room]))
            taken = len(runs[-1].token_ids)
            room -= taken
            rest = replace(
                rest, start=rest.start + taken, position=rest.position + taken, token_ids=rest.token_ids[taken:]
            )
    if runs:
        yield runs
