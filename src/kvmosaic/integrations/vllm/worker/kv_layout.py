"""KV layout of a worker: cache layout and key rotation of its attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.key_rotation import KeyRotation, find_key_rotation
from kvmosaic.integrations.vllm.worker.layouts import KeyValueLayout, find_layout
from kvmosaic.integrations.vllm.worker.modules import ModuleTree, require_attention


@dataclass(frozen=True, eq=False, slots=True)
class LayerPlace:
    """One attention layer, its cache layout and rotation."""

    name: str
    layer: Any
    """vLLM's attention layer."""
    layout: KeyValueLayout
    rotation: KeyRotation | None
    """Layers with equal rotations share one; None: keys of this layer do not depend on their position."""


@dataclass(frozen=True, eq=False, slots=True)
class KVLayout:
    """The attention layers of one worker, all of which store a token in the same slot."""

    layers: tuple[LayerPlace, ...]
    block_size: int
    """Tokens per block, as the scheduler counts them."""
    num_blocks: int
    device: torch.device
    root: nn.Module
    """The model, called with token ids and positions."""

    @classmethod
    def of(cls, vllm_config: Any, kv_caches: Mapping[str, Any], kv_cache_config: Any = None) -> KVLayout:
        """Finds the layout of every layer that has a cache.

        Args:
            vllm_config: vLLM's configuration, after the model was loaded.
            kv_caches: argument of `register_kv_caches`: a cache for each layer's name.
            kv_cache_config: how the scheduler splits them into blocks; None: as the configuration says.

        Raises:
            NotMovable: some layer cannot be moved; the message names it and the reason.
        """
        _require_whole_tokens(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        dtype = vllm_config.model_config.dtype
        if not kv_caches:
            raise NotMovable("the model has no layer with a cache of keys and values")
        tree = ModuleTree()
        turnings: dict[tuple[int, int], KeyRotation] = {}
        places = []
        for name, kv_cache in kv_caches.items():
            layer = layers.get(name)
            if layer is None:
                raise NotMovable(f"the cache {name} belongs to no attention layer")
            require_attention(name, layer)
            layout = find_layout(name, layer, kv_cache)
            rotation = None
            rotary = tree.rotary(name, layer)
            if rotary is not None:
                at_end = layout.is_latent or int(getattr(rotary, "head_size", layout.key_size)) < layout.key_size
                rotation = find_key_rotation(name, rotary, dtype, layout.key_size, at_end=at_end)
                if getattr(layout, "is_sorted_apart", False):
                    rotation = replace(rotation, is_interleaved=False)
                rotation = turnings.setdefault((id(rotary), rotation.first), rotation)
            places.append(LayerPlace(name, layer, layout, rotation))
        if not turnings:
            raise NotMovable(
                "no layer has a rotary embedding of vLLM's: positions are learned, or keys are turned where it is not "
                "seen (--model-impl transformers); such models cannot be composed"
            )
        block_size = _block_size(vllm_config, kv_cache_config)
        for place in places:
            if block_size % place.layout.block_size:
                raise NotMovable(
                    f"{place.name} has blocks of {place.layout.block_size} tokens, which do not fill the scheduler's "
                    f"blocks of {block_size}"
                )
        first = next(iter(kv_caches.values()))
        return cls(
            layers=tuple(places),
            block_size=block_size,
            num_blocks=min(place.layout.num_slots for place in places) // block_size,
            device=first.device if isinstance(first, Tensor) else first[0].device,
            root=tree.root(places[0].layer),
        )

    def slots(self, blocks: Sequence[int], start: int, num_tokens: int) -> Tensor:
        """[num_tokens] int64, on the host: slots of tokens `start …` of a run of blocks."""
        index = torch.arange(start, start + num_tokens)
        wanted = blocks[start // self.block_size : -(-(start + num_tokens) // self.block_size)]
        if not wanted or len(wanted) * self.block_size < start % self.block_size + num_tokens:
            raise ValueError(f"tokens {start} to {start + num_tokens} lie outside {len(blocks)} blocks")
        for block in (min(wanted), max(wanted)):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} of a cache with {self.num_blocks} blocks")
        offset = index - start // self.block_size * self.block_size
        return torch.tensor(wanted)[offset // self.block_size] * self.block_size + index % self.block_size

    def require(self, position: int) -> None:
        """Raises `PromptTooLong` if the table of some layer has no such position."""
        for rotation in {place.rotation for place in self.layers if place.rotation is not None}:
            rotation.require(position)


def _block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    if kv_cache_config is None:
        return int(vllm_config.cache_config.block_size)
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise NotMovable(f"the layers are in {len(groups)} groups with blocks of their own; only one can be moved")
    return int(groups[0].kv_cache_spec.block_size)


def _require_whole_tokens(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise NotMovable(f"{name} is {getattr(parallel, name)}: tokens of a block lie on several workers")
