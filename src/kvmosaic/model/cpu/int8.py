"""8-bit integer linear layers for CPUs: weights of half the size, and faster products.

A row of the weight is quantized to 127 steps of its own largest number in either direction, and so is a row of input,
dynamically:

    y[t, o] = step(x[t]) · step(w[o]) · sum_i  x_int[t, i] · w_int[o, i]

The sum is exact, so a row has the same bits alone and in a batch. The only loss is rounding to steps: about 1%
of a layer's output.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from kvmosaic.errors import InvalidConfig
from kvmosaic.model.cpu.fuse import fuse_operations
from kvmosaic.model.cpu.prepack import PackedLinear, may_use_avx512, places_of
from kvmosaic.model.loaded import LoadedModel

Quantization = Literal["none", "int8"]
"""Quantization of linear layers when a model is loaded."""

_STEPS = 127
_MIDDLE = 128
"""Zero point of the input: oneDNN is fast for unsigned times signed inputs, slow for signed times signed ones."""
_TINIEST = 1e-30
_FORMAT = "kvmosaic-int8-1"


class Int8Linear(PackedLinear):
    """Replaces an `nn.Linear` in bfloat16 on a CPU, for inference. The weight exists in 8 bits only."""

    bytes_per_weight: ClassVar[int] = 1

    def __init__(self, linear: nn.Linear, *, is_copy: bool = False) -> None:
        """Quantizes the weight of `linear`, row by row; with `is_copy`, the embedding keeps the plain weight."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.is_copy = is_copy
        self.training = linear.training
        weight = linear.weight.detach().float()
        steps = weight.abs().amax(1).clamp_min_(_TINIEST) / _STEPS
        rounded = weight.div_(steps[:, None]).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scales = steps / _STEPS  # includes the input's division
        self._zeros = torch.zeros(self.out_features, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, self.in_features).to(torch.float32, copy=True)
        largest = rows.abs().amax(-1, keepdim=True).clamp_min_(_TINIEST)
        rounded = rows.mul_(_STEPS / largest).add_(_MIDDLE + 0.5).to(torch.uint8)
        out: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, 1.0, _MIDDLE, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out.mul_(largest)
        if self.bias is not None:
            out.add_(self.bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], the quantized weight as a plain copy in bfloat16."""
        steps = (self._scales * _STEPS)[:, None]
        return (self._packed.to_dense().t() * steps).to(torch.bfloat16)


def check_quantization(wanted: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses unsupported settings, before any weight is read.

    Raises:
        InvalidConfig: an unknown value, or integers where they are slow, wrong or missing.
    """
    if wanted not in ("none", "int8"):
        raise InvalidConfig(f"quantization is {wanted!r}; choose 'none' or 'int8'")
    if wanted == "none":
        return
    reason = ""
    if device.type != "cpu":
        reason = f"this model is on {device}; use device='cpu', or quantization 'none'"
    elif dtype is not torch.bfloat16:
        reason = f"this model is in {str(dtype).removeprefix('torch.')}; use dtype='bfloat16', or quantization 'none'"
    elif not cpu_has_int8():
        reason = (
            "this CPU has no instructions for them (AVX-512 VNNI), or this torch no oneDNN; use quantization 'none'"
        )
    if reason:
        raise InvalidConfig(f"quantization is 'int8': 8-bit layers take and give bfloat16, on a CPU, but {reason}")


def cpu_has_int8() -> bool:
    """Whether the CPU sums products of 8-bit numbers in hardware, without overflow."""
    has_instructions: Any = getattr(torch.cpu, "_is_vnni_supported", bool)
    return bool(has_instructions()) and may_use_avx512() and hasattr(torch.ops.onednn, "qlinear_pointwise")


def quantize(model: LoadedModel) -> LoadedModel:
    """Replaces the linear layers of a model by 8-bit ones, one by one, and fuses the small operations between.

    Layers with hooks, subclasses, weights shared in other ways than with the embedding, and projections of latent
    attention stay as they are. The result is another model: its keys and values must not be mixed with those of the
    plain one, so the fingerprint changes.
    """
    embedding = model.module.get_input_embeddings().weight
    for shared in places_of(model.module, embedding):
        linear = getattr(*shared[0])
        layer = Int8Linear(linear, is_copy=linear.weight is embedding)
        for parent, name in shared:
            setattr(parent, name, layer)
    fuse_operations(model.module, model.max_positions)
    return replace(model, fingerprint=hashlib.sha256(f"{_FORMAT} {model.fingerprint}".encode()).hexdigest())
