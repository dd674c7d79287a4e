"""Fused modules: norms and gated MLPs of transformers, in few calls.

A fused form replaces a module's `forward` and nothing else: the module, its children and its weights stay
where they are. It computes in bfloat16 on a CPU without gradients; anything else goes to the module's own code.

A weight matrix evicts nearly everything else from the CPU's cache. So the cost depends on how much code and
how many objects are touched, not on how many numbers are computed.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn

from kvmosaic.model.cpu.prepack import PackedLinear
from kvmosaic.model.cpu.row_kernels import GatePlan, NormPlan, RowKernels, num_threads


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
