"""Stored entries of one worker's share of a model, which our own engine never splits: identity, serialization."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor, nn

from kvmosaic.cache.keys import Key
from kvmosaic.config import TierConfig
from kvmosaic.entries import DtypeName, EntryBound, EntryExpectation, EntryHeader, decode_entry, encode_entry
from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.operations import StoredRun
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout
from kvmosaic.layers import LayerGeometry
from kvmosaic.memory import ChunkTensors
from kvmosaic.model.fingerprint import fingerprint
from kvmosaic.tiers import Entry


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the model on one worker."""

    pipeline_rank: int = 0
    pipeline_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1

    def key(self, key: bytes) -> Key:
        """The key of this share of a run."""
        numbers = (self.pipeline_rank, self.pipeline_size, self.tensor_rank, self.tensor_size)
        return Key(sha256(b"kvm-rank" + struct.pack("<4I", *numbers) + key).digest())


class StoredEntries:
    """Serializes runs into entries, and decodes entries; layers are numbered from 0 on every worker."""

    def __init__(self, places: KVLayout, share: Share, config: TierConfig) -> None:
        """Describes the layers of `places`.

        Raises:
            NotMovable: layers of several dtypes, or a cache in eight bits.
        """
        if places.cache_format:
            raise NotMovable(f"the KV cache is kept as {places.cache_format}; tiers store plain numbers only")
        layers, dtypes = [], set()
        for index, place in enumerate(places.layers):
            keys, values = place.layout.read(torch.zeros(1, dtype=torch.int64, device=places.device))
            (_, heads, width), in_key = keys.shape, values is None
            layers.append(LayerGeometry(index, heads, width, width if values is None else values.shape[-1], in_key))
            dtypes.add(keys.dtype)
        if len(dtypes) > 1:
            raise NotMovable(f"layers keep their keys as {', '.join(sorted(map(str, dtypes)))}; tiers store one dtype")
        if all(layer.value_in_key for layer in layers):  # every tensor rank has the full latent row
            share = Share(share.pipeline_rank, share.pipeline_size)
        self._share, self._layers, self._config = share, tuple(layers), config
        dtype = dtypes.pop()
        self._dtype = cast(DtypeName, str(dtype).removeprefix("torch."))
        self._bound = EntryBound(self._layers, self._dtype)
        self.bytes_per_token = dtype.itemsize * sum(
            layer.num_kv_heads * (layer.key_dim + (0 if layer.value_in_key else layer.value_dim)) for layer in layers
        )

    def key(self, run: StoredRun) -> Key:
        """The key of this worker's share of a run."""
        return self._share.key(run.key)

    def max_bytes(self, run: StoredRun) -> int:
        """Max size of an entry of a run; larger ones are not read."""
        return self._bound.max_bytes(run.num_tokens)

    def encode(self, run: StoredRun, compute_seconds: float) -> Callable[[ChunkTensors], Entry | None]:
        """Returns a function that serializes a run's tensors, on any thread."""
        header = EntryHeader(**self._identity(run), compute_seconds=compute_seconds, created=time.time())
        return lambda layers: encode_entry(header, layers, self._config.chunk_secret)

    def accept(self, run: StoredRun) -> Callable[[Entry], ChunkTensors]:
        """Returns a function that validates and reads an entry; InvalidEntry unless it is this run, bit for bit."""
        expected = EntryExpectation(**self._identity(run))
        return lambda entry: decode_entry(entry, expected, self._config.chunk_secret).layers

    def _identity(self, run: StoredRun) -> dict[str, Any]:
        """What the header of its entry says, and what an entry must match."""
        place = {"key": self.key(run), "root": Key(run.root), "start": run.start, "tokens": run.tokens}
        return {"fingerprint": run.fingerprint, **place, "layers": self._layers, "dtype": self._dtype}


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
