"""Fused modules: they give what the modules give that they stand for, and step aside for everything else."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.families import build
from support.loaded import dense_layout, dense_logits, random_prompt
from support.programs import needs_extension
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvmosaic.attention.native.backend import load_library
from kvmosaic.errors import NativeUnavailable
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.fuse import fuse_operations
from kvmosaic.model.cpu.fused import FusedMlp, FusedNorm, GatePlan, RowKernels, TurnPlan, fused_form
from kvmosaic.model.cpu.prepack import has_onednn_for_bfloat16

BFLOAT16 = torch.bfloat16
ALL_KINDS = {"norms", "MLPs", "attention modules", "layers"}
FAMILIES = {
    "llama": ALL_KINDS,
    "qwen2": ALL_KINDS,
    "qwen3": ALL_KINDS,
    "gemma": ALL_KINDS,
    "gemma2": ALL_KINDS,
    "gemma3": ALL_KINDS,
    "smollm3": ALL_KINDS,
    "granite": ALL_KINDS,
    "helium": ALL_KINDS,
    "mixtral": ALL_KINDS - {"MLPs"},
    "glm": ALL_KINDS - {"MLPs"},
    "gpt_oss": {"norms", "attention modules"},
    "deepseek_v3": ALL_KINDS - {"attention modules"},
    "cohere2": {"MLPs", "attention modules"},
    "olmo2": {"norms", "MLPs"},
    "phi3": {"norms"},
    "gpt_neox": set(),
}

try:
    SETS = load_library().instruction_sets
except NativeUnavailable:
    SETS = ()
pytestmark = needs_extension
packs = pytest.mark.skipif(not has_onednn_for_bfloat16(), reason="torch has no oneDNN for bfloat16 here")
"""Where layers cannot be packed, none are fused; the kernels themselves need no oneDNN."""
instruction_sets = pytest.mark.parametrize("instruction_set", SETS)
rows = st.one_of(st.integers(0, 20), st.integers(21, 600))


def fused(family: str, **changes: object) -> LoadedModel:
    return LoadedModel.from_module(build(family, BFLOAT16, **changes), prepack=True)


def undo(module: nn.Module) -> None:
    for part in module.modules():
        if fused_form(part) is not None:
            del part.__dict__["forward"]


def close(got: Tensor, expected: Tensor) -> None:
    """Equal but for rare roundings to the neighbour; a number that is rounded twice may be two away."""
    assert got.shape == expected.shape and got.dtype is BFLOAT16
    torch.testing.assert_close(got.float(), expected.float(), rtol=2**-6, atol=1e-6)
    assert not got.numel() or (got != expected).float().mean() <= max(0.01, 2 / got.numel())


def random(*shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(BFLOAT16)


@instruction_sets
@settings(max_examples=examples(25))
@given(
    rows, st.integers(1, 300), st.sampled_from([(LlamaRMSNorm, 0), (Gemma3RMSNorm, 3), (Olmo2RMSNorm, 2)]), st.data()
)
def test_a_norm_is_that_of_the_module(instruction_set, num_rows, width, kind, data) -> None:
    make, form = kind
    module = make(width).to(BFLOAT16)
    module.weight.data = random(width, seed=1)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    norm = FusedNorm(module, RowKernels(instruction_set), form, epsilon)
    x = random(1, num_rows, width, size=data.draw(st.sampled_from([1e-3, 1.0, 300.0])))
    other = random(1, num_rows, width, seed=2)
    with torch.inference_mode():
        close(norm.forward(x), module(x))
        total, out = norm.apply_to_sum(x, other)
        assert torch.equal(total, x + other)
        close(out, module(total))


@instruction_sets
@settings(max_examples=examples(25))
@given(rows, st.integers(1, 300), st.sampled_from([1e-2, 1.0, 30.0]))
def test_a_gate_is_that_of_the_activation(instruction_set, num_rows, width, size) -> None:
    kernels = RowKernels(instruction_set)
    for activation, act in enumerate((functional.silu, lambda x: functional.gelu(x, approximate="tanh"))):
        gate, up = random(num_rows, width, size=size), random(num_rows, width, seed=1)
        expected, got = act(gate) * up, gate.clone()
        plan = GatePlan(activation, kernels.parallel)
        kernels.gate(ctypes.addressof(plan), got.data_ptr(), up.data_ptr(), got.numel(), 2)
        # the far tail of gelu is what is left of 1 - 1
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=2e-6)


@instruction_sets
@settings(max_examples=examples(25))
@given(rows, st.integers(1, 6), st.integers(1, 3), st.integers(1, 40), st.integers(0, 9))
def test_a_rotation_has_the_bits_of_the_models(instruction_set, num_rows, heads, kv_heads, half, rest) -> None:
    kernels = RowKernels(instruction_set)
    dims, head_dim = 2 * half, 2 * half + rest
    query, key = random(1, num_rows, heads, head_dim), random(1, num_rows, kv_heads, head_dim, seed=1)
    cos, sin = random(1, num_rows, dims, seed=2), random(1, num_rows, dims, seed=3)
    turned = apply_rotary_pos_emb(query[..., :dims], key[..., :dims], cos, sin, unsqueeze_dim=2)
    expected = [torch.cat((new, old[..., dims:]), -1) for new, old in zip(turned, (query, key), strict=True)]
    row = (heads * head_dim, kv_heads * head_dim)
    plan = TurnPlan(heads, kv_heads, *row, head_dim, dims, 0, dims, half, 1, 0, 1.0, kernels.parallel)
    addresses = [x.data_ptr() for x in (query, key, cos, sin)]
    kernels.turn(ctypes.addressof(plan), *addresses, num_rows, 2)
    assert torch.equal(query, expected[0]) and torch.equal(key, expected[1])


@packs
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_gives_the_logits_of_its_own_code(family: str) -> None:
    layout = dense_layout(random_prompt())
    model = fused(family)
    got = dense_logits(model, layout).float()
    assert set(model.num_fused) == FAMILIES[family]
    undo(model.module)
    expected = dense_logits(model, layout).float()
    assert not model.num_fused
    assert (got - expected).abs().max() <= 1e-2 * expected.abs().max()
    assert (got == expected).float().mean() >= 0.95


def test_a_row_has_the_same_bits_alone_and_among_many() -> None:
    kernels = RowKernels()
    norm, mlp = LlamaRMSNorm(200).to(BFLOAT16), LlamaMLP(build("llama", BFLOAT16).config).to(BFLOAT16)
    forms = (FusedNorm(norm, kernels, 0, 1e-6), FusedMlp(mlp, kernels, 0))
    many = [random(1, 512, width) for width in (200, mlp.hidden_size)]
    with torch.inference_mode():
        for form, x in zip(forms, many, strict=True):
            together = form.forward(x)
            assert all(
                torch.equal(form.forward(x[:, row : row + 1]), together[:, row : row + 1]) for row in (0, 7, 511)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wider_models_run_their_own_code(dtype: torch.dtype) -> None:
    assert not LoadedModel.from_module(build("llama", dtype), prepack="auto").num_fused


@packs
def test_a_model_in_memory_is_fused_only_when_asked(tmp_path) -> None:
    module = build("llama", BFLOAT16)
    assert not LoadedModel.from_module(module).num_fused
    module.save_pretrained(tmp_path)
    assert not load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=False).num_fused
    assert load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=True).num_fused["layers"] == 2


@packs
def test_without_the_extension_nothing_is_fused(monkeypatch) -> None:
    def missing() -> None:
        raise NativeUnavailable("not built")

    monkeypatch.setattr("kvmosaic.model.cpu.fused.load_library", missing)
    model = fused("llama")
    assert model.is_prepacked and not model.num_fused


@packs
@pytest.mark.slow
def test_attention_with_a_gate_beside_its_queries_is_left_alone() -> None:
    assert set(fused("qwen3_5").num_fused) == ALL_KINDS - {"attention modules"}


class Louder(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 1.05 * super().forward(hidden_states)


def clamped(part: Any) -> None:
    """Numbers far from zero alone are other ones."""
    kind = type(part)
    part.__class__ = type(kind.__name__, (kind,), {"forward": lambda self, x: kind.forward(self, x).clamp(-40, 40)})


def refuse(change: str, layer: Any) -> None:
    if change == "another norm":
        layer.input_layernorm = Louder(layer.input_layernorm.weight.numel()).to(BFLOAT16)
    elif change == "a hook":
        layer.input_layernorm.register_forward_hook(lambda *_: None)
    elif change == "a forward of its own":
        layer.mlp.__dict__["forward"] = lambda x: 0 * x
    elif change == "another activation":
        layer.mlp.act_fn = nn.ReLU()
    elif change == "a clamp":
        clamped(layer.mlp)
    elif change == "a bias that adds":
        layer.self_attn.extra = nn.Parameter(torch.zeros(1, dtype=BFLOAT16))
    else:
        layer.self_attn.q_proj.register_forward_hook(lambda _module, _x, out: 2 * out)


@packs
@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("another norm", "input_layernorm"),
        ("a hook", "input_layernorm"),
        ("a forward of its own", "mlp"),
        ("another activation", "mlp"),
        ("a clamp", "mlp"),
        ("a bias that adds", "self_attn"),
        ("a hook on a projection", "self_attn"),
    ],
)
def test_a_module_that_does_something_else_is_left_alone(change: str, part: str) -> None:
    module = build("llama", BFLOAT16)
    refuse(change, module.model.layers[0])
    layout = dense_layout(random_prompt())
    expected = dense_logits(LoadedModel.from_module(module), layout).float()
    model = LoadedModel.from_module(module, prepack=True)
    layers = model.module.model.layers
    assert fused_form(getattr(layers[0], part)) is None
    assert fused_form(getattr(layers[1], part)) is not None
    assert (dense_logits(model, layout).float() - expected).abs().max() <= 2e-2 * expected.abs().max()


@packs
def test_clamped_projections_are_not_fused() -> None:
    # Olmo cuts queries, keys and values; here at numbers that few tokens reach
    assert "attention modules" not in fused("olmo", clip_qkv=200.0).num_fused


@packs
def test_far_positions_show_what_near_ones_hide() -> None:
    beta = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}
    beta["original_max_position_embeddings"] = 1000
    assert "attention modules" not in fused("ministral3", rope_parameters=beta).num_fused


@packs
@pytest.mark.parametrize("hooked", ["", "proj", "down_proj", "act_fn", "norm", "input_layernorm"])
def test_hooks_that_come_later_see_what_the_modules_own_code_shows(hooked: str) -> None:
    model, layout = fused("llama"), dense_layout(random_prompt())
    seen: dict[str, list[Tensor]] = {}
    for name, part in model.module.named_modules():
        if not list(part.children()) and (hooked in name) and "rotary" not in name:
            part.register_forward_hook(lambda _part, _x, out, name=name: seen.setdefault(name, []).append(out))
    dense_logits(model, layout)
    undo(model.module)
    dense_logits(model, layout)
    assert seen and all(len(outputs) == 2 for outputs in seen.values())
    for name, (got, expected) in seen.items():
        assert torch.equal(got, expected), name


@packs
def test_a_hook_that_changes_an_output_is_heeded() -> None:
    model, layout = fused("llama"), dense_layout(random_prompt())
    plain = dense_logits(model, layout)
    hook = model.module.model.layers[0].post_attention_layernorm.register_forward_hook(lambda _m, _x, out: 2 * out)
    assert not torch.equal(dense_logits(model, layout), plain)
    hook.remove()
    assert torch.equal(dense_logits(model, layout), plain)


@packs
def test_gradients_and_transformers_own_attention_take_the_models_code() -> None:
    model = fused("llama")
    x = random(1, 5, model.config.hidden_size).requires_grad_()
    model.module.model.norm(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    tokens = torch.arange(3, 12)[None]
    model.module.set_attn_implementation("eager")
    with torch.no_grad():
        got = model.module(tokens).logits
        undo(model.module)
        assert torch.equal(got, model.module(tokens).logits)


@packs
def test_fusing_twice_changes_nothing() -> None:
    model = fused("llama")
    assert not fuse_operations(model.module, model.max_positions)
    assert LoadedModel.from_module(model.module, prepack=True).num_fused == model.num_fused
