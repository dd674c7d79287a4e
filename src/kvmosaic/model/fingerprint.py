"""A model's identity, so that keys and values are only ever reused by the model that computed them.

What it guarantees: the same configuration, weights, dtype and pinned frequencies give the same fingerprint on every
machine and in every process; another architecture, shape, dtype, training run, fine-tune or merged adapter gives
another one. What it does not: every tensor is sampled (all of a small one, evenly spread numbers of a large one), so an
edit of single weights made to avoid the samples goes unnoticed. It is an identity, not a signature against an attacker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.model.prepack import weights

_SAMPLES = 4096
"""Numbers read from each tensor."""
_FORMAT = "kvmosaic-model-1"
_IGNORED = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation", "architectures"}
"""Configuration entries that say where a model came from, not what it computes."""


def fingerprint(module: nn.Module, config: Any) -> str:
    """SHA-256 (hex) of a transformers model in memory: configuration, sampled weights, frequencies and dtypes."""
    digest = hashlib.sha256(_FORMAT.encode())
    settings = _without_origin(config.to_dict())
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    frequencies = [(name, buffer) for name, buffer in module.named_buffers() if name.endswith("inv_freq")]
    for name, tensor in sorted([*weights(module), *frequencies], key=lambda item: item[0]):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_sample(tensor))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    """Evenly spread numbers of a tensor, first and last included, as their bytes."""
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
