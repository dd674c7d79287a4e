"""Fingerprint of one worker's weights."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout
from kvmosaic.model.fingerprint import fingerprint

_PROBES = 4
"""Number of columns read from a weight that exists in packed form only."""
_TABLE_ROWS = 64

_log = logging.getLogger(__name__)


def worker_fingerprint(vllm_config: Any, places: KVLayout) -> str:
    """SHA-256 (hex) of this worker's configuration, weights and rotation tables; empty if they cannot be read.

    The same weights, split over workers in the same way, give the same fingerprint on every machine. For its inputs see
    `kvmosaic.model.fingerprint`: weights are sampled, so it is no signature against an attacker.
    """
    parallel = vllm_config.parallel_config
    split = [getattr(parallel, name, 1) for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    digest = sha256(f"kvmosaic-vllm-worker-1 {split} {vllm_config.model_config.dtype}".encode())
    try:
        digest.update(fingerprint(places.root, vllm_config.model_config.hf_config).encode())
        for name, numbers in sorted(_packed(places.root), key=lambda item: item[0]):
            digest.update(f"{name}{tuple(numbers.shape)}".encode() + _bytes(numbers))
        for name, table in _tables(places.root):
            rows = torch.linspace(0, table.shape[0] - 1, _TABLE_ROWS, dtype=torch.float64).long().to(table.device)
            digest.update(f"{name}{tuple(table.shape)}{table.dtype}".encode() + _bytes(table[rows]))
    except Exception:  # whatever the weights are, the engine also works without tiers
        _log.warning("kvmosaic: the weights cannot be distinguished from others", exc_info=True)
        return ""
    return digest.hexdigest()


def _packed(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Columns of weights that were packed for a CPU and then freed: the layer's output for unit vectors.

    All products but one are zero, so these are the weight's own numbers, in whatever order they are summed.
    """
    for name, module in root.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel():
            continue
        method = getattr(module, "quant_method", None)
        size = getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None)
        if method is None or size is None:
            raise TypeError(f"{name} ({type(module).__name__}) has no weight to look at")
        probes = torch.zeros(_PROBES, size, dtype=weight.dtype, device=weight.device)
        probes[torch.arange(_PROBES), torch.linspace(0, size - 1, _PROBES, dtype=torch.float64).long()] = 1
        with torch.inference_mode():
            yield name, method.apply(module, probes, bias=None)


def _tables(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in root.named_modules():
        table = getattr(module, "cos_sin_cache", None)
        if isinstance(table, Tensor) and table.dim() == 2 and len(table):
            yield name, table


def _bytes(numbers: Tensor) -> bytes:
    plain = numbers.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return bytes(plain.numpy().tobytes())
