"""Latent attention: what is kept, and that transformers still works on the same module."""

from __future__ import annotations

import pytest
import torch
from support.families import FAMILIES, build
from support.loaded import dense_layout, dense_logits, loaded_family, random_prompt

from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.model import LoadedModel
from kvmosaic.model.hook import LATENT_ATTRIBUTE
from kvmosaic.model.latent import can_keep_latent, expand_again

LATENT = [name for name, about in FAMILIES.items() if "kv_lora_rank" in about.settings and not about.is_refused]


@pytest.mark.parametrize("family", LATENT)
def test_latent_layers_keep_one_head_whose_beginning_is_the_value(family: str) -> None:
    calls: list[AttentionCall] = []
    model = loaded_family(family)

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.value.expand(-1, 4, -1)

    model.forward(torch.arange(3, 8), torch.arange(5), torch.tensor([4]), record)
    calls.sort(key=lambda call: call.layer_index)
    assert len(calls) == len(model.layers)
    for layer, call in zip(model.layers, calls, strict=True):
        if layer.num_chosen:
            continue
        assert layer.value_in_key
        assert (layer.num_query_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim) == (4, 1, 40, 32)
        assert call.query.shape == (5, 4, 40)
        assert call.key.shape == (5, 1, 40)
        assert call.value.data_ptr() == call.key.data_ptr()
        assert torch.equal(call.value, call.key[..., :32])
        assert layer.bytes_per_token(torch.bfloat16) == 40 * 2


@pytest.mark.parametrize("family", LATENT)
def test_latent_and_expanded_attention_give_the_same_logits(family: str) -> None:
    latent, layout = loaded_family(family), dense_layout(random_prompt())
    module = build(family)
    expanded = LoadedModel.from_module(module)
    plain_layers = []
    modules = _attention_modules(module)
    for layer, part in zip(expanded.layers[: len(modules)], modules, strict=True):
        expand_again(part)
        rotation = layer.rotation.at(16, 24) if layer.rotation else None
        plain_layers.append(LayerSpec(layer.index, 4, 24, 12, False, layer.index, 4, layer.mask, rotation=rotation))
    expanded.layers = (*plain_layers, *expanded.layers[len(modules) :])
    assert (dense_logits(latent, layout) - dense_logits(expanded, layout)).abs().max() <= 1e-12


def test_only_modules_that_expand_latents_are_switched() -> None:
    assert not any(can_keep_latent(part) for part in build("llama").modules())
    parts = [part for part in build("deepseek_v3").modules() if can_keep_latent(part)]
    assert len(parts) == 2
    assert all(LATENT_ATTRIBUTE not in part.__dict__ for part in parts)
    parts[0].kv_b_proj.bias = torch.nn.Parameter(torch.zeros(112))
    assert not can_keep_latent(parts[0])


def test_an_expansion_that_is_not_linear_stays_expanded() -> None:
    module = build("deepseek_v3")
    odd = next(part for part in module.modules() if can_keep_latent(part))
    written = type(odd).expand_kv

    class Odd(type(odd)):
        def expand_kv(self, latent, rotary):
            key, value = written(self, latent, rotary)
            return key, value * value.abs()

    odd.__class__ = Odd
    model = LoadedModel.from_module(module)
    assert [layer.value_in_key for layer in model.layers] == [False, False]
    assert (model.layers[0].num_kv_heads, model.layers[0].key_dim, model.layers[0].value_dim) == (4, 24, 12)


def test_loading_again_finds_the_same_layers() -> None:
    module = build("deepseek_v2")
    assert LoadedModel.from_module(module).layers == LoadedModel.from_module(module).layers


def _attention_modules(module: torch.nn.Module) -> list[torch.nn.Module]:
    return sorted((part for part in module.modules() if can_keep_latent(part)), key=lambda part: part.layer_idx)
