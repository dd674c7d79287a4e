"""The cache of vLLM's CPU attention: each block and head packed in the order of the machine's instructions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.layouts.layout import heads_of, numbered, require_plain, stand_in


class CpuWriter:
    """Writes through vLLM's own kernel, which knows the order of every instruction set."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [T, G, D] to slots [T] of a cache [N, G, P, 2D]."""
        keys, values = keys.contiguous(), values.contiguous()
        update = getattr(self.layer.impl, "do_kv_cache_update", None)
        if update is not None:
            update(self.layer, keys, values, cache, slots)
            return
        # before vLLM had that method, its forward called the kernel itself
        from vllm import _custom_ops as operations
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        num_blocks, num_heads, block_size, _ = cache.shape
        key_cache, value_cache = cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        instructions = _get_attn_isa(cache.dtype, block_size, keys.shape[-1])
        operations.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, instructions)


class CpuLayout:
    """Tokens found by where the kernel put numbers that were written to try it.

    cache [N, G, P, 2D], one block of one head:    │ 2·P·D numbers in an order that the kernel chose │
    key_places, value_places [P, G, D]:            where in a block token p keeps number d of head g

    Writing goes through the kernel; reading looks the places up.
    """

    is_latent = False

    def __init__(self, cache: Tensor, key_places: Tensor, value_places: Tensor, writer: CpuWriter) -> None:
        self.cache = cache
        self.writer = writer
        self.key_places = key_places
        self.value_places = value_places
        self.block_size, _, self.key_size = key_places.shape
        self.num_slots = cache.shape[0] * self.block_size

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> CpuLayout | None:
        """The layout of a layer of the CPU backend; None for a layer of another one.

        Raises:
            NotMovable: a quantized cache, or one whose numbers are not found again.
        """
        if not isinstance(kv_cache, Tensor) or layer.attn_backend.get_name() != "CPU_ATTN":
            return None
        require_plain(layer_name, kv_cache)
        num_heads, key_size, value_size = heads_of(layer)
        if kv_cache.dim() != 4 or kv_cache.shape[1] != num_heads or kv_cache.shape[3] != key_size + value_size:
            raise NotMovable(
                f"{layer_name} has a CPU cache of shape {tuple(kv_cache.shape)}; expected "
                f"[blocks, {num_heads}, block size, {key_size + value_size}]"
            )
        writer = CpuWriter(layer)
        key_places, value_places = _places(layer_name, kv_cache, writer, key_size, value_size)
        made: type[CpuLayout] = cls
        if torch.equal(key_places, _transposed(key_places.shape)) and torch.equal(
            value_places, _plain(value_places.shape)
        ):
            made = CpuVectorLayout
        return made(kv_cache, key_places, value_places, writer)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`."""
        numbers, block_numbers = self.cache.view(-1), self.cache[0].numel()
        blocks, offsets = slots // self.block_size, slots % self.block_size
        start = (blocks * block_numbers)[:, None, None]
        return numbers[start + self.key_places[offsets]], numbers[start + self.value_places[offsets]]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is not None
        self.writer(self.cache, slots, keys, values)


class CpuVectorLayout(CpuLayout):
    """The order of most instruction sets, read faster: keys transposed, then values.

    one block of one head:    │ keys [D, P] │ values [P, D] │

    P tokens, D numbers.
    """

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`."""
        num_blocks, num_heads = self.cache.shape[:2]
        halves = self.cache.view(num_blocks, num_heads, 2, -1)
        keys = halves[:, :, 0].view(num_blocks, num_heads, self.key_size, self.block_size)
        values = halves[:, :, 1].view(num_blocks, num_heads, self.block_size, self.key_size)
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return keys[blocks, :, :, offsets], values[blocks, :, offsets]


def _places(layer_name: str, cache: Tensor, writer: CpuWriter, key_size: int, value_size: int) -> tuple[Tensor, Tensor]:
    """Where in a block each number of each token lies: keys [P, G, D], values [P, G, Dv]."""
    trial = stand_in(cache, 0, num_blocks=1)
    _, num_heads, block_size, _ = trial.shape
    sizes = {"keys": key_size, "values": value_size}
    found = {}
    for which in sizes:
        total = block_size * num_heads * sizes[which]
        ranks = torch.arange(total).reshape(block_size, num_heads, sizes[which])
        rank_at = torch.zeros(trial.numel(), dtype=torch.int64)
        is_mine = torch.zeros(trial.numel(), dtype=torch.bool)
        # the kernel writes no numbers above 256 exactly in every type: rank = high digits · 128 + low digit, plus one
        for shift in range(0, max(1, total.bit_length()), 7):
            digit = (ranks >> shift) % 128 + 1
            given = {name: torch.zeros(block_size, num_heads, size) for name, size in sizes.items()}
            given[which] = digit
            trial.zero_()
            typed = {name: tensor.to(trial.dtype) for name, tensor in given.items()}
            writer(trial, torch.arange(block_size), typed["keys"], typed["values"])
            seen = trial.view(-1).to(torch.int64)
            is_mine |= seen > 0
            rank_at += (seen - 1).clamp(min=0) << shift
        places = torch.full((total,), -1)
        mine = is_mine.nonzero()[:, 0]
        if len(mine) != total or not torch.equal(rank_at[mine].sort().values, torch.arange(total)):
            raise NotMovable(f"{layer_name}: the {which} that the CPU kernel wrote are not found in its cache")
        places[rank_at[mine]] = mine
        found[which] = places.reshape(block_size, num_heads, sizes[which])
    _confirm(layer_name, cache, writer, found["keys"], found["values"])
    return found["keys"], found["values"]


def _confirm(layer_name: str, cache: Tensor, writer: CpuWriter, key_places: Tensor, value_places: Tensor) -> None:
    """Writes other numbers, to two blocks in another order of tokens, and finds them where the places say."""
    layout = CpuLayout(stand_in(cache, 0), key_places, value_places, writer)
    slots = torch.arange(layout.num_slots).flip(0)
    keys = numbered(len(slots), key_places.shape[1], key_places.shape[2], like=cache)
    values = numbered(len(slots), value_places.shape[1], value_places.shape[2], like=cache, first=7)
    layout.write(slots, keys, values)
    read_keys, read_values = layout.read(slots)
    if not torch.equal(read_keys, keys) or not torch.equal(read_values, values):
        raise NotMovable(f"{layer_name}: the CPU kernel packs tokens of a block together; they cannot be moved apart")


def _transposed(shape: torch.Size) -> Tensor:
    """[P, G, D]: the same number of all tokens of a block side by side, in the first half of a head's part."""
    block_size, num_heads, size = shape
    head = torch.arange(num_heads)[None, :, None] * (2 * block_size * size)
    return head + torch.arange(block_size)[:, None, None] + torch.arange(size) * block_size


def _plain(shape: torch.Size) -> Tensor:
    """[P, G, D]: the numbers of a token side by side, in the second half of a head's part."""
    block_size, num_heads, size = shape
    head = torch.arange(num_heads)[None, :, None] * (2 * block_size * size)
    return head + block_size * size + torch.arange(block_size)[:, None, None] * size + torch.arange(size)
