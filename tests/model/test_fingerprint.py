"""A model's identity."""

from __future__ import annotations

import pytest
import torch
from support.families import build

from kvmosaic.model import LoadedModel
from kvmosaic.model.fingerprint import fingerprint


def _fingerprint(model: torch.nn.Module) -> str:
    return fingerprint(model, model.config)


def test_equal_models_have_equal_fingerprints() -> None:
    assert _fingerprint(build("llama")) == _fingerprint(build("llama"))
    assert len(_fingerprint(build("llama"))) == 64


@pytest.mark.parametrize(
    "other",
    [
        lambda: build("llama", seed=1),
        lambda: build("llama", torch.float32),
        lambda: build("llama", rms_norm_eps=1e-3),
        lambda: build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}),
        lambda: build("mistral"),
    ],
    ids=["weights", "dtype", "setting", "base", "architecture"],
)
def test_anything_that_changes_the_keys_changes_the_fingerprint(other) -> None:
    assert _fingerprint(other()) != _fingerprint(build("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_changes_the_fingerprint(dtype) -> None:
    model = build("llama", dtype)
    before = _fingerprint(model)
    weight = model.model.layers[1].self_attn.k_proj.weight
    weight.add_(0.05 * torch.randn(weight.shape[0], 1).to(dtype) @ torch.randn(1, weight.shape[1]).to(dtype))
    assert _fingerprint(model) != before


def test_weights_in_buffers_count() -> None:
    """As in layers of 4 or 8 bits."""

    class Quantized(torch.nn.Module):
        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.register_buffer("qweight", linear.weight.detach().clone())

    first, second = build("llama"), build("llama")
    second.model.layers[0].self_attn.k_proj.weight.add_(0.1)
    for model in (first, second):
        attention = model.model.layers[0].self_attn
        attention.k_proj = Quantized(attention.k_proj)
    assert _fingerprint(first) != _fingerprint(second)


@pytest.mark.parametrize(
    ("name", "value"), [("_active_adapter", ["b"]), ("_disable_adapters", True), ("scaling", {"a": 2.0})]
)
def test_an_adapter_that_is_switched_changes_the_fingerprint(name, value) -> None:
    model = build("llama")
    layer = model.model.layers[0].self_attn.k_proj
    layer._active_adapter, layer._disable_adapters, layer.scaling = ["a"], False, {"a": 1.0}
    before = _fingerprint(model)
    setattr(layer, name, value)
    assert _fingerprint(model) != before


def test_where_a_model_came_from_does_not_matter(tmp_path) -> None:
    model = build("llama", torch.float32)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert _fingerprint(again) == _fingerprint(model)


def test_loading_does_not_change_the_fingerprint() -> None:
    model = build("deepseek_v3")
    before = _fingerprint(model)
    assert LoadedModel.from_module(model).fingerprint == before
    assert LoadedModel.from_module(model, fingerprint="given").fingerprint == "given"
