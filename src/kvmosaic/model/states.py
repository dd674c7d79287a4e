"""Layers with a state: recurrent and convolutional layers, and what a run of tokens does to their state.

Such a layer keeps the last inputs of its convolution, the *tail*, and a *memory* that is linear in what it was before:
a run of tokens maps memory S to

    M S + N        gated delta rule: M is a matrix per head; Mamba: a number per channel; Mamba 2: a number per head

So a document that was computed apart is cached as M, N and its tail. The memory of a prompt is that of the system
text, mapped by every document in order; its tail is that of the last one.

M comes from the layer's own code: the run is computed a second time, in the same call, from a memory that is larger by
a multiple of the identity, and the difference is M. How M acts is found at load with a random memory, and where
nothing fits, the model is refused.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvmosaic.errors import WAY_OUT, UnsupportedModel

_CACHE_ARGUMENTS = ("cache_params", "past_key_values")
_ASKS = re.compile(r"\.(get_(conv_state|recurrent_state|linear_cache)\(|(conv|recurrent)_states\[)")
"""How the code of a layer asks a cache of transformers for its state."""

MapKind = Literal["numbers", "left", "right"]
"""How M acts on a memory [..., K, V]: number by number, as a matrix from the left, or from the right."""
_KINDS: tuple[MapKind, ...] = ("numbers", "left", "right")
"""The one that keeps least first."""

_SCALE = 1024.0
"""Multiple of the identity that is added to a memory, relative to its largest number: rounding is divided by it."""
_TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FINE_TOLERANCE = 1e-4
"""Relative differences, at load, that rounding explains. Layers compute in float32 what is given in float64."""
_SAME = {torch.float32: 2e-6, torch.float64: 1e-12}
_COARSE_SAME = 1e-2
"""The same for the numbers of one gain."""
_ROUNDING = 1e-6
"""A relative difference that says nothing about one way or another."""
_TRIED_TOKENS = 4
_SHOWN = 1e-2
"""The largest number of an M that shows along which dimensions it is constant."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer after some token, B of them stacked.

    tails: [B, channels, width], by number: the last inputs of each convolution
    memory: [B, …], or None: the layer has none
    """

    tails: Mapping[int, Tensor]
    memory: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of its tensors."""
        return sum(part.nbytes for part in (*self.tails.values(), self.memory) if part is not None)

    def at(self, index: int) -> LayerState:
        """One of the stacked states, in memory of its own."""
        part = slice(index, index + 1)
        memory = None if self.memory is None else self.memory[part].clone()
        return LayerState({number: tail[part].clone() for number, tail in self.tails.items()}, memory)

    def repeated(self, count: int) -> LayerState:
        """The only state, `count` times, in memory of its own: a layer may write into it."""
        memory = None if self.memory is None else self.memory.repeat(count, *[1] * (self.memory.dim() - 1))
        return LayerState({number: tail.repeat(count, 1, 1) for number, tail in self.tails.items()}, memory)

    @staticmethod
    def stacked(states: Sequence[LayerState]) -> LayerState:
        """Several states, stacked."""
        memories = [state.memory for state in states if state.memory is not None]
        tails = {number: torch.cat([state.tails[number] for state in states]) for number in states[0].tails}
        return LayerState(tails, torch.cat(memories) if memories else None)


@dataclass(frozen=True, slots=True)
class SpanState:
    """What one layer keeps of the computed tokens of a span."""

    state: LayerState
    """After the last of them, as they were computed; without the memory if M and N are kept."""
    gain: Tensor | None = None
    """M; None: all that is before the span is in its state, or the layer has no memory."""
    offset: Tensor | None = None
    """N."""

    def tensors(self) -> list[Tensor]:
        """Tails, memory, M and N, without what is missing."""
        tails, others = self.state.tails, (self.state.memory, self.gain, self.offset)
        return [*(tails[number] for number in sorted(tails)), *(part for part in others if part is not None)]

    def to(self, device: torch.device) -> SpanState:
        """The same on another device."""
        tails = {number: tail.to(device) for number, tail in self.state.tails.items()}
        memory, gain, offset = (
            None if part is None else part.to(device) for part in (self.state.memory, self.gain, self.offset)
        )
        return SpanState(LayerState(tails, memory), gain, offset)


class _LayerCache:
    """The cache of one layer, as the code of transformers' layers asks for it."""

    def __init__(self, state: LayerState | None) -> None:
        self.tails: dict[int, Tensor] = {} if state is None else dict(state.tails)
        self.memories: dict[int, Tensor] = {} if state is None or state.memory is None else {0: state.memory}

    # transformers up to 5.2x: cache.layers[index].conv_states[0]
    record_past = False

    @property
    def layers(self) -> Mapping[int, _LayerCache]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> dict[int, Tensor]:
        return self.tails

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        return self.memories

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        return self.tails.get(state_idx)

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        return self.memories.get(state_idx)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int = 0, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Appends inputs [B, channels, T] to the tail; returns both."""
        width = conv_kernel_size or conv_states.shape[-1]
        before = self.tails.get(state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], max(width - conv_states.shape[-1], 0))
        inputs = torch.cat([before, conv_states], dim=-1)
        self.tails[state_idx] = inputs[..., -width:].clone()
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.memories[state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        return state_idx in self.tails or state_idx in self.memories

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return False

    def get_linear_cache(self, layer_idx: int = 0) -> Tensor | None:
        return self.memories.get(0)

    def set_linear_cache(self, layer_idx: int, memory: Tensor) -> None:
        self.memories[0] = memory


@dataclass(eq=False, slots=True)
class StateLayer:
    """One layer with a state, and how its memory changes; see `install_states`."""

    number: int
    """Number among the model's layers with a state."""
    index: int
    """Number among all layers of the model."""
    module: nn.Module
    forward: Callable[..., Any]
    """The module's own."""
    cache_argument: str
    required: tuple[str, ...]
    """Names of further arguments without a default."""
    kind: MapKind | None = None
    """None: it has no memory."""
    constant: tuple[int, ...] = ()
    """Dimensions along which M is the same number."""
    returns: int = 0
    """Length of the tuple that its code returns; 0: the output alone."""
    one_by_one: bool = False
    """Whether it continues from a memory with single tokens only."""
    empty: LayerState | None = field(default=None, repr=False)
    """The state before any token: tails of zeros, and no memory."""
    memory_shape: tuple[int, ...] = ()
    """Of one memory, without the stacking dimension."""
    memory_dtype: torch.dtype = torch.float32
    num_bytes: int = field(default=0, repr=False)
    """Of one state."""
    map_bytes: int = field(default=0, repr=False)
    """Of one document: state or offset, and gain."""
    map_shapes: tuple[tuple[str, tuple[int, ...]], ...] = field(default=(), repr=False)
    """Dtype and shape of what is kept of one document: `SpanState.tensors`."""

    def run(self, hidden: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """Continues from a state.

        Args:
            hidden: [B, T, H], inputs of B runs of equal length.
            state: B states, which the layer may write into; None: nothing came before.

        Returns:
            [B, T, H], and the states after the last tokens.
        """
        if self.one_by_one and state is not None and state.memory is not None and hidden.shape[1] > 1:
            outputs = []
            for token in torch.split(hidden, 1, dim=1):
                output, state = self._call(token, state)
                outputs.append(output)
            assert state is not None
            return torch.cat(outputs, dim=1), state
        return self._call(hidden, state)

    def run_with_map(self, hidden: Tensor, state: LayerState | None) -> tuple[Tensor, SpanState]:
        """Continues from a state, and finds what these tokens do to a memory.

        Args:
            hidden: [1, T, H].
            state: where it continues; None: nothing came before.

        Returns:
            [1, T, H], and what is kept of them.
        """
        assert self.empty is not None, "the layer was tried"
        if self.kind is None:
            output, after = self.run(hidden, None if state is None else state.repeated(1))
            return output, SpanState(after)
        state = state or self.empty
        memory = self.zero_memory(hidden.device) if state.memory is None else state.memory
        most = torch.finfo(memory.dtype).max ** 0.5  # float16 ends at 65,504
        scale = (_SCALE * memory.abs().max().clamp_min(1.0)).clamp_max(most)
        steps = self._identity(hidden.device) * scale
        start = LayerState(state.tails, memory).repeated(1 + len(steps))
        assert start.memory is not None
        start.memory[1:] += steps
        outputs, ends = self.run(hidden.expand(1 + len(steps), -1, -1), start)
        after = ends.at(0)
        assert ends.memory is not None and after.memory is not None
        gain = self._assembled((ends.memory[1:] - after.memory) / scale)
        offset = after.memory - self.applied(gain, memory)
        return outputs[:1], SpanState(LayerState(after.tails, None), gain, offset)

    def joined(self, before: SpanState | None, after: SpanState) -> SpanState:
        """What is kept of a run of tokens, of what is kept of its two parts."""
        if before is None or before.gain is None or before.offset is None:
            return after
        assert after.gain is not None and after.offset is not None, "parts of one run"
        offset = self.applied(after.gain, before.offset) + after.offset
        return SpanState(after.state, self.applied(after.gain, before.gain), offset)

    def map_of(self, tensors: Iterator[Tensor]) -> SpanState:
        """What is kept of one document, of the next ones of these tensors."""
        assert self.empty is not None, "the layer was tried"
        tails = {number: next(tensors) for number in sorted(self.empty.tails)}
        gain, offset = (None, None) if self.kind is None else (next(tensors), next(tensors))
        return SpanState(LayerState(tails, None), gain, offset)

    def applied(self, gain: Tensor, memory: Tensor) -> Tensor:
        """M S; or M of two runs, of which the second is given first."""
        if self.kind == "left":
            return gain @ memory
        return memory @ gain if self.kind == "right" else gain * memory

    def zero_memory(self, device: torch.device) -> Tensor:
        """The memory before any token."""
        return torch.zeros(1, *self.memory_shape, dtype=self.memory_dtype, device=device)

    def _call(self, hidden: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        cache = _LayerCache(state)
        named = dict.fromkeys(self.required, None)
        result = self.forward(hidden, **{self.cache_argument: cache}, **named)
        self.returns = len(result) if isinstance(result, tuple) else 0
        output = result[0] if isinstance(result, tuple) else result
        return output, LayerState(cache.tails, cache.memories.get(0))

    def _identity(self, device: torch.device) -> Tensor:
        """[r, *memory]: memories of which the layer's results show M; see `_assembled`."""
        if self.kind == "numbers":
            return torch.ones(1, *self.memory_shape, dtype=self.memory_dtype, device=device)
        rows, columns = self.memory_shape[-2:]
        size, shown = (rows, columns) if self.kind == "left" else (columns, rows)
        unit = torch.eye(size, dtype=self.memory_dtype, device=device)
        parts = [nn.functional.pad(part, (0, shown - part.shape[1])) for part in torch.split(unit, shown, dim=1)]
        stacked = torch.stack(parts if self.kind == "left" else [part.T for part in parts])
        for _ in self.memory_shape[:-2]:
            stacked = stacked.unsqueeze(1)
        return stacked.expand(-1, *self.memory_shape)

    def _assembled(self, changes: Tensor) -> Tensor:
        """M, from what became of `_identity`."""
        if self.kind == "numbers":
            for dimension in self.constant:
                changes = changes.narrow(dimension, 0, 1)
            return changes.clone()
        size = self.memory_shape[-2] if self.kind == "left" else self.memory_shape[-1]
        joined = torch.cat(list(torch.split(changes, 1)), dim=-1 if self.kind == "left" else -2)
        return joined[..., :size].clone() if self.kind == "left" else joined[..., :size, :].clone()


Mixer = Callable[[StateLayer, Tensor], Tensor]
"""Runs a layer over the rows of a flattened forward: [1, T, H] to [1, T, H]."""

_current: ContextVar[Mixer | None] = ContextVar("kvmosaic_mixer", default=None)


@contextmanager
def mixing_scope(mixer: Mixer | None) -> Iterator[None]:
    """Sends every layer with a state inside the `with` block to a mixer; None: the layers' own code."""
    token = _current.set(mixer)
    try:
        yield
    finally:
        _current.reset(token)


def row_by_row(layer: StateLayer, hidden: Tensor) -> Tensor:
    """A mixer to which every row is a text of one token."""
    return layer.run(hidden.transpose(0, 1), None)[0].transpose(0, 1)


def state_modules(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules with a state that can be called with a cache of ours, and the name of that argument."""
    for part in module.modules():
        if argument := _cache_argument(type(part).forward):
            yield part, argument


def install_states(module: nn.Module, hidden_size: int, like: Tensor) -> tuple[StateLayer, ...]:
    """Finds the layers with a state, tries them, and sends their calls to the mixer in scope; none is fine.

    Args:
        module: the model.
        hidden_size: H, width of the layers' inputs.
        like: a tensor of their dtype and device.

    Raises:
        UnsupportedModel: a layer does not keep its state where we look, does not continue from it, or its memory is no
            linear map of what it was before.
    """
    layers, generator = hook_states(module), torch.Generator().manual_seed(0)
    with torch.inference_mode():
        inputs = torch.randn(1, 9, hidden_size, generator=generator).to(like)
        for layer in layers:
            _try(layer, inputs)
        for kind in {type(layer.module) for layer in layers}:
            if same := [layer for layer in layers if type(layer.module) is kind and layer.memory_shape]:
                _find_maps(same, inputs)
    return layers


def hook_states(module: nn.Module) -> tuple[StateLayer, ...]:
    """Sends the calls of the layers with a state to the mixer in scope, without trying them."""
    layers = []
    for number, (part, argument) in enumerate(state_modules(module)):
        part.__dict__.pop("forward", None)
        layer = _layer_of(number, part, argument)
        part.__dict__["forward"] = _hooked(layer)
        layers.append(layer)
    return tuple(layers)


@cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    """The argument of a module's forward that it asks for a state; empty if it does not."""
    names = inspect.signature(forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in names), "")
    try:
        return argument if argument and _ASKS.search(inspect.getsource(forward)) else ""
    except (OSError, TypeError):  # no source
        return ""


def _layer_of(number: int, part: nn.Module, argument: str) -> StateLayer:
    parameters = list(inspect.signature(part.forward).parameters.values())[1:]
    required = tuple(
        each.name
        for each in parameters
        if each.default is each.empty and each.name != argument and each.kind is each.POSITIONAL_OR_KEYWORD
    )
    return StateLayer(number, int(part.layer_idx), part, part.forward, argument, required)  # type: ignore[arg-type]


def _hooked(layer: StateLayer) -> Callable[..., Any]:
    """The module's forward while a mixer is in scope; its own code otherwise."""

    def forward(*arguments: Any, **named: Any) -> Any:
        mixer = _current.get()
        if mixer is None:
            return layer.forward(*arguments, **named)
        output = mixer(layer, arguments[0] if arguments else named["hidden_states"])
        return (output, *[None] * (layer.returns - 1)) if layer.returns else output

    return forward


def _try(layer: StateLayer, inputs: Tensor) -> None:
    """Finds the shapes of a layer's state, and how it continues from it."""
    name = f"{type(layer.module).__name__} (layer {layer.index})"
    whole, end = layer.run(inputs, None)
    if whole.shape != inputs.shape:
        raise UnsupportedModel(
            f"{name} returns {tuple(whole.shape)} numbers, instead of one output per token; {WAY_OUT}"
        )
    if not end.tails and end.memory is None:
        raise UnsupportedModel(
            f"{name} carries a state from token to token, and keeps it elsewhere than in a cache of transformers, "
            f"where it cannot be reached; {WAY_OUT}"
        )
    layer.empty = LayerState({number: torch.zeros_like(tail) for number, tail in end.tails.items()}, None)
    if end.memory is not None:
        layer.memory_shape, layer.memory_dtype = tuple(end.memory.shape[1:]), end.memory.dtype
    _, middle = layer.run(inputs[:, :4], None)
    if not _continues(layer, inputs, whole, middle):
        layer.one_by_one = True
        if end.memory is None or not _continues(layer, inputs, whole, middle):
            raise UnsupportedModel(f"{name} gives other results when it continues from its own state; {WAY_OUT}")
    layer.num_bytes = end.num_bytes
    _know_map(layer, SpanState(end))


def _find_maps(layers: Sequence[StateLayer], inputs: Tensor) -> None:
    """Finds how tokens change the memory of layers of one class.

    A layer that forgets nearly everything at a token does not show how: so several tokens are tried, one by one, in all
    layers, and the way has to be right everywhere.

    Args:
        layers: layers with a memory.
        inputs: [1, T, H].
    """
    errors: dict[MapKind, float] = {}
    for kind in _KINDS if all(len(layer.memory_shape) > 1 for layer in layers) else _KINDS[:1]:
        for layer in layers:
            layer.kind = kind
            errors[kind] = max(errors.get(kind, 0.0), *(error for error, _ in _tried(layer, inputs)))
    nearest = min(errors.values())
    kind = next(kind for kind in errors if errors[kind] <= max(8 * nearest, _ROUNDING))
    dtype = layers[0].memory_dtype
    if errors[kind] > _tolerance(dtype):
        raise UnsupportedModel(
            f"the memory of {type(layers[0].module).__name__} is not a linear map of what it was before, head by head, "
            f"so documents that are computed apart cannot be composed; {WAY_OUT}"
        )
    for layer in layers:
        layer.kind = kind
    if kind == "numbers":
        tried = (kept.gain for layer in layers for _, kept in _tried(layer, inputs))
        gains = [gain for gain in tried if gain is not None and bool(gain.abs().max() > _SHOWN)]
        within = range(2, len(layers[0].memory_shape) + 1) if gains else ()  # not from head to head
        for layer in layers:
            layer.constant = tuple(
                each for each in within if all(_is_same(gain.narrow(each, 0, 1), gain) for gain in gains)
            )
    for layer in layers:
        _, found = next(_tried(layer, inputs))
        _know_map(layer, found)


def _know_map(layer: StateLayer, kept: SpanState) -> None:
    tensors = kept.tensors()
    layer.map_bytes = sum(tensor.nbytes for tensor in tensors)
    layer.map_shapes = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)


def _tried(layer: StateLayer, inputs: Tensor) -> Iterator[tuple[float, SpanState]]:
    """For some tokens: how far a memory is from what M and N say, and what is kept of them."""
    empty = layer.zero_memory(inputs.device)
    numbers = torch.randn(empty.shape, generator=torch.Generator().manual_seed(layer.number))
    memory = _SCALE * numbers.to(empty)  # so large that M shows beside N
    for token in torch.split(inputs, 1, dim=1)[:_TRIED_TOKENS]:
        assert layer.empty is not None
        wanted = layer.run(token, LayerState(layer.empty.tails, memory).repeated(1))[1].memory
        _, found = layer.run_with_map(token, LayerState(layer.empty.tails, empty))
        assert wanted is not None and found.gain is not None and found.offset is not None
        yield _apart(layer.applied(found.gain, memory) + found.offset, wanted), found


def _continues(layer: StateLayer, inputs: Tensor, whole: Tensor, middle: LayerState) -> bool:
    """Whether the rest of a text, from the state in its middle on, gives what the whole text gives there."""
    rest, _ = layer.run(inputs[:, 4:], middle.repeated(1))
    kept = inputs.dtype if middle.memory is None else middle.memory.dtype
    return _apart(rest, whole[:, 4:]) <= _tolerance(inputs.dtype, kept)


def _is_same(x: Tensor, wanted: Tensor) -> bool:
    """Whether all numbers are the same, but for rounding."""
    return bool((x - wanted).abs().max() <= _SAME.get(x.dtype, _COARSE_SAME) * wanted.abs().max())


def _tolerance(*dtypes: torch.dtype) -> float:
    """What rounding to the coarsest of these dtypes explains."""
    return max(_TOLERANCES.get(dtype, _FINE_TOLERANCE) for dtype in dtypes)


def _apart(x: Tensor, wanted: Tensor) -> float:
    """Difference of two tensors, relative to the second."""
    size = float(wanted.double().square().mean().sqrt())
    return float((x.double() - wanted.double()).square().mean().sqrt()) / max(size, 1e-30)
