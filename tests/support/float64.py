"""A float64 microscope: transformers computes norms, angles and softmax in float32 by hand; here they are float64.

Without it a float64 model differs from itself by 1e-6; with it, equal things are equal to 1e-12.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Turns every request for float32 into one for float64 while it is active."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        if func is torch.full and "dtype" not in kwargs:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def make_float64(model: nn.Module) -> nn.Module:
    """Makes every forward of a model compute in float64 throughout; build the model inside `Float64()` too."""
    model.double()
    forward = model.forward

    @functools.wraps(forward)
    def forward_in_float64(*args: Any, **kwargs: Any) -> Any:
        with Float64():
            return forward(*args, **kwargs)

    model.forward = forward_in_float64  # type: ignore[method-assign]
    return model
