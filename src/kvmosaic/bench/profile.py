"""Step profile of decoding: time in linear layers, attention, and everything else."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvmosaic.bench.peers.own import OwnPeer
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt


@dataclass(frozen=True, slots=True)
class StepParts:
    """Medians over decode steps; seconds per step."""

    name: str
    dtype: str
    width: int
    """Answers at once."""
    step: float
    """From token to token, sampling and planning included."""
    linear: float
    """In the model's linear layers."""
    attention: float
    """In the attention modules, their linear layers excluded: rotation, writing keys, reading keys, merging."""


def profile_answers(
    peer: OwnPeer, batches: Mapping[str, Sequence[Prompt]], num_answer: int, rounds: int = 1
) -> list[StepParts]:
    """Answers batches whose documents are cached, with a clock in every module; the clocks take a little time too.

    Several batches alternate, `rounds` times, so that compared times are measured at the same moment.
    """
    model = peer.llm.model
    assert isinstance(model, LoadedModel), "peers of ours run transformers"
    clocks = {name: _ModuleClock(model.module) for name in batches}
    times: dict[str, list[float]] = {name: [] for name in batches}
    for prompts in batches.values():
        for prompt in prompts:
            peer.answer([prompt], 1)
    for _ in range(rounds):
        for name, prompts in batches.items():
            with clocks[name]:
                batch = peer.answer(prompts, num_answer)
            times[name] += [reading.token_seconds for reading in batch.readings if reading.token_seconds is not None]
    return [_parts(peer, name, len(batches[name]), clocks[name].steps, times[name]) for name in batches]


def _parts(peer: OwnPeer, name: str, width: int, steps: Sequence[_Step], times: Sequence[float]) -> StepParts:
    steps = [step for step in steps if step.num_rows == width]
    if not steps or not times:
        return StepParts(name, peer.dtype, width, 0.0, 0.0, 0.0)
    return StepParts(
        name,
        peer.dtype,
        width,
        statistics.median(times),
        statistics.median(step.linear for step in steps),
        statistics.median(step.attention for step in steps),
    )


@dataclass(slots=True)
class _Step:
    num_rows: int
    linear: float = 0.0
    attention: float = 0.0


class _ModuleClock:
    """Timers in the linear layers and attention modules of a transformers model, as a context manager."""

    def __init__(self, module: Any) -> None:
        self.steps: list[_Step] = []
        self._module = module
        self._hooks = ExitStack()
        self._is_in_attention = False
        self._begin: dict[int, float] = {}

    def __enter__(self) -> _ModuleClock:
        before = self._module.register_forward_pre_hook(self._start_step, with_kwargs=True)
        self._hooks.callback(before.remove)
        for module in self._module.modules():
            kind = type(module).__name__
            if "Linear" in kind:
                self._watch(module, self._count_linear)
            elif kind.endswith("Attention"):
                self._watch(module, self._count_attention)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _watch(self, module: Any, count: Callable[[Any, float], None]) -> None:
        is_attention = count == self._count_attention

        def begin(module: Any, arguments: Any) -> None:
            if is_attention:
                self._is_in_attention = True
            self._begin[id(module)] = time.perf_counter()

        def end(module: Any, arguments: Any, output: Any) -> None:
            seconds = time.perf_counter() - self._begin.pop(id(module))
            if is_attention:
                self._is_in_attention = False
            if self.steps:
                count(module, seconds)

        self._hooks.callback(module.register_forward_pre_hook(begin).remove)
        self._hooks.callback(module.register_forward_hook(end).remove)

    def _start_step(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        self.steps.append(_Step(int(named["input_ids"].shape[1])))

    def _count_linear(self, module: Any, seconds: float) -> None:
        self.steps[-1].linear += seconds
        if self._is_in_attention:
            self.steps[-1].attention -= seconds

    def _count_attention(self, module: Any, seconds: float) -> None:
        self.steps[-1].attention += seconds
