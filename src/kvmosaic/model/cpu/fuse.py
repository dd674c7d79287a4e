"""Fusion of a loaded model's small operations: for every module of one recorded forward, both forms are compared.

Candidates are compared with their module on the arguments of a recorded call, with hidden states of four very different
magnitudes. A module with parts, hooks or weights that a fused form does not support is skipped, and so is one whose
results differ.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import NativeUnavailable
from kvmosaic.layers import AttentionCall
from kvmosaic.layers.spec import LATENT_ATTRIBUTE
from kvmosaic.model.cpu.fused import (
    LAYER_FORMS,
    CallConstants,
    Fused,
    FusedAttention,
    FusedLayer,
    FusedMlp,
    FusedNorm,
    RowKernels,
    TurnPlan,
    fused_form,
)
from kvmosaic.model.cpu.prepack import PackedLinear
from kvmosaic.model.hook import attention_scope

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_NORM_FORMS = (0, 1, 2, 3)
"""Sums of: 1, one is added to the weight; 2, the weight is multiplied before rounding."""
_NUM_ACTIVATIONS = 2
_SIZES = (0.02, 1.0, 20.0, 500.0)
"""Magnitudes of the hidden states: clamps and small constants show at one of them."""
_NUM_ROWS = 12

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""


def agrees(got: Tensor, expected: Tensor) -> bool:
    """Whether two results in bfloat16 differ by rare roundings at most. Rows may be of any size."""
    if got.shape != expected.shape or got.dtype is not expected.dtype:
        return False
    exact = (got == expected).float().mean()
    difference = (got.double() - expected.double()).abs().amax(-1)
    return bool(exact >= 0.9) and bool((difference <= 2e-2 * expected.double().abs().amax(-1)).all())


def norm_form(module: nn.Module, arguments: Arguments, kernels: RowKernels) -> Fused | None:
    """Root mean square norm with a weight, in one of four roundings."""
    weight = module._parameters.get("weight")
    epsilon = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if module._modules or module._buffers or len(module._parameters) != 1 or weight is None or epsilon is None:
        return None
    if weight.dim() != 1 or not _is_narrow(weight) or len(arguments[0]) != 1 or arguments[1]:
        return None
    x = arguments[0][0]
    if not isinstance(x, Tensor) or x.shape[-1] != weight.numel():
        return None
    # the forms differ by the effect of the weight, and many models' weights are all ones
    twin = copy.deepcopy(module)
    twin.weight = nn.Parameter(torch.randn(weight.shape, generator=_seeded()).to(weight.dtype), requires_grad=False)
    rows = _rows(weight.numel())
    expected = _run(twin, (rows,), {})
    for form in _NORM_FORMS:
        if isinstance(expected, Tensor) and agrees(FusedNorm(twin, kernels, form, epsilon).forward(rows), expected):
            return FusedNorm(module, kernels, form, epsilon)
    return None


def mlp_form(module: nn.Module, arguments: Arguments, kernels: RowKernels) -> Fused | None:
    """An MLP with a gate, in one of two activations."""
    parts = module._modules
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"} or module._parameters or module._buffers:
        return None
    hidden = _linear_width(parts["gate_proj"])
    if hidden is None or _linear_width(parts["up_proj"]) != hidden or _linear_width(parts["down_proj"]) is None:
        return None
    activation = parts["act_fn"]
    if activation is None or not is_untouched(activation) or list(activation.parameters()):
        return None
    if len(arguments[0]) != 1 or arguments[1]:
        return None
    rows = _rows(hidden)
    expected = _run(module, (rows,), {})
    for number in range(_NUM_ACTIVATIONS):
        form = FusedMlp(module, kernels, number)
        if isinstance(expected, Tensor) and agrees(form.forward(rows), expected):
            return form
    return None


def attention_form(module: nn.Module, arguments: Arguments, kernels: RowKernels) -> Fused | None:
    """An attention module with plain projections, optional norms of queries and keys, and any usual rotation."""
    parts = {name: part for name, part in module._modules.items() if part is not None}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    extra = parts.keys() - projections
    if not projections <= parts.keys() or extra not in (set(), {"q_norm", "k_norm"}) or module._buffers:
        return None
    hidden = _linear_width(parts["q_proj"])
    if hidden is None or any(_linear_width(parts[name]) is None for name in projections):
        return None
    if any(not isinstance(fused_form(parts[name]), FusedNorm) for name in extra):
        return None
    arguments = _with_hidden(arguments, hidden)
    if (expected := _attend(module, arguments)) is None:
        return None
    call = expected[0]
    if [call.query[0].numel(), call.key[0].numel()] != [parts[name].out_features for name in ("q_proj", "k_proj")]:
        return None  # such as a gate beside the queries
    sinks = next((name for name, part in module._parameters.items() if part is call.sinks and part is not None), None)
    if (call.sinks is not None and sinks is None) or len(module._parameters) > (sinks is not None):
        return None
    constants = CallConstants(call.scaling, call.softcap, call.window, sinks)
    shape = (call.query.shape[1], call.key.shape[1], call.query.shape[2])
    tables = arguments[1].get("position_embeddings")
    for turn in _turns(shape, tables, kernels):
        form = FusedAttention(module, kernels, shape, turn, constants)
        x = arguments[0][0] if arguments[0] else arguments[1]["hidden_states"]
        if not _same(form.project(x, tables), (call.query, call.key, call.value)):
            continue
        return form if (got := _attend(form, arguments)) is not None and _same_call(got, expected) else None
    return None


def layer_form(module: nn.Module, arguments: Arguments, kernels: RowKernels) -> Fused | None:
    """A decoder layer with fused norms before its parts and, optionally, after them."""
    parts = {name: part for name, part in module._modules.items() if part is not None}
    if module._parameters or module._buffers:
        return None
    for names in LAYER_FORMS:
        if parts.keys() != names.names | {"self_attn", "mlp"}:
            continue
        norm = fused_form(parts[names.before_mlp])
        if not isinstance(norm, FusedNorm) or len(arguments[0]) != 1 or not isinstance(arguments[0][0], Tensor):
            return None
        arguments = _with_hidden(arguments, norm.width)
        form = FusedLayer(module, names)
        with attention_scope(own_value):
            expected, got = _run(module, *arguments), _run(form.forward, *arguments)
        is_same = isinstance(expected, Tensor) and isinstance(got, Tensor) and agrees(got, expected)
        return form if is_same else None
    return None


def _turns(shape: tuple[int, int, int], tables: Any, kernels: RowKernels) -> Iterator[TurnPlan | None]:
    """Candidate rotations of an attention module: none, or one with tables of this shape."""
    num_heads, num_kv_heads, head_dim = shape
    if isinstance(tables, tuple) and len(tables) == 2 and all(_is_plain_table(table) for table in tables):
        width = tables[0].shape[-1]
        halves, neighbours = (0, width, width // 2, 1), (1, width, 1, 2)
        layouts = (halves, neighbours, (1, width, 0, 1), (0, 2 * width, 0, 1), (1, 2 * width, 0, 1))
        for (pairs, dims, second, step), wide, sign in product(layouts, (0, 1), (1.0, -1.0)):
            if dims <= head_dim and dims % 2 == 0:
                rows = num_heads * head_dim, num_kv_heads * head_dim
                turned = (head_dim, dims, pairs, width, second, step, wide, sign)
                yield TurnPlan(num_heads, num_kv_heads, *rows, *turned, kernels.parallel)
    yield None


def _is_plain_table(table: Any) -> bool:
    return isinstance(table, Tensor) and table.dtype is torch.bfloat16 and table.dim() == 3 and table.shape[0] == 1


def _attend(module: Any, arguments: Arguments) -> tuple[AttentionCall, Tensor] | None:
    """One call of an attention module (or its fused form): its call to the receiver, and its result."""
    calls: list[AttentionCall] = []

    def receive(call: AttentionCall) -> Tensor:
        calls.append(call)
        return own_value(call)

    run = module.forward if isinstance(module, Fused) else module
    with attention_scope(receive):
        result = _run(run, *arguments)
    if len(calls) != 1 or not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
        return None
    return None if result[1] is not None else (calls[0], result[0])


def _same_call(got: tuple[AttentionCall, Tensor], expected: tuple[AttentionCall, Tensor]) -> bool:
    mine, theirs = got[0], expected[0]
    constants = [(call.layer_index, call.scaling, call.softcap, call.window) for call in (mine, theirs)]
    return (
        constants[0] == constants[1]
        and mine.sinks is theirs.sinks
        and mine.mask is theirs.mask
        and mine.module is theirs.module
        and _same((mine.query, mine.key, mine.value, got[1]), (theirs.query, theirs.key, theirs.value, expected[1]))
    )


def _same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(agrees(mine, theirs) for mine, theirs in zip(got, expected, strict=True))


def own_value(call: AttentionCall) -> Tensor:
    """Attention of each token to itself alone."""
    return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """A module's result, or None: a candidate that raises does not fit."""
    try:
        return function(*arguments, **named)
    except Exception:  # whatever the model's code raises, the answer is the same
        return None


def _with_hidden(arguments: Arguments, width: int) -> Arguments:
    """The arguments of a call with other hidden states, [1, T, width]."""
    (positional, named) = arguments
    if positional:
        return (_rows(width, positional[0].shape[1]), *positional[1:]), named
    return (), named | {"hidden_states": _rows(width, named["hidden_states"].shape[1])}


def _rows(width: int, num_rows: int = _NUM_ROWS) -> Tensor:
    """[1, num_rows, width] random numbers, with another magnitude in each row."""
    sizes = torch.tensor([_SIZES[row % len(_SIZES)] for row in range(num_rows)])
    return (torch.randn(1, num_rows, width, generator=_seeded()) * sizes[:, None]).to(torch.bfloat16)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _linear_width(part: nn.Module | None) -> int | None:
    """Input size of a linear layer in bfloat16 that only multiplies."""
    if part is None or not is_untouched(part):
        return None
    if isinstance(part, PackedLinear) or (type(part) is nn.Linear and _is_narrow(part.weight)):
        return part.in_features
    return None


def _is_narrow(weight: Tensor) -> bool:
    return weight.dtype is torch.bfloat16 and weight.device.type == "cpu"


def is_untouched(module: nn.Module) -> bool:
    """Whether calling a module runs its own forward and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in module.__dict__ and LATENT_ATTRIBUTE not in module.__dict__


_POSITIONS = (0, 1, 2, 3, 7, 40, 111, 509, 1021, 4093, 30011, 131071)
"""Near and far positions, to detect modules that treat only far tokens differently."""
_HIGHEST_POSITION = 2**24


def fuse_operations(model: Any, max_positions: int | None) -> Counter[str]:
    """Fuses supported modules of a transformers model in bfloat16 on a CPU, and counts them by kind.

    Args:
        model: a `...ForCausalLM` whose attention function is ours.
        max_positions: its max position, if it has a limit.
    """
    try:
        kernels = RowKernels()
    except NativeUnavailable:
        return Counter()
    found: Counter[str] = Counter()
    with torch.inference_mode():
        calls = _record_calls(model, max_positions)
        for find in (norm_form, mlp_form, attention_form, layer_form):
            for module, arguments in calls:
                form = find(module, arguments, kernels) if is_untouched(module) else None
                if form is not None:
                    form.install()
                    found[form.kind] += 1
    return found


def count_fused(model: nn.Module) -> Counter[str]:
    """Number of fused modules by kind."""
    forms = (fused_form(part) for part in model.modules())
    return Counter(form.kind for form in forms if form is not None)


def _record_calls(model: Any, max_positions: int | None) -> list[tuple[nn.Module, Arguments]]:
    """Arguments of each module in the order of the calls, for modules called once per forward."""
    calls: dict[int, list[tuple[nn.Module, Arguments]]] = {}

    def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(id(module), []).append((module, (arguments, named)))

    positions = [place for place in _POSITIONS if max_positions is None or place < max_positions]
    if max_positions is not None and max_positions <= _HIGHEST_POSITION and max_positions - 1 not in positions:
        positions.append(max_positions - 1)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    tokens = [(vocab_size // 3 + 7 * number) % vocab_size for number in range(len(positions))]
    with ExitStack() as hooks, suppress(Exception):  # a model may reject far positions: no more is fused then
        for module in model.modules():
            if is_untouched(module) and not isinstance(module, nn.Linear | PackedLinear | nn.ModuleList):
                hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        with attention_scope(own_value):
            model(input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False)
    return [recorded[0] for recorded in calls.values() if len(recorded) == 1]
