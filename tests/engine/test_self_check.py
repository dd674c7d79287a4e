"""The self-check passes on sound models and finds a fault planted in any single layer, near or far, in every type."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from support.families import FAMILIES, build
from support.programs import needs_extension
from support.sensitive import sensitive_model

from kvmosaic.attention import TorchBackend
from kvmosaic.engine.self_check.whole import check_rows, run_self_check
from kvmosaic.layers import MaskSpec
from kvmosaic.memory import BlockStorage
from kvmosaic.model import LoadedModel
from kvmosaic.model.cpu.fused import FusedMlp
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=pytest.mark.slow if is_slow and family != "llama" else ())
        for family in ("llama", "gemma3", "gpt_oss", "deepseek_v3", "cohere2", "gpt2", "mixtral")
        for dtype, is_slow in (
            (torch.float64, True),
            (torch.float32, family in ("cohere2", "gpt2")),
            (torch.bfloat16, False),
            (torch.float16, True),
        )
    ],
)
def test_sound_models_pass(family, dtype):
    result = run_self_check(LoadedModel.from_module(build(family, dtype)))
    assert result.passed and result.reason == ""
    assert result.is_moved == FAMILIES[family].is_movable


LAYERS = [0, 3, 5]
CASES = [
    *(pytest.param(torch.bfloat16, index, marks=pytest.mark.slow) for index in (0, 5)),
    *((torch.bfloat16, 3), (torch.float32, 3)),
    pytest.param(torch.float16, 5, marks=pytest.mark.slow),
]
"""Types, and the one layer that is wrong."""


def six_layers(dtype: torch.dtype, family: str = "llama") -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype, num_hidden_layers=6))


def broken(model: LoadedModel, layer_index: int, **changes: Any) -> LoadedModel:
    """The model, with one layer described wrongly."""
    layers = list(model.layers)
    layers[layer_index] = replace(layers[layer_index], **changes)
    model.layers = tuple(layers)
    return model


def reason_of(model: LoadedModel, backend: Any = None) -> str:
    result = run_self_check(model, backend)
    assert not result.passed
    return result.reason


@pytest.fixture
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float32))


@pytest.mark.parametrize(("dtype", "index"), CASES)
@pytest.mark.parametrize("fault", ["frequency", "one frequency", "direction", "layout"])
def test_a_wrong_rotation_of_a_single_layer_is_found(dtype, index, fault):
    model = six_layers(dtype)
    rotation = model.layers[index].rotation
    assert rotation is not None
    wrong = {
        "frequency": replace(rotation, inv_freq=tuple(1.05 * frequency for frequency in rotation.inv_freq)),
        "one frequency": replace(rotation, inv_freq=(*rotation.inv_freq[:-1], 1.05 * rotation.inv_freq[-1])),
        "direction": replace(rotation, sign=-1),
        "layout": replace(rotation, layout="interleaved"),
    }[fault]
    reason = reason_of(broken(model, index, rotation=wrong))
    assert "rotation" in reason and f"layer {index} at position" in reason


@pytest.mark.parametrize(("dtype", "index"), CASES)
def test_a_wrong_mask_of_a_single_layer_is_found(dtype, index):
    assert f"attention of layer {index}" in reason_of(broken(six_layers(dtype), index, mask=MaskSpec("window", 7)))
    windows = six_layers(dtype, "mistral")
    assert windows.layers[index].mask.kind == "window"
    assert f"attention of layer {index}" in reason_of(broken(windows, index, mask=MaskSpec()))


@pytest.mark.parametrize(("dtype", "index"), CASES)
@pytest.mark.parametrize("fault", ["off by one slot", "keys of other tokens", "values lost", "one number flipped"])
def test_a_wrong_byte_in_storage_of_a_single_layer_is_found(monkeypatch, dtype, index, fault):
    write = BlockStorage.write

    def wrong_write(self, layer_index, slots, keys, values):
        if layer_index == index:
            if fault == "off by one slot":
                slots = slice(slots.start + 1, slots.stop + 1) if isinstance(slots, slice) else slots + 1
            if fault == "keys of other tokens":
                keys = keys.flip(0)
            if fault == "values lost":
                values = torch.zeros_like(values)
            if fault == "one number flipped":
                keys = keys.clone()
                keys[-1, -1, -1] = -keys[-1, -1, -1]
        write(self, layer_index, slots, keys, values)

    monkeypatch.setattr(BlockStorage, "write", wrong_write)
    assert f"what is stored of layer {index}" in reason_of(six_layers(dtype))


@pytest.mark.parametrize(("dtype", "index"), CASES)
@pytest.mark.parametrize("fault", ["scale", "log-sum-exp of long runs", "values of long runs"])
def test_a_backend_that_is_wrong_in_a_single_layer_is_found(dtype, index, fault):
    model = six_layers(dtype)
    receive = type(model).forward

    class Wrong(TorchBackend):
        layer_index = -1

        def attend(self, query, key, value, *, scaling, **options):
            is_wrong = self.layer_index == index
            if is_wrong and fault == "scale":
                scaling = scaling * 1.3
            output, lse = super().attend(query, key, value, scaling=scaling, **options)
            is_long = is_wrong and key.shape[0] > 64
            if is_long and fault == "log-sum-exp of long runs":
                lse = lse + 0.5
            if is_long and fault == "values of long runs":
                output = output * 1.2
            return output, lse

    backend = Wrong()

    def forward(self, token_ids, positions, logit_rows, receiver, mixer=None):
        def note_layer(call):
            backend.layer_index = call.layer_index
            return receiver(call)

        return receive(self, token_ids, positions, logit_rows, note_layer)

    model.forward = MethodType(forward, model)
    assert f"composed attention of layer {index}" in reason_of(model, backend)


def test_rows_at_wrong_positions_are_found(model, monkeypatch):
    from kvmosaic.model import runner

    flatten = runner.flatten

    def late(spans, device, **options):
        batch = flatten(spans, device, **options)
        positions = batch.positions + (batch.positions == batch.positions.max())
        return replace(batch, positions=positions)

    monkeypatch.setattr(runner, "flatten", late)
    assert "positions differs" in reason_of(model)


@pytest.mark.parametrize("num_keys", [7, 13, 67])
def test_a_backend_that_gives_no_numbers_is_found(model, num_keys):
    class NotANumber(TorchBackend):
        def attend(self, query, key, value, **options):
            output, lse = super().attend(query, key, value, **options)
            return output * (torch.nan if key.shape[0] == num_keys else 1.0), lse

    assert not run_self_check(model, NotANumber()).passed


def test_a_backend_that_raises_is_reported_not_raised(model):
    class Broken(TorchBackend):
        def attend(self, query, key, value, **options):
            raise RuntimeError("no such kernel")

    assert "no such kernel" in run_self_check(model, Broken()).reason


def scaled_by_row(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Queries multiplied by the logarithm of the number of their row, from row 65 on."""
    rows = torch.arange(hidden.shape[1], dtype=torch.float32)
    return hidden * (rows / 64).clamp_min(1).log().add(1).to(hidden.dtype)[None, :, None]


def mixed_from_far(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states mixed with those 64 tokens before."""
    return torch.cat((hidden[:, :64], hidden[:, 64:] + 0.3 * hidden[:, :-64]), dim=1)


@pytest.mark.parametrize(("dtype", "index"), CASES)
@pytest.mark.parametrize("fault", [scaled_by_row, mixed_from_far])
def test_what_happens_only_to_late_rows_of_a_single_layer_is_found(dtype, index, fault):
    module = build("llama", dtype, num_hidden_layers=6)
    project = module.model.layers[index].self_attn.q_proj
    own = project.forward
    project.forward = lambda hidden: fault(project, own(hidden))
    reason = reason_of(LoadedModel.from_module(module))
    assert f"layer {index}" in reason and "another row" in reason


@pytest.mark.parametrize(("dtype", "index"), CASES)
def test_keys_that_change_far_out_in_a_single_layer_are_found(dtype, index):
    module = build("llama", dtype, num_hidden_layers=6)
    part = module.model.layers[index].self_attn
    own, project = part.forward, part.k_proj.forward
    far = torch.zeros(0)

    def forward(*arguments, **named):
        nonlocal far
        far = (named["position_ids"][0] > 600).to(dtype)[None, :, None]
        return own(*arguments, **named)

    part.forward = forward
    part.k_proj.forward = lambda hidden: project(hidden) * (1 + 0.3 * far)
    reason = reason_of(LoadedModel.from_module(module))
    assert f"layer {index} at position" in reason


@pytest.mark.parametrize("index", LAYERS)
@needs_extension
@pytest.mark.skipif(not cpu_has_bfloat16(), reason="operations are fused where the CPU computes in bfloat16")
def test_a_fused_operation_that_is_wrong_for_many_rows_is_found(monkeypatch, index):
    model = LoadedModel.from_module(build("llama", torch.bfloat16, num_hidden_layers=6), prepack="always")
    assert model.num_fused["MLPs"] == 6
    apply = FusedMlp.apply
    wrong = model.module.model.layers[index].mlp

    def apply_wrongly(self, x):
        output = apply(self, x)
        if self.module is wrong:
            output[:, 64:] *= 1.5
        return output

    monkeypatch.setattr(FusedMlp, "apply", apply_wrongly)
    found = {finding.subject: finding for finding in run_self_check(model).findings}
    assert not found["fused form"].passed
    assert found["fused form"].where == f"layer {index}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_that_grows_through_the_layers_is_no_fault(dtype):
    result = run_self_check(LoadedModel.from_module(sensitive_model(dtype)))
    assert result.passed, result.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_that_differs_from_row_to_row_hides_no_rotation(dtype):
    """Gemma 3 270M in float32 with two threads: from layer 5 on the rows of one token differ by more than a rotation's
    rounding, and its layers were taken for layers that cannot be moved."""

    def round_rows(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        return output * (1 + 5e-3 * noise.to(output.dtype))

    module = build("gemma3", dtype)
    module.model.layers[0].register_forward_hook(round_rows)
    model = LoadedModel.from_module(module)
    assert model.is_movable
    assert all(layer.rotation is not None for layer in model.layers)
    found = {finding.subject: finding for finding in check_rows(model, list(range(3, 35)))}
    assert found["rotation"].passed
