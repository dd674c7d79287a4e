"""Faults planted in one layer of a model that runs inside vLLM, each of which makes composed prompts wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.vllm.worker.extra_forward import ExtraForward
from kvmosaic.vllm.worker.kv_layout import KVLayout

FAR = 600
BACK = 64


def places_of(engine: Any) -> tuple[KVLayout, ExtraForward]:
    """What the plugin finds of a model, and its nested forward."""
    worker = engine.core.model_executor.driver_worker.worker
    layers = worker.vllm_config.compilation_config.static_forward_context
    caches = {name: each.kv_cache for name, each in layers.items() if hasattr(each, "kv_cache")}
    places = KVLayout.of(worker.vllm_config, caches)
    return places, ExtraForward(worker.vllm_config, worker.model_runner.kv_cache_config, places.root)


class Rotation(nn.Module):
    """A rotary embedding with a fault; `change(positions, query, key, original)` gives what it returns."""

    def __init__(self, original: nn.Module, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        object.__setattr__(self, "original", original)  # not a child, so that it is still found where it was
        self.change = change

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return self.change(positions, query, key, self.original)


def _elsewhere(positions: Tensor, original: Any, place: Callable[[Tensor], Tensor]) -> Tensor:
    return place(positions).clamp(0, len(original.cos_sin_cache) - 1)


def _column(positions: Tensor, value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


def other_frequency(positions: Tensor, query: Tensor, key: Tensor, original: Any) -> tuple[Tensor, Tensor]:
    return original(_elsewhere(positions, original, lambda at: at * 9 // 8), query, key)


def other_way_far_out(positions: Tensor, query: Tensor, key: Tensor, original: Any) -> tuple[Tensor, Tensor]:
    """As if a scaling of the angles were switched on there."""
    return original(
        _elsewhere(positions, original, lambda at: torch.where(at > FAR, FAR + (at - FAR) // 2, at)), query, key
    )


def larger_keys_far_out(positions: Tensor, query: Tensor, key: Tensor, original: Any) -> tuple[Tensor, Tensor]:
    query, key = original(positions, query, key)
    return query, key * _column(positions, torch.where(positions > FAR, 1.05, 1.0), key)


def queries_grow_by_the_log(positions: Tensor, query: Tensor, key: Tensor, original: Any) -> tuple[Tensor, Tensor]:
    query, key = original(positions, query, key)
    grown = torch.where(positions > FAR, (positions.clamp(min=1).double() / FAR).log() * 0.2 + 1.05, 1.0)
    return query * _column(positions, grown, query), key


def smaller_keys(positions: Tensor, query: Tensor, key: Tensor, original: Any) -> tuple[Tensor, Tensor]:
    """By a factor that falls with every position."""
    query, key = original(positions, query, key)
    return query, key * _column(positions, 1 - positions.double() * 1e-3, key)


ROTATIONS = (
    other_frequency,
    other_way_far_out,
    larger_keys_far_out,
    queries_grow_by_the_log,
    smaller_keys,
)


@contextmanager
def rotation(places: KVLayout, layer: int, change: Any) -> Iterator[None]:
    """A layer's rotary embedding with a fault of its own."""
    module = _holder(places, layer)
    original = module.rotary_emb
    module.rotary_emb = Rotation(original, change)
    try:
        yield
    finally:
        module.rotary_emb = original


@contextmanager
def _method(owner: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """`change(original, *args, **kwargs)` in the place of a method of one object."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def window(places: KVLayout, layer: int) -> Iterator[None]:
    """The kernel of a layer sees the last tokens only."""
    implementation = places.layers[layer].layer.impl
    original = implementation.sliding_window
    implementation.sliding_window = BACK
    try:
        yield
    finally:
        implementation.sliding_window = original


def kernel_scale(places: KVLayout, layer: int) -> Any:
    """The kernel of a layer multiplies its scores once more."""

    def change(original: Any, **given: Any) -> Any:
        return original(**{**given, "query": given["query"] * 1.2})

    return _named(places, layer, change)


def longer_is_sharper(places: KVLayout, layer: int) -> Any:
    """The kernel of a layer multiplies its scores by the log of how many tokens there are, from `FAR` on."""

    def change(original: Any, **given: Any) -> Any:
        metadata, query = given["attn_metadata"], given["query"].clone()
        starts = metadata.query_start_loc.tolist()
        for row, length in enumerate(metadata.seq_lens.tolist()):
            if length > FAR:
                query[starts[row] : starts[row + 1]] *= 1 + float(torch.tensor(float(length)).log()) / 10
        return original(**{**given, "query": query})

    return _named(places, layer, change)


def _named(places: KVLayout, layer: int, change: Any) -> Any:
    names = ("layer", "query", "key", "value", "kv_cache", "attn_metadata")

    def by_name(original: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original, **dict(zip(names, args, strict=False)), **kwargs)

    return _method(places.layers[layer].layer.impl, "forward", by_name)


def stored_elsewhere(places: KVLayout, layer: int) -> Any:
    """The kernel of a layer writes neighbouring tokens into each other's slots."""
    return _stored(places, layer, lambda key, value, slots: (key, value, slots ^ 1))


def stored_values_smaller(places: KVLayout, layer: int) -> Any:
    """The kernel of a layer writes other values than it was given."""
    return _stored(places, layer, lambda key, value, slots: (key, value * 0.95, slots))


def _stored(places: KVLayout, layer: int, change: Any) -> Any:
    def write(original: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        key, value, slots = change(key, value, slots)
        original(layer, key.contiguous(), value.contiguous(), cache, slots)

    return _method(places.layers[layer].layer.impl, "do_kv_cache_update", write)


def mixed_input(places: KVLayout, layer: int) -> Any:
    """A layer is also given a part of what stands 64 tokens back."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "hidden_states": _mixed(kwargs["hidden_states"])})

    return _method(_holder(places, layer), "forward", change)


def far_output_smaller(places: KVLayout, layer: int) -> Any:
    """What a layer's attention gives is scaled far out."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        found, positions = original(*args, **kwargs), kwargs["positions"]
        return found * _column(positions, torch.where(positions > FAR, 0.9, 1.0), found)

    return _method(_holder(places, layer), "forward", change)


def mixed_embeddings(places: KVLayout, layer: int) -> Any:
    """The model is given a part of what stands 64 tokens back."""
    embedding = next(module for name, module in places.root.named_modules() if name.endswith("embed_tokens"))
    return _method(embedding, "forward", lambda original, *args: _mixed(original(*args)))


def _mixed(hidden: Tensor) -> Tensor:
    if len(hidden) <= BACK:
        return hidden
    return torch.cat([hidden[:BACK], 0.8 * hidden[BACK:] + 0.2 * hidden[:-BACK]])


OTHERS = (
    window,
    kernel_scale,
    longer_is_sharper,
    stored_elsewhere,
    stored_values_smaller,
    mixed_input,
    far_output_smaller,
)


def _holder(places: KVLayout, layer: int) -> Any:
    """The attention module around an attention layer."""
    wanted = places.layers[layer].layer
    return next(module for module in places.root.modules() if any(child is wanted for child in module.children()))
