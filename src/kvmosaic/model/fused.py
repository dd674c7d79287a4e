"""Fused modules: what a norm or a gated MLP of transformers does, in few calls.

A fused form takes the place of a module's `forward` and of nothing else: the module, its children and its weights stay
where they are. It computes in bfloat16 on a CPU without gradients; anything else goes to the module's own code.

After a weight matrix went through the processor's cache, little else is left in it. What counts is how much code and
how many objects are touched, not how many numbers are computed.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from kvmosaic.model.prepack import PackedLinear
from kvmosaic.model.row_kernels import GatePlan, NormPlan, RowKernels, num_threads


class Fused:
    """The fused form of one module; `install` puts it in place."""

    kind: ClassVar[str]
    """What it fuses, in a word."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def install(self) -> None:
        """From now on the module is called in this form."""
        self.module.__dict__["forward"] = self.forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The module's forward."""
        raise NotImplementedError

    def own_code(self, *arguments: Any, **named: Any) -> Any:
        """What transformers wrote."""
        return type(self.module).forward(self.module, *arguments, **named)


def fused_form(module: nn.Module | None) -> Fused | None:
    """The fused form that stands in a module, if there is one."""
    form = None if module is None else getattr(module.__dict__.get("forward"), "__self__", None)
    return form if isinstance(form, Fused) else None


def suits(x: Any) -> TypeGuard[Tensor]:
    """Whether the kernels can read these numbers, and nobody wants their gradients."""
    return (
        type(x) is Tensor
        and x.dtype is torch.bfloat16
        and x.is_cpu
        and x.is_contiguous()
        and not torch.is_grad_enabled()
    )


class FusedNorm(Fused):
    """A root mean square norm: one call instead of seven operations."""

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
        """The norm of numbers that suit."""
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
    """down(activation(gate(x)) * up(x)), the part between the products in one call."""

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
        """Whether nobody wants to see what goes through the activation, which is not called."""
        activation: Any = self.module._modules["act_fn"]
        return not activation._forward_hooks and not activation._forward_pre_hooks

    def apply(self, x: Tensor) -> Tensor:
        """The MLP of numbers that suit; what it returns is the caller's."""
        parts: Any = self.module._modules
        gate, up = own_output(parts["gate_proj"], x), output(parts["up_proj"], x)
        count = gate.numel()
        self._gate(self._address, gate.data_ptr(), up.data_ptr(), count, num_threads(count // gate.shape[-1]))
        return own_output(parts["down_proj"], gate)


def suits_weight(weight: Tensor | None) -> bool:
    """Whether a norm's weight is still what it was when the norm was fused."""
    return weight is not None and weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous()


def output(part: Any, x: Tensor) -> Tensor:
    """A module's output, past the machinery of hooks if it has none."""
    if type(part) is PackedLinear and not part._forward_hooks and not part._forward_pre_hooks:
        return part.forward(x)
    out: Tensor = part(x)
    return out


def own_output(part: Any, x: Tensor) -> Tensor:
    """A module's output, to be changed in place: a copy if a hook may have kept it."""
    out = output(part, x)
    return out.clone() if part._forward_hooks else out
