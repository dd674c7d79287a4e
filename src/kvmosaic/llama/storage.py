"""Keys and values of llama.cpp's cells, as our tiers, our swap space and `get_kv` take them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import RLock
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import InvalidConfig
from kvmosaic.layers import LayerGeometry
from kvmosaic.llama.cells import Cells
from kvmosaic.llama.state import LayerRows, MemoryState, SequenceState, pack

if TYPE_CHECKING:
    from torch import Tensor

    from kvmosaic.memory import ChunkTensors

Rows: TypeAlias = NDArray[np.uint8]

_DTYPES = {0: "float32", 1: "float16", 30: "bfloat16"}
"""Types of ggml whose rows are plain numbers."""
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""In bytes."""
_OPAQUE = "float16"
"""Quantized rows are kept as they are, two bytes a number."""


class LlamaStorage:
    """Slots of one pool.

    A chunk is its rows of keys and values, layer by layer, and a last layer with the position of each token: a cell has
    one, and its keys are rotated for it.
    """

    def __init__(
        self,
        cells: Cells,
        lock: RLock,
        layers: Sequence[LayerGeometry],
        first_slot: int,
        num_blocks: int,
        block_size: int,
        template: SequenceState,
        window_layers: Sequence[bool] = (),
    ) -> None:
        """Describes the slots of a pool.

        Args:
            cells: where the slots are.
            lock: held while the memory is used.
            layers: geometry of the model's layers.
            first_slot: the first of this pool.
            num_blocks: blocks of this pool.
            block_size: slots of a block.
            template: any saved sequence of this model with a cell.
            window_layers: whether each layer has a sliding window, if that is known.
        """
        saved = [pair for memory in template.memories for pair in zip(memory.keys, memory.values, strict=True)]
        self.dtype = _DTYPES.get(saved[0][0].kind, _OPAQUE)
        self.is_opaque = any(_DTYPES.get(rows.kind) != self.dtype for pair in saved for rows in pair)
        if self.is_opaque:
            self.dtype = _OPAQUE
        self._size = _SIZES[self.dtype]
        widths = [tuple(rows.rows.shape[1] // self._size for rows in pair) for pair in saved]
        self._order = _saved_order([len(memory.keys) for memory in template.memories], window_layers)
        ordered = [layers[index] for index in self._order if index < len(layers)]
        shapes = [(layer.num_kv_heads, layer.key_dim, layer.value_dim) for layer in ordered]
        if self.is_opaque or [(heads * key, heads * value) for heads, key, value in shapes] != widths:
            shapes = [(1, key, value) for key, value in widths]
        layers = [LayerGeometry(index, *shape) for index, shape in enumerate(shapes)]
        per_position = 4 // self._size
        self.layers = (*layers, LayerGeometry(len(saved), 1, per_position, per_position, value_in_key=True))
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._cells = cells
        self._lock = lock
        self._first_slot = first_slot
        self._template = template

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self._size * sum(layer.numbers_per_token for layer in self.layers) * self.block_size

    def read_chunk(self, block_ids: Sequence[int], num_tokens: int) -> ChunkTensors:
        """Copies of the first `num_tokens` slots of these blocks; any thread may ask."""
        return self._read(self._slots(block_ids, num_tokens))

    def write_chunk(self, block_ids: Sequence[int], chunk: ChunkTensors, *, first_token: int = 0) -> None:
        """Writes a result of `read_chunk`, from some token on, into the first slots of these blocks."""
        places, layers = _rows(chunk[-1][0][first_token:]).view(np.int32).reshape(-1), iter(chunk)
        positions = places.tolist()
        memories: list[MemoryState] = []
        for memory in self._template.memories:
            keys, values = [], []
            for key, value in zip(memory.keys, memory.values, strict=True):
                key_tensor, value_tensor = next(layers)
                assert value_tensor is not None
                keys.append(LayerRows(key.kind, _rows(key_tensor[first_token:])))
                values.append(LayerRows(value.kind, _rows(value_tensor[first_token:])))
            memories.append(MemoryState(places, tuple(keys), tuple(values), memory.rotations))
        state = pack(SequenceState(self._template.header, tuple(memories)))
        with self._lock:
            self._cells.load(self._slots(block_ids, len(positions)), positions, state)

    def get_kv(self, layer_index: int, runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Copies of the keys [n, G, D] and values [n, G, Dv] of runs of slots, in order; see `BlockStorage.get_kv`.

        Raises:
            InvalidConfig: no such layer, no runs, or keys and values are quantized.
        """
        if type(layer_index) is not int or not 0 <= layer_index < len(self.layers) - 1:
            raise InvalidConfig(
                f"there is no layer {layer_index!r:.80}; the model has layers 0 to {len(self.layers) - 2}"
            )
        if self.is_opaque:
            raise InvalidConfig("keys and values are quantized, and get_kv gives numbers; use a cache of f16 or f32")
        if not self._order:
            raise InvalidConfig(
                "get_kv does not know the layers: llama.cpp keeps those with sliding windows apart and did not say "
                "which they are when it loaded the model; take engine='transformers'"
            )
        if not runs:
            raise InvalidConfig("get_kv got no runs; a table without tokens has no keys and values")
        slots = [self._first_slot + first + offset for first, count in runs for offset in range(count)]
        key, value = self._read(slots)[self._order.index(layer_index)]
        assert value is not None
        return key, value

    def _read(self, slots: Sequence[int]) -> ChunkTensors:
        with self._lock:
            state = self._cells.read(slots)
        chunk: ChunkTensors = []
        for memory in state.memories:
            for key, value in zip(memory.keys, memory.values, strict=True):
                layer = self.layers[len(chunk)]
                chunk.append(
                    (self._tensor(key.rows, layer, layer.key_dim), self._tensor(value.rows, layer, layer.value_dim))
                )
        places = np.asarray(state.positions, np.int32).view(np.uint8).reshape(len(slots), -1)
        return [*chunk, (self._tensor(places, self.layers[-1], -1), None)]

    def _tensor(self, rows: Rows, layer: LayerGeometry, width: int) -> Tensor:
        import torch

        return torch.from_numpy(rows).view(getattr(torch, self.dtype)).view(len(rows), layer.num_kv_heads, width)

    def _slots(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        size = self.block_size
        return [self._first_slot + block_ids[number // size] * size + number % size for number in range(num_tokens)]


def _saved_order(counts: Sequence[int], window_layers: Sequence[bool]) -> list[int]:
    """Indexes of layers in the order in which they are saved; [] if it is not known.

    Args:
        counts: number of layers of each memory: without windows, and with windows in a second one.
        window_layers: whether each layer has a window.
    """
    if len(counts) == 1:
        return list(range(counts[0]))
    order = sorted(range(len(window_layers)), key=window_layers.__getitem__)
    return order if counts == [window_layers.count(False), window_layers.count(True)] else []


def _rows(tensor: Tensor) -> Rows:
    """The bytes of each token's row, [n, bytes]."""
    import torch

    found: Rows = tensor.contiguous().view(torch.uint8).reshape(len(tensor), -1).numpy()
    return found
