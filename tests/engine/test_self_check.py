"""The self-check passes on sound models and catches planted errors in rotation, mask and storage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.families import FAMILIES, build

from kvmosaic.attention import TorchBackend
from kvmosaic.engine.self_check import run_self_check
from kvmosaic.memory import BlockStorage
from kvmosaic.model import LoadedModel, MaskSpec


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "cohere2", "gpt2", "mixtral"])
def test_sound_models_pass(family, dtype):
    result = run_self_check(LoadedModel.from_module(build(family, dtype)))
    assert result.passed and result.reason == ""
    assert result.is_moved == FAMILIES[family].is_movable


def broken(model: LoadedModel, **changes: object) -> LoadedModel:
    model.layers = tuple(replace(layer, **changes) for layer in model.layers)
    return model


@pytest.fixture
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float32))


def test_a_wrong_frequency_is_caught(model):
    rotation = model.layers[0].rotation
    wrong = replace(rotation, inv_freq=tuple(1.05 * frequency for frequency in rotation.inv_freq))
    result = run_self_check(broken(model, rotation=wrong))
    assert not result.passed and "standard deviations" in result.reason
    assert result.plain_difference < result.limit, "a prompt without moves does not show it"


def test_a_wrong_direction_and_a_wrong_layout_are_caught(model):
    rotation = model.layers[0].rotation
    for wrong in (replace(rotation, sign=-1), replace(rotation, layout="interleaved")):
        assert not run_self_check(broken(model, rotation=wrong)).passed


def test_a_wrong_mask_is_caught(model):
    assert not run_self_check(broken(model, mask=MaskSpec("window", 7))).passed
    windows = LoadedModel.from_module(build("mistral", torch.float32))
    assert windows.layers[0].mask.kind == "window"
    assert not run_self_check(broken(windows, mask=MaskSpec())).passed


@pytest.mark.parametrize("fault", ["off by one slot", "keys of another layer", "values lost", "one number flipped"])
def test_a_wrong_byte_in_storage_is_caught(model, monkeypatch, fault):
    write = BlockStorage.write

    def wrong_write(self, layer_index, slots, keys, values):
        if fault == "off by one slot" and isinstance(slots, slice):
            slots = slice(slots.start + 1, slots.stop + 1)
        if fault == "keys of another layer" and layer_index == 1:
            keys = keys.flip(0)
        if fault == "values lost":
            values = torch.zeros_like(values)
        if fault == "one number flipped":
            keys = keys.clone()
            keys[-1] = -keys[-1]
        write(self, layer_index, slots, keys, values)

    monkeypatch.setattr(BlockStorage, "write", wrong_write)
    assert not run_self_check(model).passed


def test_a_wrong_backend_is_caught(model):
    class Forgetful(TorchBackend):
        def attend(self, query, key, value, **options):
            output, lse = super().attend(query, key, value, **options)
            return output, lse + 0.5 * (key.shape[0] > 8)

    assert not run_self_check(model, Forgetful()).passed


@pytest.mark.parametrize("num_keys", [7, 13, 33])
def test_a_backend_that_gives_no_numbers_is_caught(model, num_keys):
    class NotANumber(TorchBackend):
        def attend(self, query, key, value, **options):
            output, lse = super().attend(query, key, value, **options)
            return output * (torch.nan if key.shape[0] == num_keys else 1.0), lse

    result = run_self_check(model, NotANumber())
    assert not result.passed and "inf" in result.reason


def test_a_backend_that_raises_is_reported_not_raised(model):
    class Broken(TorchBackend):
        def attend(self, query, key, value, **options):
            raise RuntimeError("no such kernel")

    assert "no such kernel" in run_self_check(model, Broken()).reason
