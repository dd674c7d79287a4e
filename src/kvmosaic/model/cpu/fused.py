"""Fused modules: norms, gated MLPs, attention modules and decoder layers of transformers, in few calls.

A fused form replaces a module's `forward` and nothing else: the module, its children and its weights stay
where they are. It computes in bfloat16 on a CPU without gradients; anything else goes to the module's own code.

A weight matrix evicts nearly everything else from the CPU's cache. So the cost depends on how much code and
how many objects are touched, not on how many numbers are computed.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from kvmosaic.attention.native.backend import load_library
from kvmosaic.container import InstructionSet
from kvmosaic.errors import NativeUnavailable
from kvmosaic.layers import AttentionCall
from kvmosaic.model.cpu.prepack import PackedLinear
from kvmosaic.model.hook import ATTENTION_NAME, Receiver, current_receiver

_FEW_ROWS = 16
"""Row count up to which a second thread is not worth it."""


class NormPlan(ctypes.Structure):
    """`Norm` in rows.c."""

    _fields_ = (("width", c_int64), ("form", c_int64), ("epsilon", c_double), ("parallel", c_void_p))


class GatePlan(ctypes.Structure):
    """`Gate` in rows.c."""

    _fields_ = (("activation", c_int64), ("parallel", c_void_p))


class TurnPlan(ctypes.Structure):
    """`Turn` in rows.c."""

    _fields_ = (
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "query_row", "key_row", "head_dim")),
        *((name, c_int64) for name in ("dims", "pairs", "table_dim", "second", "step", "wide")),
        *(("sign", c_double), ("parallel", c_void_p)),
    )


class RowKernels:
    """The functions of rows.c for one instruction set, by default the best that the processor supports.

    They are called with addresses, the first one of a plan: a call with tensors would take longer than the work. All
    numbers are contiguous bfloat16 on the CPU.

        norm(plan, x, residual, weight, sum, out, rows, threads)   out = norm(x), or sum = x + residual, out = norm(sum)
        gate(plan, gate, up, numbers, threads)                     gate = activation(gate) * up
        turn(plan, query, key, cos, sin, rows, threads)            rotates queries and keys in place

    Raises:
        NativeUnavailable: the extension is missing, or older than these functions.
    """

    def __init__(self, instruction_set: InstructionSet | None = None) -> None:
        library = load_library()
        self.parallel = library.parallel
        chosen = instruction_set or library.instruction_sets[-1]
        self.norm = _function(library.functions, f"kvmosaic_norm_{chosen}", 8)
        self.gate = _function(library.functions, f"kvmosaic_gate_{chosen}", 5)
        self.turn = _function(library.functions, f"kvmosaic_turn_{chosen}", 7)


def num_threads(num_rows: int) -> int:
    """Threads for `num_rows` rows; for a few rows, the look-up in torch would cost more than it saves."""
    return 1 if num_rows <= _FEW_ROWS else torch.get_num_threads()


def _function(functions: Any, name: str, num_arguments: int) -> Any:
    try:
        function = functions[name]
    except AttributeError:
        raise NativeUnavailable(f"its C extension has no {name}; install the package again") from None
    function.argtypes = (c_void_p,) * num_arguments
    function.restype = None
    return function


class Fused:
    """The fused form of one module; `install` puts it in place."""

    kind: ClassVar[str]
    """Name of the fused kind."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def install(self) -> None:
        """Replaces the module's forward by this form."""
        self.module.__dict__["forward"] = self.forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The module's forward."""
        raise NotImplementedError

    def own_code(self, *arguments: Any, **named: Any) -> Any:
        """The original forward of transformers."""
        return type(self.module).forward(self.module, *arguments, **named)


def fused_form(module: nn.Module | None) -> Fused | None:
    """The fused form of a module, if it has one."""
    form = None if module is None else getattr(module.__dict__.get("forward"), "__self__", None)
    return form if isinstance(form, Fused) else None


def suits(x: Any) -> TypeGuard[Tensor]:
    """Whether the kernels can read these numbers, and no gradients are needed."""
    return (
        type(x) is Tensor
        and x.dtype is torch.bfloat16
        and x.is_cpu
        and x.is_contiguous()
        and not torch.is_grad_enabled()
    )


class FusedNorm(Fused):
    """Root mean square norm: one call instead of seven operations."""

    kind = "norms"

    def __init__(self, module: nn.Module, kernels: RowKernels, form: int, epsilon: float) -> None:
        super().__init__(module)
        weight = module._parameters["weight"]
        assert weight is not None
        self.width = weight.numel()
        self._norm = kernels.norm
        self._plan = NormPlan(self.width, form, epsilon, kernels.parallel)
        self._address = ctypes.addressof(self._plan)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        """[..., width] -> [..., width]."""
        x = arguments[0] if len(arguments) == 1 and not named else None
        if not suits(x) or x.shape[-1] != self.width or not suits_weight(self.module._parameters["weight"]):
            own: Tensor = self.own_code(*arguments, **named)
            return own
        return self.apply(x)

    def apply(self, x: Tensor) -> Tensor:
        """The norm of supported numbers."""
        out = torch.empty_like(x)
        weight: Any = self.module._parameters["weight"]
        num_rows = x.numel() // self.width
        self._norm(
            self._address,
            x.data_ptr(),
            None,
            weight.data_ptr(),
            None,
            out.data_ptr(),
            num_rows,
            num_threads(num_rows),
        )
        return out

    def apply_to_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of both, and its norm."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        weight: Any = self.module._parameters["weight"]
        num_rows = x.numel() // self.width
        self._norm(
            self._address,
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            total.data_ptr(),
            out.data_ptr(),
            num_rows,
            num_threads(num_rows),
        )
        return total, out


class FusedMlp(Fused):
    """down(activation(gate(x)) * up(x)), with one call between the products."""

    kind = "MLPs"

    def __init__(self, module: nn.Module, kernels: RowKernels, activation: int) -> None:
        super().__init__(module)
        self._gate = kernels.gate
        self._plan = GatePlan(activation, kernels.parallel)
        self._address = ctypes.addressof(self._plan)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        x = arguments[0] if len(arguments) == 1 and not named else None
        if not suits(x) or not self.can_apply():
            own: Tensor = self.own_code(*arguments, **named)
            return own
        return self.apply(x)

    def can_apply(self) -> bool:
        """Whether the activation, which is not called, has no hooks."""
        activation: Any = self.module._modules["act_fn"]
        return not activation._forward_hooks and not activation._forward_pre_hooks

    def apply(self, x: Tensor) -> Tensor:
        """The MLP of supported numbers; the caller owns the result."""
        parts: Any = self.module._modules
        gate, up = own_output(parts["gate_proj"], x), output(parts["up_proj"], x)
        count = gate.numel()
        self._gate(self._address, gate.data_ptr(), up.data_ptr(), count, num_threads(count // gate.shape[-1]))
        return own_output(parts["down_proj"], gate)


def suits_weight(weight: Tensor | None) -> bool:
    """Whether a norm's weight is unchanged since it was fused."""
    return weight is not None and weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous()


def output(part: Any, x: Tensor) -> Tensor:
    """A module's output, bypassing the hook machinery if it has no hooks."""
    if type(part) is PackedLinear and not part._forward_hooks and not part._forward_pre_hooks:
        return part.forward(x)
    out: Tensor = part(x)
    return out


def own_output(part: Any, x: Tensor) -> Tensor:
    """A module's output that may be changed in place: a copy if a hook may hold it."""
    out = output(part, x)
    return out.clone() if part._forward_hooks else out


@dataclass(frozen=True, slots=True)
class CallConstants:
    """Constant arguments of an attention module to its attention function."""

    scaling: float
    softcap: float | None
    window: int | None
    sinks: str | None
    """Name of the parameter."""


class FusedAttention(Fused):
    """An attention module: projections, one call that rotates queries and keys, the receiver, the output projection."""

    kind = "attention modules"

    def __init__(
        self,
        module: nn.Module,
        kernels: RowKernels,
        shape: tuple[int, int, int],
        turn: TurnPlan | None,
        constants: CallConstants,
    ) -> None:
        """`shape`: query heads, key heads, head size; `turn`: None if nothing is rotated."""
        super().__init__(module)
        self._shape = shape
        self._turn = kernels.turn
        self._plan = turn
        self._address = None if turn is None else ctypes.addressof(turn)
        self._table_dim = 0 if turn is None else turn.table_dim
        self._constants = constants

    def forward(self, *arguments: Any, **named: Any) -> tuple[Tensor, None]:
        """Hidden states [1, T, hidden] -> [1, T, hidden], and no weights."""
        x = arguments[0] if arguments else named.get("hidden_states")
        receiver = current_receiver()
        if receiver is None or len(arguments) > 1 or not suits(x) or not self.can_apply(x, named):
            own: tuple[Tensor, None] = self.own_code(*arguments, **named)
            return own
        return self.apply(x, receiver, named), None

    def can_apply(self, x: Tensor, named: dict[str, Any]) -> bool:
        """Whether a call with these arguments is supported: no cache of transformers, tables for every row."""
        module: Any = self.module
        if named.get("past_key_values") is not None or module.config._attn_implementation != ATTENTION_NAME:
            return False
        if self._plan is None:
            return x.shape[0] == 1
        tables = named.get("position_embeddings")
        if not isinstance(tables, tuple) or len(tables) != 2:
            return False
        cos, sin = tables
        return suits(cos) and suits(sin) and cos.shape == sin.shape == (1, x.shape[1], self._table_dim)

    def apply(self, x: Tensor, receiver: Receiver, named: dict[str, Any]) -> Tensor:
        """Supported hidden states, [1, T, hidden] -> [1, T, hidden]."""
        module: Any = self.module
        query, key, value = self.project(x, named.get("position_embeddings"))
        constants = self._constants
        sinks = None if constants.sinks is None else module._parameters[constants.sinks]
        mask = named.get("attention_mask")
        scaling, softcap, window = constants.scaling, constants.softcap, constants.window
        call = AttentionCall(module.layer_idx, query, key, value, scaling, softcap, sinks, module, mask, window)
        attended = receiver(call)
        if attended.dtype is not torch.bfloat16:
            attended = attended.to(torch.bfloat16)
        return output(module._modules["o_proj"], attended.reshape(1, attended.shape[0], -1))

    def project(self, x: Tensor, tables: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys [T, G, D] and values [T, G, Dv] of [1, T, hidden]."""
        parts: Any = self.module._modules
        num_heads, num_kv_heads, head_dim = self._shape
        num_rows = x.shape[1]
        query, key = own_output(parts["q_proj"], x), own_output(parts["k_proj"], x)
        value = output(parts["v_proj"], x)
        if "q_norm" in parts:
            query, key = _normed(parts["q_norm"], query), _normed(parts["k_norm"], key)
        if self._address is not None:
            cos, sin = tables
            self._turn(
                self._address,
                query.data_ptr(),
                key.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                num_rows,
                num_threads(num_rows),
            )
        return (
            query.view(num_rows, num_heads, head_dim),
            key.view(num_rows, num_kv_heads, head_dim),
            value.view(num_rows, num_kv_heads, -1),
        )


def _normed(norm: Any, x: Tensor) -> Tensor:
    """A norm over each head, or over all of them, by the size of its weight."""
    return own_output(norm, x.view(*x.shape[:-1], -1, norm.weight.numel()))


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Names of a layer's norms: before and after each of its two parts."""

    before_attention: str
    after_attention: str | None
    before_mlp: str
    after_mlp: str | None

    @property
    def names(self) -> set[str]:
        """All of them."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return {name for name in names if name is not None}


LAYER_FORMS = (
    LayerForm("input_layernorm", None, "post_attention_layernorm", None),
    LayerForm("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
)


class FusedLayer(Fused):
    """A decoder layer: the first residual is added in the call of the norm that follows.

    Parts without hooks are called without `nn.Module.__call__`, which takes a good share of a decode step
    outside its linear layers.
    """

    kind = "layers"

    def __init__(self, module: nn.Module, form: LayerForm) -> None:
        super().__init__(module)
        self._form = form
        parts = module._modules
        self._attention_hooks = _hooks(parts[form.before_attention], parts["self_attn"])
        self._norm_hooks = _hooks(parts[form.before_mlp])
        self._mlp_hooks = _hooks(parts["mlp"], parts[form.after_mlp] if form.after_mlp else None)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Hidden states [1, T, hidden] -> [1, T, hidden]."""
        x = arguments[0] if len(arguments) == 1 else None
        parts: Any = self.module._modules
        form = self._form
        second = fused_form(parts[form.before_mlp])
        if (
            not suits(x)
            or not isinstance(second, FusedNorm)
            or any(self._norm_hooks)
            or not suits_weight(second.module._parameters["weight"])
        ):
            return self.own_code(*arguments, **named)
        attended = self._attend(x, named)
        if not suits(attended):
            attended = attended.contiguous()
        x, normed = second.apply_to_sum(attended, x)
        mlp = fused_form(parts["mlp"])
        if not isinstance(mlp, FusedMlp) or any(self._mlp_hooks) or not mlp.can_apply():
            return x + self._after(form.after_mlp, parts["mlp"](normed))
        # without hooks, the output of an MLP or norm has no other owner
        return self._after(form.after_mlp, mlp.apply(normed)).add_(x)

    def _attend(self, x: Tensor, named: dict[str, Any]) -> Tensor:
        parts: Any = self.module._modules
        form = self._form
        first, attention = fused_form(parts[form.before_attention]), fused_form(parts["self_attn"])
        receiver = current_receiver()
        if (
            receiver is not None
            and not any(self._attention_hooks)
            and isinstance(first, FusedNorm)
            and isinstance(attention, FusedAttention)
            and attention.can_apply(x, named)
        ):
            return self._after(form.after_attention, attention.apply(first.apply(x), receiver, named))
        attended = parts["self_attn"](hidden_states=parts[form.before_attention](x), **named)[0]
        return self._after(form.after_attention, attended)

    def _after(self, name: str | None, x: Tensor) -> Tensor:
        """Applies what follows a part: nothing, or a norm of that name."""
        if name is None:
            return x
        part: Any = self.module._modules[name]
        out: Tensor = part(x)
        return out


def _hooks(*parts: nn.Module | None) -> tuple[dict[int, Any], ...]:
    """The hook dictionaries of these modules, which also show later hooks."""
    return tuple(
        hooks for part in parts if part is not None for hooks in (part._forward_hooks, part._forward_pre_hooks)
    )
