"""Prepacked linear layers: bfloat16 weights kept in the order in which oneDNN multiplies them on a CPU.

torch passes oneDNN a weight matrix row by row, and oneDNN reorders it in every call. For one row of input
that takes as long as the multiplication itself. A packed layer does it once, and the plain weight is freed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvmosaic.container import allowed_instruction_sets
from kvmosaic.errors import InvalidConfig
from kvmosaic.layers.spec import LATENT_ATTRIBUTE

Prepack = bool | Literal["auto", "always", "never"]
"""Whether linear layers are packed: if supported and faster ("auto"), always (True), or never (False)."""


class PackedLinear(nn.Module):
    """Replaces an `nn.Linear` in bfloat16 on a CPU, for inference.

    The weight exists in packed form only. `weight` returns a plain copy, made anew every time, and a state dict holds
    such copies: the model can still be saved.
    """

    def __init__(self, linear: nn.Linear, *, is_copy: bool = False) -> None:
        """Packs the weight of `linear`; with `is_copy`, the embedding keeps the same weight in plain form."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.is_copy = is_copy
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())
        self.training = linear.training

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        # the operation ignores strides
        x = x if x.is_contiguous() else x.contiguous()
        out: Tensor = _multiply()(x, self._packed, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], a plain copy."""
        return self._packed.to_dense()

    @property
    def packed_bytes(self) -> int:
        """Memory of the packed weight."""
        return 2 * self.in_features * self.out_features

    def extra_repr(self) -> str:
        """Sizes, as in the text of an `nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


def prepack_linears(model: Any, wanted: Prepack) -> int:
    """Replaces the linear layers of a transformers model by packed ones, one by one, and counts them.

    A weight that the embedding shares is packed, too, and the embedding keeps its own: one matrix more. Layers with
    hooks, subclasses, weights shared in other ways and projections of latent attention (whose weight is read, not
    called) stay as they are.

    Raises:
        InvalidConfig: `wanted` is "always" for a model that cannot be packed, or is an unknown value.
    """
    if wanted not in (True, False, "auto", "always", "never") or not isinstance(wanted, bool | str):
        raise InvalidConfig(f"prepack is {wanted!r}; choose 'auto', 'always' (or True) or 'never' (or False)")
    embedding = model.get_input_embeddings().weight
    if reason := _why_not(embedding):
        if wanted in (True, "always"):
            raise InvalidConfig(
                f"prepack is {wanted!r}: bfloat16 layers are packed, on a CPU, but {reason}; use 'auto'"
            )
        return 0
    if wanted in (False, "never") or (wanted == "auto" and not cpu_has_bfloat16()):
        return 0
    places = _places_of(model, embedding)
    for shared in places:
        linear = getattr(*shared[0])
        packed = PackedLinear(linear, is_copy=linear.weight is embedding)
        for parent, name in shared:
            setattr(parent, name, packed)
    return len(places)


def let_file_go(model: nn.Module) -> None:
    """After loading: copies the weights that a packed model still reads from its mapped file, to unmap the file.

    Otherwise one small weight would keep the whole file in memory beside the packed weights. Nothing is copied for a
    model whose linear layers are the smaller part.
    """
    packed = [part for part in model.modules() if isinstance(part, PackedLinear)]
    plain = [*model.parameters(), *model.buffers()]
    if sum(tensor.nbytes for tensor in plain) < sum(part.packed_bytes for part in packed):
        for tensor in plain:
            tensor.data = tensor.data.clone()


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model once, by name, packed ones as plain copies."""
    yield from module.named_parameters()
    for name, part in module.named_modules():
        if isinstance(part, PackedLinear) and not part.is_copy:
            yield f"{name}.weight", part.weight


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16 or AMX) and torch, oneDNN and we may use it."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, bool)()) for name in checks) and _may_use_avx512()


def _may_use_avx512() -> bool:
    """Whether none of ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and KVMOSAIC_CPU_ISA restricts the process to less."""
    by_torch = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return by_torch and has_onednn_for_bfloat16() and "avx512" in allowed_instruction_sets()


def has_onednn_for_bfloat16() -> bool:
    """Whether torch has oneDNN with bfloat16 here: on most current CPUs with AVX-512 or better."""
    return bool(torch._C._has_mkldnn) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def _multiply() -> Any:
    """The operation, looked up once: a look-up takes as long as a call. Not every torch has it."""
    return torch.ops.mkldnn._linear_pointwise.default


def _why_not(embedding: Tensor) -> str:
    """Why a model with this embedding cannot be packed; empty when it can."""
    if embedding.device.type != "cpu":
        return f"this model is on {embedding.device}"
    if embedding.dtype is not torch.bfloat16:
        return f"this model is in {str(embedding.dtype).removeprefix('torch.')}"
    if not has_onednn_for_bfloat16():
        return "torch has no oneDNN for bfloat16 here"
    return ""


def _places_of(model: nn.Module, embedding: Tensor) -> list[list[tuple[nn.Module, str]]]:
    """Locations of the layers to pack: (parent, name) of each, several for a layer that occurs several times.

    The layers themselves are not referenced, so that each is freed as soon as it is replaced.
    """
    modules = list(model.modules())
    owners = Counter(id(weight) for part in modules for weight in part._parameters.values() if weight is not None)
    read = {id(kept._projection) for part in modules if (kept := part.__dict__.get(LATENT_ATTRIBUTE)) is not None}
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in modules:
        for name, part in parent.named_children():
            if type(part) is not nn.Linear or id(part) in read or not _is_plain(part):
                continue
            is_own = owners[id(part.weight)] == 1 or (part.weight is embedding and owners[id(part.weight)] == 2)
            if is_own and (part.bias is None or owners[id(part.bias)] == 1):
                places.setdefault(id(part), []).append((parent, name))
    return list(places.values())


def _is_plain(linear: nn.Linear) -> bool:
    """Whether calling the layer does nothing but multiply in bfloat16."""
    tensors = [linear.weight, *([] if linear.bias is None else [linear.bias])]
    # a subclass has a storage format of its own: quantized ones claim to be bfloat16
    is_dense = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
    is_narrow = is_dense and all(tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" for tensor in tensors)
    is_called = not (linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)
    return is_narrow and is_called and linear.weight.numel() > 0
