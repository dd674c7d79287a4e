"""Model fingerprint: an identity, so that keys and values are only ever reused by the model that computed them.

What it guarantees: the same configuration, weights, dtype and pinned frequencies give the same fingerprint on every
machine and in every process; another architecture, shape, dtype, training run, fine-tune or merged adapter gives
another one, and so does an adapter that is switched on or off before the model is loaded. What it does not: weights
that change later go unnoticed, and every tensor is sampled (all of a small one, evenly spread numbers of a large one),
so that an edit of single weights made to avoid the samples does, too. It is an identity, not a signature against an
attacker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.model.cpu.prepack import weights

_SAMPLES = 4096
"""Numbers sampled from each tensor."""
_FORMAT = "kvmosaic-model-1"
_IGNORED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "architectures"}
"""Configuration entries about a model's origin, not its computation."""


_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def fingerprint(module: nn.Module, config: Any) -> str:
    """SHA-256 (hex) of a transformers model in memory: configuration, sampled weights, buffers, adapters and dtypes."""
    digest = hashlib.sha256(_FORMAT.encode())
    settings = _without_origin(config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(json.dumps(list(_adapters(module)), sort_keys=True, default=str).encode())
    for name, tensor in sorted([*weights(module), *_buffers(module)], key=lambda item: item[0]):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in _parts(tensor):
            digest.update(_sample(part))
    return digest.hexdigest()


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Frequencies, and buffers that are saved with the weights, such as those of 8-bit or 4-bit layers."""
    for place, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name.endswith("inv_freq") or name not in part._non_persistent_buffers_set:
                yield f"{place}.{name}", buffer


def _adapters(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Active PEFT adapters by module, and their scale: their weights are present in any case."""
    for place, part in module.named_modules():
        if hasattr(part, "_active_adapter"):
            yield place, {name: getattr(part, name, None) for name in _ADAPTER_STATE}


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of a weight in a packed form; a plain weight is its only part."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (Tensor, nn.Parameter):
        yield tensor
        return
    for name in flatten()[0]:
        yield from _parts(getattr(tensor, name))


def _sample(tensor: Tensor) -> bytes:
    """Evenly spread numbers of a tensor, first and last included, as bytes."""
    if tensor.is_meta or tensor.numel() == 0:
        return b""
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _SAMPLES:
        flat = flat[torch.linspace(0, flat.numel() - 1, _SAMPLES, dtype=torch.float64, device=flat.device).long()]
    return flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _without_origin(settings: Any) -> Any:
    if isinstance(settings, Mapping):
        return {str(key): _without_origin(value) for key, value in settings.items() if key not in _IGNORED}
    if isinstance(settings, list | tuple):
        return [_without_origin(value) for value in settings]
    return settings
