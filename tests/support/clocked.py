"""An engine whose clock counts its steps, so that who waits how long does not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvmosaic.config import MAX_PRIORITY
from kvmosaic.engine import Engine, Request, preemption, priorities
from kvmosaic.model import LoadedModel
from kvmosaic.model.runner import Runner
from kvmosaic.prompt import Prompt
from support.engines import GREEDY, build_engine
from support.families import build

NO_AGING = 1e9
"""Seconds of waiting for one step of priority that nothing waits for."""
NO_GAP = 2 * MAX_PRIORITY + 1
"""A difference that no two priorities have."""


@contextmanager
def policy(
    *,
    aging: float = priorities.AGING_SECONDS,
    gap: int = preemption.PREEMPTION_GAP,
    time_slice: float = preemption.TIME_SLICE_SECONDS,
) -> Iterator[None]:
    """The scheduler's policy with other constants, so that a few steps show what it does, or what each is for."""
    with (
        patch.object(priorities, "AGING_SECONDS", aging),
        patch.multiple(preemption, PREEMPTION_GAP=gap, TIME_SLICE_SECONDS=time_slice),
    ):
        yield


class IdleRunner(Runner):
    """A runner that computes nothing: every token is the first of the vocabulary."""

    def run(self, spans: Any) -> torch.Tensor:
        return torch.zeros(sum(rows.num_logits for rows in spans), self.model.vocab_size)


@cache
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float32))


class World:
    """An engine whose clock counts its steps, or goes by what they cost.

    costs: seconds of a step, and beyond that of each of its tokens.
    """

    def __init__(
        self,
        *,
        blocks: int = 256,
        prefix_caching: bool = False,
        costs: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        self.now = 0.0
        self.costs = costs
        world = self

        class TickingRunner(IdleRunner):
            def run(self, spans: Any) -> torch.Tensor:
                seconds, each = costs or (1.0, 0.0)
                world.now += seconds + each * sum(len(rows.token_ids) for rows in spans)
                return super().run(spans)

        names = ("max_running", "max_batched_tokens")
        self.engine: Engine = build_engine(
            model(),
            blocks=(blocks, 64),
            runner=TickingRunner,
            prefix_caching=prefix_caching,
            clock=lambda: self.now,
            **{name: options.pop(name) for name in names if name in options},
            engine_options={"preemption": "recompute", **options},
        )

    def add(self, priority: int = 0, *, prompt: int = 8, tokens: int = 4, tenant: str = "", **params: Any) -> Request:
        sampling = replace(GREEDY, max_tokens=tokens, **params)
        asked = replace(Prompt.plain(range(prompt)), tenant=tenant)
        return self.engine.add_request(asked, sampling, priority=priority)

    def step(self) -> None:
        before = self.now
        self.engine.step()
        self.engine.check_invariants()
        if self.costs is None:
            self.now = before + 1.0

    def run(self, most: int = 2_000) -> None:
        for _ in range(most):
            if not self.engine.has_unfinished_requests:
                return
            self.step()
        pytest.fail("it does not come to an end")
