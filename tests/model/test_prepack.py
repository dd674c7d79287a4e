"""Packed linear layers: they answer like plain ones, and the model stays the same model."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import answer, build_engine, token_ids
from support.examples import examples
from support.families import build
from support.loaded import dense_layout, dense_logits, random_prompt
from torch import nn

from kvmosaic.errors import InvalidConfig
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.prepack import PackedLinear, Prepack, cpu_has_bfloat16, has_onednn_for_bfloat16
from kvmosaic.prompt import Prompt

BFLOAT16 = torch.bfloat16
FAMILIES = ["llama", "qwen2", "gemma3", "mixtral", "deepseek_v3", "phi3", "cohere2", "gpt_oss"]
packs = pytest.mark.skipif(not has_onednn_for_bfloat16(), reason="torch has no oneDNN for bfloat16 here")


def packed(family: str, **changes: object) -> LoadedModel:
    return LoadedModel.from_module(build(family, BFLOAT16, **changes), prepack=True)


def packed_names(model: LoadedModel) -> set[str]:
    return {name for name, part in model.module.named_modules() if isinstance(part, PackedLinear)}


def turned_round(prompt: Prompt) -> Prompt:
    """The same documents in the opposite order."""
    system, *chunks, question = (list(segment.token_ids or ()) for segment in prompt.segments)
    return Prompt.from_tokens(system, chunks[::-1], question)


@packs
@settings(max_examples=examples(40))
@given(st.integers(0, 40), st.integers(1, 130), st.integers(1, 130), st.booleans(), st.booleans())
def test_a_packed_layer_multiplies_like_a_plain_one(rows, width, height, has_bias, skips_rows) -> None:
    torch.manual_seed(rows + 50 * width)
    plain = nn.Linear(width, height, bias=has_bias, dtype=BFLOAT16)
    x = torch.randn(1, 2 * rows, 2 * width, dtype=BFLOAT16)
    x = x[:, ::2, :width] if skips_rows else x[:, :rows, ::2]
    with torch.inference_mode():
        expected, got = plain(x), PackedLinear(plain)(x)
    assert got.shape == expected.shape and got.dtype is BFLOAT16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@packs
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_the_plain_model(family: str) -> None:
    layout = dense_layout(random_prompt())
    module = build(family, BFLOAT16)
    plain = dense_logits(LoadedModel.from_module(module), layout).float()
    model = LoadedModel.from_module(module, prepack=True)
    difference = (dense_logits(model, layout).float() - plain).abs().max()
    assert model.is_prepacked
    assert difference <= 2e-2 * plain.abs().max()


@packs
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_found_chunks_give_the_tokens_of_computed_ones(family: str) -> None:
    engine = build_engine(packed(family), position_strategy="sequential")
    prompt = random_prompt()
    cold, cold_logits = answer(engine, prompt)
    answer(engine, turned_round(prompt))
    warm, warm_logits = answer(engine, prompt)
    assert token_ids(cold) == token_ids(warm)
    assert (warm_logits - cold_logits).abs().max() <= 2e-2 * cold_logits.abs().max()


@packs
def test_the_order_of_documents_cannot_change_a_bit() -> None:
    engine = build_engine(packed("llama"))
    prompt = random_prompt()
    answer(engine, prompt)
    first, second = answer(engine, prompt)[1], answer(engine, turned_round(prompt))[1]
    assert torch.equal(first, second)


@packs
@pytest.mark.parametrize("is_tied", [True, False])
def test_the_model_keeps_its_identity_and_its_size(is_tied: bool) -> None:
    plain = LoadedModel.from_module(build("llama", BFLOAT16, tie_word_embeddings=is_tied))
    model = packed("llama", tie_word_embeddings=is_tied)
    assert model.fingerprint == plain.fingerprint
    assert LoadedModel.from_module(model.module).fingerprint == plain.fingerprint
    assert model.num_parameters == plain.num_parameters == sum(p.numel() for p in plain.module.parameters())
    assert (model.dtype, model.device) == (plain.dtype, plain.device)


@packs
def test_another_packed_weight_is_another_model() -> None:
    model = packed("llama")
    part = model.module.model.layers[0].mlp.up_proj
    linear = nn.Linear(part.in_features, part.out_features, bias=False, dtype=BFLOAT16)
    model.module.model.layers[0].mlp.up_proj = PackedLinear(linear)
    assert LoadedModel.from_module(model.module).fingerprint != model.fingerprint


@packs
def test_packed_weights_are_not_kept_twice() -> None:
    model = packed("llama", tie_word_embeddings=False)
    names = packed_names(model)
    assert {"lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"} <= names
    assert not any(isinstance(part, nn.Linear) for part in model.module.modules())
    assert not {f"{name}.weight" for name in names} & {name for name, _ in model.module.named_parameters()}


@packs
def test_a_tied_embedding_still_looks_up_its_rows() -> None:
    model = packed("llama", tie_word_embeddings=True)
    head, embedding = model.module.lm_head, model.module.get_input_embeddings()
    assert isinstance(head, PackedLinear) and head.is_copy
    assert torch.equal(head.weight, embedding.weight)


@packs
def test_a_packed_model_can_be_saved(tmp_path: Path) -> None:
    packed("qwen2").module.save_pretrained(tmp_path)
    again = load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=False)
    assert again.fingerprint == LoadedModel.from_module(build("qwen2", BFLOAT16)).fingerprint


@packs
def test_layers_that_do_more_than_multiply_stay_as_they_are() -> None:
    class Louder(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    module = build("llama", BFLOAT16, tie_word_embeddings=False)
    first, second = module.model.layers[0].mlp, module.model.layers[1].mlp
    first.up_proj = Louder(first.up_proj.in_features, first.up_proj.out_features, bias=False, dtype=BFLOAT16)
    first.down_proj.register_forward_hook(lambda *_: None)
    second.up_proj.weight = second.gate_proj.weight
    names = packed_names(LoadedModel.from_module(module, prepack=True))
    assert not names & {f"model.layers.0.mlp.{name}_proj" for name in ("up", "down")}
    assert not names & {f"model.layers.1.mlp.{name}_proj" for name in ("up", "gate")}
    assert "model.layers.0.mlp.gate_proj" in names


@packs
def test_the_projection_of_a_latent_is_read_not_called() -> None:
    names = packed_names(packed("deepseek_v3"))
    assert "model.layers.0.self_attn.o_proj" in names
    assert not any("kv_b_proj" in name for name in names)


@packs
@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_packs_where_the_cpu_computes_in_bfloat16(tmp_path: Path, monkeypatch, has_bfloat16: bool) -> None:
    build("llama", BFLOAT16).save_pretrained(tmp_path)
    monkeypatch.setattr("kvmosaic.model.cpu.prepack.cpu_has_bfloat16", lambda: has_bfloat16)
    assert load_model(tmp_path, device="cpu", dtype=BFLOAT16).is_prepacked is has_bfloat16
    assert not load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=False).is_prepacked
    assert not load_model(tmp_path, device="cpu", dtype="float32").is_prepacked
    assert not load_model(tmp_path, device="cpu", dtype="float64").is_prepacked


@packs
@pytest.mark.parametrize(("word", "flag"), [("always", True), ("never", False)])
def test_words_mean_what_flags_mean(word: Prepack, flag: bool) -> None:
    assert LoadedModel.from_module(build("llama", BFLOAT16), prepack=word).is_prepacked is flag
    assert LoadedModel.from_module(build("llama", BFLOAT16), prepack=flag).is_prepacked is flag


def test_a_model_in_memory_is_packed_only_when_asked() -> None:
    assert not LoadedModel.from_module(build("llama", BFLOAT16)).is_prepacked
    assert LoadedModel.from_module(build("llama", BFLOAT16), prepack="auto").is_prepacked is cpu_has_bfloat16()


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.float32, True), (torch.float32, "always"), (BFLOAT16, "yes"), (BFLOAT16, 1)]
)
def test_what_cannot_be_packed_is_said(dtype: torch.dtype, wanted: object) -> None:
    with pytest.raises(InvalidConfig, match="prepack"):
        LoadedModel.from_module(build("llama", dtype), prepack=wanted)  # type: ignore[arg-type]


@packs
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_the_file_of_a_packed_model_is_let_go(tmp_path: Path) -> None:
    build("llama", BFLOAT16, tie_word_embeddings=False).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=True)
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert model.fingerprint == load_model(tmp_path, device="cpu", dtype=BFLOAT16, prepack=False).fingerprint
