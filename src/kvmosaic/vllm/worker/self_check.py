"""Self-check of vLLM's modules, which our own check cannot run: moved keys are what each layer computes there.

Where the model as a whole cannot be called, its attention modules are called alone, on rows like those of a norm.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.operations import RepairedRun
from kvmosaic.vllm.worker.extra_forward import ExtraForward, Scope
from kvmosaic.vllm.worker.kv_layout import KVLayout
from kvmosaic.vllm.worker.layouts.ascend import is_ascend
from kvmosaic.vllm.worker.trial.attention import AttentionRecorder
from kvmosaic.vllm.worker.trial.layer_trial import LayerTrial, RecordedCall, outputs
from kvmosaic.vllm.worker.trial.plan import (
    HEAD_TOKENS,
    MAX_CONTEXT,
    NUM_TOKENS,
    TrialPlan,
    far_positions,
    trial_tokens,
)
from kvmosaic.vllm.worker.trial.rotation import (
    cache_trouble,
    clear,
    direct_trouble,
    noise_ratio,
    perturbed,
    unit,
    wide,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartCheck:
    """What was tested at startup, and what was found."""

    tested: str
    trouble: str
    """Why moved chunks would differ from what the model computes; empty: they do not."""


def check_at_start(places: KVLayout, nested: ExtraForward | str, scope: Scope, max_length: int) -> StartCheck:
    """Tests as much of a worker's share of the model as may be called before the first request.

    Args:
        places: the worker's layers.
        nested: the extra forward, or why there is none.
        scope: what may be called.
        max_length: of a prompt.
    """
    reason = nested if isinstance(nested, str) else ""
    if not isinstance(nested, str):
        if scope >= Scope.MODEL:
            return StartCheck("every layer, and the model as a whole", check(places, nested))
        try:
            return StartCheck("the attention of every layer", check_attention(places, nested))
        except Exception as error:  # a module that is called otherwise
            reason = f"{type(error).__name__}: {error}"[:400]
    _log.warning("kvmosaic: only caches and rotary embeddings were tested at startup, not attention: %s", reason)
    return StartCheck("caches and rotary embeddings", check_caches(places, max_length))


@torch.inference_mode()
def check(places: KVLayout, nested: ExtraForward) -> str:
    """Why moved chunks would differ from what the model computes; empty: they do not.

    Runs before any request is served: its blocks are unused, and it zeroes them afterwards. Every worker runs the same
    forwards whatever it finds, so that workers that compute together stay in sync.
    """
    plan = _plan(places, nested)
    if isinstance(plan, str):
        return plan
    try:
        with nested.at_start():
            found = ModelTrial(places, nested, plan).trouble()
        clear(places, plan.blocks)
        return found
    except Exception as error:  # vLLM must start, without composing, whatever its parts raise
        return f"the check at start failed: {type(error).__name__}: {error}"[:400]


@torch.inference_mode()
def check_attention(places: KVLayout, nested: ExtraForward) -> str:
    """The part of the check that calls no more than attention modules, one at a time.

    Raises:
        Exception: whatever such a module raises if it cannot be called alone; nothing is known then.
    """
    plan = _plan(places, nested)
    if isinstance(plan, str):
        return plan
    try:
        with nested.at_start():
            return AttentionTrial(places, nested, plan).trouble()
    finally:
        clear(places, plan.blocks)


def _plan(places: KVLayout, nested: ExtraForward) -> TrialPlan | str:
    length = min([nested.max_length, *(place.rotation.num_positions for place in places.layers if place.rotation)])
    windows = {place.window for place in places.layers if place.window}
    num_tokens = min(NUM_TOKENS, nested.max_tokens, length - 1)
    last = length - min(HEAD_TOKENS, num_tokens) - 1
    if num_tokens < 4 or last < 1:
        return f"prompts of at most {nested.max_length} tokens are too short for the check at start"
    return TrialPlan.of(
        trial_tokens(nested.model_config, num_tokens),
        far_positions(last, windows),
        context=max(MAX_CONTEXT, *windows, 0),
        block_size=places.block_size,
        num_blocks=min(places.num_blocks, nested.num_blocks),
        max_runs=min(nested.max_runs, nested.max_tokens // HEAD_TOKENS),
    )


@torch.inference_mode()
def check_caches(places: KVLayout, max_length: int) -> str:
    """The part of the check without a forward: moves in the caches, and rotary embeddings called directly."""
    lengths = [max_length, *(place.rotation.num_positions for place in places.layers if place.rotation)]
    position = max(0, min(lengths) - places.block_size - 2)
    try:
        if found := cache_trouble(places, min(position, FAR)):
            return found
    except Exception as error:  # vLLM must start, without composing, whatever its parts raise
        return f"the check at start failed: {type(error).__name__}: {error}"[:400]
    return check_rotations(places, max_length)


@torch.inference_mode()
def check_rotations(places: KVLayout, max_length: int) -> str:
    """Calls every rotary embedding directly, near and far."""
    turnings = {place.rotation: place for place in places.layers if place.rotation is not None}
    for rotation, place in turnings.items():
        if is_ascend(place.layer):  # it rotates by angles that its runner looked up before, whatever positions it gets
            continue
        last = min(max_length, rotation.num_positions) - HEAD_TOKENS - 1
        try:
            found = direct_trouble(place, far_positions(last))
        except Exception as error:  # another signature, or not callable outside a forward: unknown
            _log.info("kvmosaic: the rotation of %s was not tried: %s", place.name, error)
            continue
        if found:
            return f"{place.name}: {found}"
    return ""


FAR = 1000
"""Max position to which keys are moved without a forward."""
NOISE = 4.0
"""Max error of the model's hidden states, in multiples of the noise of one rounding before every layer."""


class ModelTrial:
    """Hooks on the model's layers, each of which is checked directly after its call.

    the model's forward over the text       layer 0 ──▶ layer 1 ──▶ … ──▶ hidden states
                                               │           │
    each layer again, with its inputs       └ trial     └ trial
    """

    def __init__(self, places: KVLayout, nested: ExtraForward, plan: TrialPlan) -> None:
        self._places, self._nested, self._plan = places, nested, plan
        self._recorder = AttentionRecorder(places.layers)
        self._trial = LayerTrial(places, nested, plan, self._recorder)
        self._units = units(places)
        self._open: dict[str, RecordedCall] = {}
        """Calls in progress, by the attention layer in them."""
        self._found: dict[str, str] = {}
        self._inputs: list[Tensor] = []
        """Inputs of the layer that was called first."""
        self._is_busy = False

    def trouble(self) -> str:
        """The defect of the first defective layer, or of all layers together."""
        plan = self._plan
        with self._recorder.watching(), self._hooked(self._before, self._after):
            hidden = outputs(self._nested.forward([plan.text_run], compiled=False), len(plan.tokens))
        for place in self._places.layers:
            if found := self._found.get(place.name, f"{place.name}: it was not called with positions, or not at all"):
                return found
        return self._whole(plan.tail_run, hidden, slice(plan.tail, None)) or self._whole(
            RepairedRun(plan.first_blocks, 0, plan.tokens[: plan.head], plan.positions[-1]),
            hidden,
            slice(plan.head),
            self._kept(),
        )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Tensor) -> None:
        names = [name for name in self._units[module] if name not in self._open and name not in self._found]
        if self._is_busy or not names or (call := RecordedCall.of(module, args, kwargs, positions)) is None:
            return
        if not self._inputs:
            self._inputs = call.inputs
        self._open.update(dict.fromkeys(names, call))

    def _after(self, module: nn.Module, output: Any) -> None:
        names = tuple(name for name, call in self._open.items() if call.module is module)
        if self._is_busy or not names:
            return
        call = self._open[names[0]]
        self._is_busy = True
        try:
            found = self._trial.trouble(call, outputs(output, len(call.positions)), names)
        finally:
            self._is_busy = False
        self._nested.resume([self._plan.text_run])
        for name in names:
            del self._open[name]
            self._found[name] = found if found.startswith(name) else ""
        if found and not any(self._found[name] for name in names):
            self._found[names[0]] = found

    @contextmanager
    def _hooked(self, before: Any, after: Any = None) -> Iterator[None]:
        """Calls `before(module, args, kwargs, positions)` and `after(module, output)` around every layer."""
        given: list[Tensor] = []
        root = self._places.root
        hooks = [
            root.register_forward_pre_hook(lambda _, __, named: given.append(named["positions"]), with_kwargs=True)
        ]
        for module in self._units:
            hooks.append(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs: before(module, args, kwargs, given[-1]), with_kwargs=True
                )
            )
            if after is not None:
                hooks.append(module.register_forward_hook(lambda module, _, output: after(module, output)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # The whole model

    def _kept(self) -> torch.dtype | None:
        """The format in eight bits of some cache, where keys are rounded anew at each position; None: there is none."""
        name = self._places.cache_format
        return getattr(torch, name) if name else None

    def _whole(self, run: RepairedRun, hidden: list[Tensor], tokens: slice, kept: torch.dtype | None = None) -> str:
        """Recomputes a part of the text in another forward: compares the first layer's inputs and hidden states.

        Args:
            run: the part.
            hidden: hidden states of the whole text.
            tokens: the part's.
            kept: its noise is that of roundings to this dtype; None: to that of the numbers.
        """
        num_tokens, seen = len(run.token_ids), list[Tensor]()

        def look(module: nn.Module, args: Any, kwargs: Any, positions: Tensor) -> None:
            if not seen and (call := RecordedCall.of(module, args, kwargs, positions)) is not None:
                seen.extend(call.inputs)

        with self._hooked(look):
            found = outputs(self._nested.forward([run], compiled=False), num_tokens)
        with self._hooked(partial(_add_noise, kept=kept)):
            noisy = outputs(self._nested.forward([run], compiled=False), num_tokens)
        where = f"tokens {run.start} to {run.start + num_tokens - 1} at position {run.position}"
        for one, other in zip(seen, self._inputs, strict=False):
            error = (wide(one) - wide(other[tokens])).abs()
            if not error.le(8 * unit(one.dtype) * wide(one).abs().amax(-1, keepdim=True)).all():
                return (
                    f"{where}: the first layer is given something else than for the same tokens in one forward from "
                    "position 0 on: the model does not only see distances"
                )
        far = noise_ratio(found, [each[tokens] for each in hidden], noisy)
        if not far <= NOISE:
            return (
                f"{where}: hidden states are {far:.2g} times as far from those of the same tokens in one forward from "
                "position 0 on as one rounding before every layer explains: the model does not only see distances"
            )
        return ""


def _add_noise(
    module: nn.Module, args: Any, kwargs: Any, positions: Tensor, *, kept: torch.dtype | None = None
) -> tuple[Any, Any]:
    def noisy(each: Any) -> Any:
        is_row = isinstance(each, Tensor) and each.is_floating_point() and each.dim() and len(each) == len(positions)
        return perturbed(each, kept=kept) if is_row else each

    args, kwargs = tree_map(noisy, (args, kwargs))
    return args, kwargs


_POSITIONS = ("positions", "position_ids")
_ROWS = "hidden_states"


class AttentionTrial:
    """Trials of the module around each attention layer: projections, rotation, cache, softmax, output projection.

        rows, as the layer's norm gives them ──▶ attention module ──▶ trial of its call

    No other stage of a pipeline, no expert and no other replica takes part: a worker calls modules of its own only.
    """

    def __init__(self, places: KVLayout, nested: ExtraForward, plan: TrialPlan) -> None:
        """Finds the modules.

        Raises:
            NotMovable: a layer without a module that takes positions and hidden states.
        """
        self._places, self._nested, self._plan = places, nested, plan
        self._recorder = AttentionRecorder(places.layers)
        self._trial = LayerTrial(places, nested, plan, self._recorder)
        around = modules_around(places)
        self._calls = {place.name: _module(place.name, around[place.name]) for place in places.layers}
        self._norms = {name: getattr(modules[0], "input_layernorm", None) for name, modules in around.items()}

    def trouble(self) -> str:
        """The defect of the first defective layer; runs the same forwards whatever it finds."""
        with self._recorder.watching():
            found = [self._of_layer(name, number) for number, name in enumerate(self._calls)]
        return next(filter(None, found), "")

    def _of_layer(self, name: str, number: int) -> str:
        module, positions_name, others = self._calls[name]
        given = self._rows(name, number)
        with self._nested.step([self._plan.text_run], compiled=False) as rows:
            arguments = {**others, positions_name: rows.positions, _ROWS: given}
            call = RecordedCall(module, (), {**arguments, _ROWS: given.clone()}, rows.positions.clone(), 0)
            output = outputs(module(**arguments), len(given))
        return self._trial.trouble(call, output, (name,))

    def _rows(self, name: str, number: int) -> Tensor:
        """[T, hidden size]: the same on every worker."""
        size = int(self._nested.model_config.get_hidden_size())
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(len(self._plan.tokens), size, generator=generator).to(
            self._places.device, self._nested.dtype
        )
        norm = self._norms[name]
        normed = norm(rows) if isinstance(norm, nn.Module) else rows
        return normed if isinstance(normed, Tensor) else rows


def _module(name: str, around: Any) -> tuple[nn.Module, str, dict[str, None]]:
    """The innermost module around a layer that takes positions and hidden states, and its other arguments: none."""
    for module in reversed(around):
        parameters = inspect.signature(module.forward).parameters
        positions = next((each for each in _POSITIONS if each in parameters), None)
        if positions and _ROWS in parameters:
            known = (positions, _ROWS)
            plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            others = [
                key
                for key, each in parameters.items()
                if key not in known and each.kind in plain and each.default is inspect.Parameter.empty
            ]
            return module, positions, dict.fromkeys(others)
    raise NotMovable(f"{name}: no module around it takes positions and hidden states")


def units(places: KVLayout) -> dict[nn.Module, tuple[str, ...]]:
    """The modules around each attention layer, and the names of the attention layers in them."""
    found: dict[nn.Module, list[str]] = {}
    for name, modules in modules_around(places).items():
        for module in modules:
            found.setdefault(module, []).append(name)
    return {module: tuple(inside) for module, inside in found.items()}


def modules_around(places: KVLayout) -> dict[str, Sequence[nn.Module]]:
    """By name of an attention layer: the modules from the model's decoder layer down to its direct parent."""
    modules = dict(places.root.named_modules())
    names = {id(module): name for name, module in modules.items()}
    return {place.name: _around(names.get(id(place.layer), ""), modules) for place in places.layers}


def _around(path: str, modules: dict[str, nn.Module]) -> Sequence[nn.Module]:
    parts = path.split(".")
    above = [modules[".".join(parts[:end])] for end in range(1, len(parts))]
    lists = [number for number, module in enumerate(above) if isinstance(module, nn.ModuleList)]
    return [module for module in above[lists[0] + 1 :] if not isinstance(module, nn.ModuleList)] if lists else []
