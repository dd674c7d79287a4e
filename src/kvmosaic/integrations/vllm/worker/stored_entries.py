"""Stored entries: serialization of runs of a worker's share of the model for the tiers."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import cast

import torch

from kvmosaic.cache.keys import Key
from kvmosaic.config import TierConfig
from kvmosaic.entries import DtypeName, EntryBound, EntryExpectation, EntryHeader, decode_entry, encode_entry
from kvmosaic.errors import InvalidConfig, NotMovable
from kvmosaic.integrations.vllm.operations import StoredRun
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout
from kvmosaic.layers import LayerGeometry
from kvmosaic.memory import ChunkTensors
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
            InvalidConfig: zstandard is requested and not installed. NotMovable: layers of several dtypes.
        """
        if config.chunk_compression == "zstd" and find_spec("zstandard") is None:
            raise InvalidConfig("compression is 'zstd' and zstandard is not installed; pip install 'kvmosaic[tiers]'")
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
        self.dtype = dtypes.pop()
        self._bound = EntryBound(self._layers, self._dtype_name)
        self.bytes_per_token = self.dtype.itemsize * sum(
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
        header = EntryHeader(
            fingerprint=run.fingerprint,
            key=self.key(run),
            root=Key(run.root),
            start=run.start,
            tokens=run.tokens,
            layers=self._layers,
            dtype=self._dtype_name,
            compression=self._config.chunk_compression,
            compute_seconds=compute_seconds,
            created=time.time(),
        )
        return lambda layers: encode_entry(header, layers, self._config.chunk_secret)

    def accept(self, run: StoredRun) -> Callable[[Entry], ChunkTensors]:
        """Returns a function that validates and reads an entry; InvalidEntry unless it is this run, bit for bit."""
        expected = EntryExpectation(
            fingerprint=run.fingerprint,
            key=self.key(run),
            root=Key(run.root),
            start=run.start,
            tokens=run.tokens,
            layers=self._layers,
            dtype=self._dtype_name,
        )
        return lambda entry: decode_entry(entry, expected, self._config.chunk_secret).layers

    @property
    def _dtype_name(self) -> DtypeName:
        return cast(DtypeName, str(self.dtype).removeprefix("torch."))
