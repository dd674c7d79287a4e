"""Block storage: the tensors behind the block ids of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class StoredLayer(Protocol):
    """What one layer stores per token; `kvmosaic.model.LayerSpec` is one.

    A layer whose values are a prefix of its keys (latent attention) stores the keys only; a layer that reads the keys
    of another layer stores nothing and names that layer in `source_layer`.
    """

    @property
    def num_kv_heads(self) -> int:
        """G, key heads."""

    @property
    def key_dim(self) -> int:
        """D, numbers in a key."""

    @property
    def value_dim(self) -> int:
        """Dv, numbers in a value."""

    @property
    def source_layer(self) -> int:
        """The layer whose keys are read: its own index, or an earlier one."""

    @property
    def value_in_key(self) -> bool:
        """Whether the value is the first `value_dim` numbers of the key."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token takes in this layer."""


class BlockStorage:
    """Keys and values of one pool, one pair of tensors per layer.

        layer 0   K [N, P, G, D]    block 0 | block 1 | block 2 | …        N blocks of P slots
                  V [N, P, G, Dv]   block 0 | block 1 | block 2 | …
        layer 1   …

    Slot s is row s % P of block s // P, so neighbouring blocks are one strided view: reading a run copies nothing.
    Slots hold garbage until they are written; only runs of written slots are ever read.
    """

    def __init__(
        self, layers: Sequence[StoredLayer], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        num_slots = num_blocks * block_size
        for index, layer in enumerate(self.layers):
            if layer.source_layer != index:
                self._keys.append(self._keys[layer.source_layer])
                self._values.append(self._values[layer.source_layer])
                continue
            key = torch.empty(num_slots, layer.num_kv_heads, layer.key_dim, dtype=dtype, device=device)
            self._keys.append(key)
            if layer.value_in_key:
                self._values.append(key[..., : layer.value_dim])
            else:
                self._values.append(torch.empty(*key.shape[:2], layer.value_dim, dtype=dtype, device=device))

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        per_token = sum(layer.bytes_per_token(self.dtype) for layer in self.layers)
        return per_token * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    def write(self, layer_index: int, slots: Tensor | slice, keys: Tensor, values: Tensor) -> None:
        """Stores the keys [n, G, D] and values [n, G, Dv] of n tokens; layers that store nothing skip this."""
        layer = self.layers[layer_index]
        if layer.source_layer != layer_index:
            return
        self._keys[layer_index][slots] = keys
        if not layer.value_in_key:
            self._values[layer_index][slots] = values

    def run(self, layer_index: int, first_slot: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of a run of slots: keys [num_tokens, G, D] and values [num_tokens, G, Dv]."""
        end = first_slot + num_tokens
        return self._keys[layer_index][first_slot:end], self._values[layer_index][first_slot:end]

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block in all layers (copy-on-write)."""
        size = self.block_size
        for index, layer in enumerate(self.layers):
            if layer.source_layer != index:
                continue
            tensors = (self._keys[index],) if layer.value_in_key else (self._keys[index], self._values[index])
            for tensor in tensors:
                tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]
