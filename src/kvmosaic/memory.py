"""Block storage: the KV tensors of one pool, and host buffers as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor

from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerGeometry, stored_layers


def new_bytes(count: int) -> UInt8[Tensor, " count"]:
    """[count] uint8, uninitialized.

    numpy allocates huge pages. With small ones, page faults take longer than filling the memory.
    """
    return torch.from_numpy(np.empty(count, np.uint8))


def pinned_bytes(count: int) -> memoryview:
    """Pinned (page-locked) host memory, for fast copies to a GPU; never swapped out."""
    return memory_of(torch.empty(count, dtype=torch.uint8, pin_memory=True))


def bytes_of(tensor: Shaped[Tensor, "*any"]) -> UInt8[Tensor, " bytes"]:
    """[bytes] uint8: the memory of a CPU tensor, a view if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def view_of(data: bytes | bytearray | memoryview) -> UInt8[Tensor, " bytes"]:
    """[bytes] uint8: the same memory, kept alive by the view; never write to it if `data` is read-only."""
    return torch.from_numpy(np.asarray(_Memory(data)))


def memory_of(tensor: Shaped[Tensor, "*any"]) -> memoryview:
    """The memory of a contiguous uint8 tensor on the CPU."""
    return tensor.numpy().data


class _Memory:
    """numpy array interface over bytes; torch has no read-only tensors and warns of read-only arrays."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.__array_interface__: dict[str, Any] = {
            **np.frombuffer(data, np.uint8).__array_interface__,
            "strides": None,
        }
        self.__array_interface__["data"] = (self.__array_interface__["data"][0], False)
        self._owner = memoryview(data)


ChunkTensors: TypeAlias = list[tuple[Float[Tensor, "n G D"], Float[Tensor, "n G Dv"] | None]]
"""For every layer that stores something: keys [n, G, D], and values [n, G, Dv] if they are not in the keys."""


class BlockStorage:
    """Keys and values of one pool, one pair of tensors per layer.

        layer 0   K [N, P, G, D]    block 0 | block 1 | block 2 | …        N blocks of P slots
                  V [N, P, G, Dv]   block 0 | block 1 | block 2 | …
        layer 1   …

    Slot s is row s % P of block s // P, so neighbouring blocks are one strided view: reading a run copies nothing.
    Slots are uninitialized until they are written; only runs of written slots are ever read.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._kept: tuple[tuple[int, ...], ChunkTensors] | None = None
        """While asleep: block ids, and their contents."""
        self._allocate(num_blocks * block_size)

    def _allocate(self, num_slots: int) -> None:
        self._keys.clear()
        self._values.clear()
        for index, layer in enumerate(self.layers):
            if layer.source_layer != index:
                self._keys.append(self._keys[layer.source_layer])
                self._values.append(self._values[layer.source_layer])
                continue
            key = torch.empty(num_slots, layer.num_kv_heads, layer.key_dim, dtype=self.dtype, device=self.device)
            self._keys.append(key)
            if layer.value_in_key:
                self._values.append(key[..., : layer.value_dim])
            else:
                self._values.append(torch.empty(*key.shape[:2], layer.value_dim, dtype=self.dtype, device=self.device))

    @property
    def is_asleep(self) -> bool:
        """Whether its device memory is freed."""
        return self._kept is not None

    def sleep(self, block_ids: Sequence[int]) -> None:
        """Frees the device memory; the contents of these blocks move to host memory.

        On a CPU the two are the same, and only the other blocks are freed.
        """
        assert not self.is_asleep
        num_slots = len(block_ids) * self.block_size
        self._kept = tuple(block_ids), self.read_chunk(block_ids, num_slots) if block_ids else []
        self._allocate(0)

    def wake(self) -> None:
        """Allocates the device memory again and restores every block in place; does nothing while awake.

        If out of memory, raises torch's error and stays asleep.
        """
        if self._kept is None:
            return
        block_ids, chunk = self._kept
        try:
            self._allocate(self.num_blocks * self.block_size)
            if block_ids:
                self.write_chunk(block_ids, chunk)
        except BaseException:
            self._allocate(0)
            raise
        self._kept = None

    @property
    def num_slots(self) -> int:
        """Slots of the whole pool."""
        return self.num_blocks * self.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        per_token = self.dtype.itemsize * sum(layer.numbers_per_token for _, layer in stored_layers(self.layers))
        return per_token * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_block * self.num_blocks

    def write(
        self,
        layer_index: int,
        slots: Int[Tensor, " n"] | slice,
        keys: Float[Tensor, "n G D"],
        values: Float[Tensor, "n G Dv"],
    ) -> None:
        """Writes the keys [n, G, D] and values [n, G, Dv] of n tokens; layers that store nothing skip this."""
        layer = self.layers[layer_index]
        if layer.source_layer != layer_index:
            return
        self._keys[layer_index][slots] = keys
        if not layer.value_in_key:
            self._values[layer_index][slots] = values

    def run(
        self, layer_index: int, first_slot: int, num_tokens: int
    ) -> tuple[Float[Tensor, "n G D"], Float[Tensor, "n G Dv"]]:
        """Views of a run of slots: keys [num_tokens, G, D] and values [num_tokens, G, Dv]."""
        end = first_slot + num_tokens
        return self._keys[layer_index][first_slot:end], self._values[layer_index][first_slot:end]

    def get_kv(
        self, layer_index: int, runs: Sequence[tuple[int, int]]
    ) -> tuple[Float[Tensor, "n G D"], Float[Tensor, "n G Dv"]]:
        """Keys and values of runs of slots, in order, for example of `BlockTable.runs()`.

        One run, the usual case, is returned as views, which must not be written; several are copied into new tensors.

        Args:
            layer_index: the layer.
            runs: first slot and number of tokens of each.

        Returns:
            keys [n, G, D] and values [n, G, Dv].

        Raises:
            InvalidConfig: no such layer, or no runs.
        """
        if type(layer_index) is not int or not 0 <= layer_index < len(self.layers):
            raise InvalidConfig(
                f"there is no layer {layer_index!r:.80}; the model has layers 0 to {len(self.layers) - 1}"
            )
        if not runs:
            raise InvalidConfig("get_kv got no runs; a table without tokens has no keys and values")
        parts = [self.run(layer_index, first_slot, num_tokens) for first_slot, num_tokens in runs]
        if len(parts) == 1:
            return parts[0]
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values)

    def read_chunk(self, block_ids: Sequence[int], num_tokens: int) -> ChunkTensors:
        """Copies of the first `num_tokens` slots of these blocks, contiguous and on the CPU, all in one allocation.

        A run of neighbouring blocks is copied as one; from a device, every layer is one transfer. Preserved blocks can
        be read while asleep, too.
        """
        if self._kept is not None:
            return self._read_kept(*self._kept, block_ids, num_tokens)
        slots = _slots(block_ids, num_tokens, self.block_size, self.device)
        per_token = self.bytes_per_block // self.block_size
        buffer = new_bytes(per_token * num_tokens).view(self.dtype)
        chunk: ChunkTensors = []
        for index in range(len(self.layers)):
            if not (tensors := self._stored(index)):
                continue
            sizes = [num_tokens * tensor.shape[1] * tensor.shape[2] for tensor in tensors]
            flat, buffer = buffer[: sum(sizes)], buffer[sum(sizes) :]
            parts = [
                part.view(num_tokens, *tensor.shape[1:])
                for part, tensor in zip(torch.split(flat, sizes), tensors, strict=True)
            ]
            if self.device.type != "cpu":
                flat.copy_(torch.cat([tensor[slots].reshape(-1) for tensor in tensors]))
            else:
                for part, tensor in zip(parts, tensors, strict=True):
                    _read(tensor, slots, part)
            chunk.append((parts[0], parts[1] if len(parts) == 2 else None))
        return chunk

    def write_chunk(self, block_ids: Sequence[int], chunk: ChunkTensors, *, first_token: int = 0) -> None:
        """Writes a result of `read_chunk`, from some token on, into the first slots of these blocks.

        The block size may differ from that of the blocks that were read.
        """
        slots = _slots(block_ids, len(chunk[0][0]) - first_token, self.block_size, self.device)
        stored = [tensors for index in range(len(self.layers)) if (tensors := self._stored(index))]
        for targets, parts in zip(stored, chunk, strict=True):
            sources = [part for part in parts if part is not None]
            for target, source in zip(targets, sources, strict=True):
                assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
                target[slots] = source[first_token:].to(self.device)

    def _read_kept(
        self, kept_ids: Sequence[int], kept: ChunkTensors, block_ids: Sequence[int], num_tokens: int
    ) -> ChunkTensors:
        place = {block_id: number for number, block_id in enumerate(kept_ids)}
        slots = _slots([place[block_id] for block_id in block_ids], num_tokens, self.block_size, torch.device("cpu"))
        return [(keys[slots].clone(), None if values is None else values[slots].clone()) for keys, values in kept]

    def _stored(self, index: int) -> tuple[Tensor, ...]:
        """The tensors that a layer owns: keys and values, keys only, or nothing."""
        layer = self.layers[index]
        if layer.source_layer != index:
            return ()
        return (self._keys[index],) if layer.value_in_key else (self._keys[index], self._values[index])

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block in all layers (copy-on-write)."""
        size = self.block_size
        for index in range(len(self.layers)):
            for tensor in self._stored(index):
                tensor[target * size : (target + 1) * size] = tensor[source * size : (source + 1) * size]


def _slots(block_ids: Sequence[int], num_tokens: int, block_size: int, device: torch.device) -> slice | Tensor:
    """The first `num_tokens` slots of these blocks: a slice if they are contiguous, else [num_tokens] indexes."""
    first, count = block_ids[0], -(-num_tokens // block_size)
    assert 0 < count <= len(block_ids), f"{num_tokens} tokens do not fit into {len(block_ids)} blocks of {block_size}"
    if list(block_ids[:count]) == list(range(first, first + count)):
        return slice(first * block_size, first * block_size + num_tokens)
    starts = torch.tensor(list(block_ids[:count])) * block_size
    return (starts[:, None] + torch.arange(block_size)).reshape(-1)[:num_tokens].to(device)


def _read(tensor: Tensor, slots: slice | Tensor, target: Tensor) -> None:
    if isinstance(slots, slice):
        target.copy_(tensor[slots])
    else:
        torch.index_select(tensor, 0, slots, out=target)
