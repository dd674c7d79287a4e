from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.worker.stand_ins import (
    KEY,
    LATENT,
    TURNING,
    AttentionModule,
    CpuVector,
    Layer,
    Model,
    Rotary,
    cache_of,
    config_of,
)
from torch import nn

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.kv_layout import KVLayout, ModuleTree


def places_of(module: nn.Module, layer: Layer, cache: Any, **changes: Any) -> KVLayout:
    config = config_of({"model.layers.0": layer})
    for name, value in changes.items():
        setattr(config.parallel_config if "parallel" in name else config.cache_config, name, value)
    assert module is not None, "kept alive while its children are looked for"
    return KVLayout.of(config, {"model.layers.0": cache})


def test_the_rotation_is_found_beside_the_layer_and_the_model_around_it() -> None:
    layer, cache = cache_of("cpu vector")
    rotary = Rotary(4)
    model = Model(AttentionModule(layer, rotary))
    (place,) = places_of(model, layer, cache).layers
    assert place.rotation is not None and place.rotation.rotary is rotary
    assert (place.rotation.first, place.rotation.rotary_dim) == (0, 4)
    assert places_of(model, layer, cache).root is model


def test_a_wrapper_between_the_layer_and_its_rotation_is_climbed_over() -> None:
    layer, cache = cache_of("latent")
    rotary = Rotary(TURNING, is_neox_style=False, head_size=TURNING)
    wrapper = AttentionModule(layer, None)
    model = Model(AttentionModule(wrapper, rotary))
    (place,) = places_of(model, layer, cache).layers
    assert place.rotation is not None
    assert (place.rotation.first, place.rotation.layout) == (LATENT, "interleaved")


def test_a_rotary_part_that_is_joined_to_the_rest_of_the_key_is_its_end() -> None:
    layer, cache = cache_of("joined by head")
    model = Model(AttentionModule(layer, Rotary(4, head_size=4)))
    (place,) = places_of(model, layer, cache).layers
    assert place.rotation is not None and place.rotation.first == KEY - 4


@pytest.mark.parametrize("says", [{"use_rope": False}, {"nope": True}])
def test_a_layer_that_says_it_does_not_turn_is_believed(says: dict[str, bool]) -> None:
    layers = dict(zip(("one", "two"), (cache_of("cpu vector"), cache_of("cpu vector")), strict=True))
    rotary = Rotary()
    model = Model(AttentionModule(layers["one"][0], rotary), AttentionModule(layers["two"][0], rotary, **says))
    config = config_of({name: layer for name, (layer, _) in layers.items()})
    places = KVLayout.of(config, {name: cache for name, (_, cache) in layers.items()})
    assert [place.rotation is None for place in places.layers] == [False, True] and places.root is model


def test_the_rotation_of_another_layer_is_not_taken() -> None:
    with_one, without = cache_of("cpu vector"), cache_of("cpu vector")
    tower = Model(AttentionModule(with_one[0], Rotary()), AttentionModule(without[0], None))
    config = config_of({"one": with_one[0], "two": without[0]})
    places = KVLayout.of(config, {"one": with_one[1], "two": without[1]})
    assert places.layers[1].rotation is None and places.root is tower


def test_of_several_embeddings_the_one_named_so_is_taken() -> None:
    layer, cache = cache_of("cpu vector")
    rotary = Rotary()
    module = AttentionModule(layer, rotary, indexer_rope_emb=Rotary())
    assert places_of(module, layer, cache).layers[0].rotation.rotary is rotary  # type: ignore[union-attr]
    module.rotary_emb = None
    module.other_emb = Rotary()
    with pytest.raises(NotMovable, match="several rotary embeddings"):
        places_of(module, layer, cache)


def test_modules_are_found_also_after_vllm_froze_them_for_the_collector() -> None:
    layer, _ = cache_of("cpu vector")
    model = Model(AttentionModule(layer, Rotary()))
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert ModuleTree().root(layer) is model
        assert gc.get_freeze_count() >= frozen // 2, "and are frozen again"
    finally:
        gc.unfreeze()


class StaticSinkAttention(type("Attention", (Layer,), {})):  # type: ignore[misc]
    __module__ = "vllm.model_executor.layers.attention.static_sink_attention"


class Alibi(CpuVector):
    alibi_slopes = torch.ones(2)


def layer_with(**attributes: Any) -> Layer:
    return Layer(attributes.pop("impl", CpuVector()), "CPU_ATTN", **attributes)


REFUSED: dict[str, tuple[Any, str]] = {
    "chunks of positions": (layer_with(attention_chunk_size=64), "by chunks of positions"),
    "another layer's cache": (layer_with(kv_sharing_target_layer_name="model.layers.7"), "cache of another layer"),
    "an encoder": (layer_with(attn_type="encoder_only"), "of an encoder"),
    "a bias": (layer_with(impl=Alibi()), "ALiBi"),
    "states": (SimpleNamespace(), "SimpleNamespace. keeps something else"),
    "sinks": (StaticSinkAttention(CpuVector()), "is a StaticSinkAttention"),
    "no module": (layer_with(), "no module of the model holds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_composed_is_named_with_the_reason(name: str) -> None:
    layer, reason = REFUSED[name]
    with pytest.raises(NotMovable, match=f"^model.layers.0 .*{reason}|^model.layers.0: .*{reason}"):
        places_of(nn.Module(), layer, cache_of("cpu vector")[1])


class FullAttentionSpec(SimpleNamespace):
    """As vLLM names what keeps all tokens."""


class SlidingWindowSpec(SimpleNamespace):
    """As vLLM names what frees them."""


@pytest.mark.parametrize("spec", [FullAttentionSpec, SlidingWindowSpec])
def test_a_layer_with_a_window_is_composed_if_its_cache_keeps_all_tokens(spec: type) -> None:
    layer = layer_with(sliding_window=512)
    model = Model(AttentionModule(layer, Rotary(4)))
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec(block_size=16, sliding_window=512))])
    caches = {"model.layers.0": cache_of("cpu vector")[1]}
    if spec is SlidingWindowSpec:
        with pytest.raises(NotMovable, match="has a window, and a cache without the tokens before it"):
            KVLayout.of(config_of({"model.layers.0": layer}), caches, groups)
        return
    (place,) = KVLayout.of(config_of({"model.layers.0": layer}), caches, groups).layers
    assert place.window == 512 and model is not None


def test_a_model_without_any_rotation_is_refused() -> None:
    layer, cache = cache_of("cpu vector")
    with pytest.raises(NotMovable, match="no layer has a rotary embedding"):
        places_of(Model(AttentionModule(layer, None)), layer, cache)


def test_a_rotation_outside_the_layers_is_nobodys() -> None:
    layer, cache = cache_of("cpu vector")
    model = Model(AttentionModule(layer, None))
    model.rotary_emb = Rotary()
    with pytest.raises(NotMovable, match="no layer has a rotary embedding"):
        places_of(model, layer, cache)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_tokens_spread_over_workers_are_refused(name: str) -> None:
    layer, cache = cache_of("cpu vector")
    with pytest.raises(NotMovable, match=f"{name} is 2"):
        places_of(Model(AttentionModule(layer, Rotary())), layer, cache, **{name: 2})


def test_the_scheduler_says_how_large_its_blocks_are() -> None:
    layer, cache = cache_of("cpu vector")
    model = Model(AttentionModule(layer, Rotary()))
    config = config_of({"one": layer})
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    places = KVLayout.of(config, {"one": cache}, SimpleNamespace(kv_cache_groups=[group]))
    assert (places.block_size, places.num_blocks, places.root) == (16, 3, model)
    with pytest.raises(NotMovable, match="2 groups with blocks of their own"):
        KVLayout.of(config, {"one": cache}, SimpleNamespace(kv_cache_groups=[group, group]))


def test_blocks_that_do_not_fill_those_of_the_scheduler_are_refused() -> None:
    layer, cache = cache_of("cpu vector")
    with pytest.raises(NotMovable, match="blocks of 8 tokens, which do not fill the scheduler's blocks of 12"):
        places_of(Model(AttentionModule(layer, Rotary())), layer, cache, block_size=12)


def test_caches_without_a_layer_and_no_caches_are_refused() -> None:
    with pytest.raises(NotMovable, match="ALL_LAYERS belongs to no attention layer"):
        KVLayout.of(config_of({}), {"ALL_LAYERS": torch.zeros(1)})
    with pytest.raises(NotMovable, match="no layer with a cache"):
        KVLayout.of(config_of({}), {})
