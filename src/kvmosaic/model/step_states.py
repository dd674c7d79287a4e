"""The states of one step: every span continues from its own state, or from the spans that it sees, composed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.attention import SpanRows
from kvmosaic.cache.block_table import SavedState, StateProgress
from kvmosaic.model.states import LayerState, SpanState, StateLayer


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one span."""

    first: int
    num_rows: int
    progress: StateProgress
    sources: tuple[SavedState, ...]
    """The states that they begin from, in prompt order."""


class StepStates:
    """The mixer of a step (see `Mixer`). What it computes is kept when the step has succeeded: see `keep`.

    A span may continue from one that is computed in the same step, so a layer runs them in order. Single tokens of
    several sequences run as one batch.
    """

    def __init__(self, num_layers: int, spans: Sequence[SpanRows]) -> None:
        self.num_calls = 0
        """Layers called so far."""
        self._num_layers = num_layers
        self._levels = _levels(spans)
        made = (state for level in self._levels for rows in level for _, state in rows.progress.saves)
        self._new: dict[SavedState, list[SpanState]] = {
            part: [] for state in made for part in (state, state.rest) if part is not None
        }
        self.saved = [state for state in self._new if not state.is_passing]
        """The states that it computes, and that stay."""
        self._passing = [state for state in self._new if state.is_passing]

    def __call__(self, layer: StateLayer, hidden: Tensor) -> Tensor:
        """One layer's outputs [1, T, H] for its inputs."""
        self.num_calls += 1
        output = torch.empty_like(hidden)
        for level in self._levels:
            single: list[tuple[_Rows, LayerState]] = []
            for rows in level:
                state = composed(layer, [self._of(source, layer) for source in rows.sources])
                if rows.num_rows == 1 and state is not None and not rows.progress.last.has_map:
                    single.append((rows, state))
                else:
                    self._run(layer, hidden, output, rows, state)
            if single:
                self._run_together(layer, hidden, output, single)
        for passing in self._passing:
            self._new[passing][-1] = SpanState(LayerState({}, None))  # its memory is needed no longer
        return output

    def keep(self) -> None:
        """Keeps the new states, once the step has succeeded."""
        for state in self.saved:
            assert len(self._new[state]) == self._num_layers, "every layer has computed every state"
            state.value = self._new[state]

    def _of(self, state: SavedState, layer: StateLayer) -> SpanState:
        new = self._new.get(state)
        kept: SpanState = state.value[layer.number] if new is None else new[layer.number]
        return kept

    def _run(self, layer: StateLayer, hidden: Tensor, output: Tensor, rows: _Rows, state: LayerState | None) -> None:
        first, before = rows.first, rows.progress.before
        for count, saved in rows.progress.saves:
            part = slice(first, rows.first + count)
            if saved.has_map:
                output[:, part], kept = layer.run_with_map(hidden[:, part], state)
                state = composed(layer, [kept] if state is None else [SpanState(state), kept])
                for own, earlier in ((saved, before), (saved.rest, before.rest if before else None)):
                    if own is not None:
                        known = None if earlier is None else self._of(earlier, layer)
                        self._new[own].append(layer.joined(known, kept))
            else:
                output[:, part], state = layer.run(hidden[:, part], None if state is None else state.repeated(1))
                self._new[saved].append(SpanState(state))
            before, first = saved, part.stop

    def _run_together(
        self, layer: StateLayer, hidden: Tensor, output: Tensor, single: Sequence[tuple[_Rows, LayerState]]
    ) -> None:
        """Runs single tokens of several sequences as one batch."""
        numbered = torch.tensor([rows.first for rows, _ in single], device=hidden.device)
        states = LayerState.stacked([state for _, state in single])
        outputs, after = layer.run(hidden[0, numbered][:, None], states)
        output[0, numbered] = outputs[:, 0]
        for index, (rows, _) in enumerate(single):
            self._new[rows.progress.last].append(SpanState(after.at(index)))


def composed(layer: StateLayer, parts: Sequence[SpanState]) -> LayerState | None:
    """The state after spans in prompt order; None without any.

    The memory is mapped by each of them, or is that of the last one that has seen all before it. Tails are those of the
    last span, as it was computed.
    """
    if not parts:
        return None
    memory: Tensor | None = None
    for part in parts:
        if part.gain is None or part.offset is None:
            memory = part.state.memory
        elif memory is None:
            memory = part.offset
        else:
            memory = layer.applied(part.gain, memory) + part.offset
    return LayerState(parts[-1].state.tails, memory)


def _levels(spans: Sequence[SpanRows]) -> list[list[_Rows]]:
    """The rows of a step, in the order in which they can be computed: those of one level do not need each other."""
    made_by: dict[SavedState, int] = {}
    everything: list[_Rows] = []
    first = 0
    for number, span in enumerate(spans):
        assert span.state is not None, "every span of a model with states has one"
        progress, seen = span.state.progress, span.state.seen
        sources = seen if progress.before is None else (*seen, progress.before)
        everything.append(_Rows(first, len(span.token_ids), progress, sources))
        first += len(span.token_ids)
        made_by.update(
            (part, number) for _, state in progress.saves for part in (state, state.rest) if part is not None
        )
    depths: dict[int, int] = {}

    def depth(number: int) -> int:
        if number not in depths:
            makers = [made_by[state] for state in everything[number].sources if state in made_by]
            depths[number] = 1 + max((depth(maker) for maker in makers), default=-1)
        return depths[number]

    levels: list[list[_Rows]] = []
    for number, rows in enumerate(everything):
        while len(levels) <= depth(number):
            levels.append([])
        levels[depth(number)].append(rows)
    return levels
