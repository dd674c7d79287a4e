"""8-bit linear layers: how near they are to plain ones, and that nobody takes one model for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.families import build
from support.loaded import dense_layout, dense_logits, random_prompt
from torch import nn

from kvmosaic import LLM
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.errors import InvalidConfig
from kvmosaic.model import LoadedModel, load_model
from kvmosaic.model.cpu.int8 import Int8Linear, cpu_has_int8, quantize
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

SHARED = ChunkCacheConfig("4MiB", position_strategy="shared", repair="none")
BFLOAT16 = torch.bfloat16
FAMILIES = ["llama", "qwen2", "gemma3", "mixtral", "deepseek_v3", "phi3"]
fast = pytest.mark.skipif(not cpu_has_int8(), reason="this CPU multiplies 8-bit numbers no faster than others")


def obvious(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The formula of the module, in float64 but for the rounding: halfway between two steps the last bit decides."""
    wide, weight = x.float(), linear.weight.float()
    largest, weight_largest = (part.abs().amax(-1, keepdim=True).clamp_min(1e-30) for part in (wide, weight))
    inputs = (wide * (127 / largest) + 128.5).floor() - 128
    sums = inputs.double() @ (weight / (weight_largest / 127)).round().double().T
    out = sums * (largest.double() / 127) * (weight_largest.double().T / 127)
    return out if linear.bias is None else out + linear.bias.double()


@fast
@settings(max_examples=examples(40))
@given(st.integers(0, 40), st.integers(1, 130), st.integers(1, 130), st.booleans(), st.sampled_from([1e-15, 1.0, 1e15]))
def test_a_layer_does_what_its_formula_says(rows, width, height, has_bias, size) -> None:
    torch.manual_seed(rows + 50 * width)
    plain = nn.Linear(width, height, bias=has_bias, dtype=BFLOAT16)
    x = (size * torch.randn(1, rows, width)).to(BFLOAT16)
    with torch.inference_mode():
        expected, got = obvious(plain, x), Int8Linear(plain)(x)
        assert got.shape == expected.shape and got.dtype is BFLOAT16
        torch.testing.assert_close(got.double(), expected, rtol=0.005, atol=1e-6 * size)


@fast
def test_a_layer_is_as_exact_as_127_steps_allow() -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(512, 512, dtype=BFLOAT16), torch.randn(64, 512).to(BFLOAT16)
    with torch.inference_mode():
        expected, got = plain(x), Int8Linear(plain)(x)
    assert (got - expected).norm() / expected.norm() < 0.02


@fast
def test_rows_do_not_change_each_other() -> None:
    torch.manual_seed(0)
    layer, x = Int8Linear(nn.Linear(96, 64, dtype=BFLOAT16)), torch.randn(33, 96).to(BFLOAT16)
    x[7] *= 1_000
    with torch.inference_mode():
        together = layer(x)
        assert all(torch.equal(layer(x[row : row + 1])[0], together[row]) for row in range(33))


@fast
def test_zeros_stay_zeros() -> None:
    plain = nn.Linear(8, 8, bias=False, dtype=BFLOAT16)
    with torch.inference_mode():
        assert not Int8Linear(plain)(torch.zeros(2, 8, dtype=BFLOAT16)).any()
        plain.weight.zero_()
        assert not Int8Linear(plain)(torch.ones(2, 8, dtype=BFLOAT16)).any()


@fast
def test_weight_can_be_asked_for() -> None:
    plain = nn.Linear(24, 40, dtype=BFLOAT16)
    torch.testing.assert_close(Int8Linear(plain).weight, plain.weight.detach(), rtol=0.01, atol=0.002)


@fast
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_the_plain_model_which_is_another_one(family: str) -> None:
    layout = dense_layout(random_prompt())
    plain = LoadedModel.from_module(build(family, BFLOAT16))
    expected, num_parameters = dense_logits(plain, layout), plain.num_parameters
    rounded = quantize(plain)
    assert rounded.is_prepacked and rounded.num_parameters == num_parameters
    assert rounded.fingerprint != plain.fingerprint
    difference = (dense_logits(rounded, layout) - expected).norm() / expected.norm()
    assert 0 < difference < 0.2


@fast
def test_fingerprint_is_the_same_every_time(tmp_path: Path) -> None:
    build("llama", BFLOAT16).save_pretrained(tmp_path)
    plain = load_model(tmp_path, device="cpu", dtype=BFLOAT16)
    first, second = (load_model(tmp_path, device="cpu", dtype=BFLOAT16, quantization="int8") for _ in range(2))
    assert first.fingerprint == second.fingerprint != plain.fingerprint


@fast
def test_documents_of_an_8_bit_model_are_found_again(tmp_path: Path) -> None:
    build("llama", BFLOAT16).save_pretrained(tmp_path)
    small: Any = {"engine_config": EngineConfig(request_cache_size="4MiB"), "chunk_cache_config": SHARED}
    prompts = [Prompt.from_tokens([1, 2], documents, [9, 8]) for documents in ([[3, 4], [6, 7]], [[6, 7], [3, 4]])]
    with LLM(tmp_path, device="cpu", dtype="bfloat16", quantization="int8", **small) as llm:
        assert llm.has_chunk_cache, llm.chunk_cache_off_reason
        params = SamplingParams(max_tokens=8, temperature=0)
        cold, warm = (llm.generate(prompt, params)[0] for prompt in prompts)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
        with pytest.raises(InvalidConfig, match="the model is loaded already"):
            LLM(llm.model, quantization="int8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "int4"}, "quantization is 'int4'; choose 'none' or 'int8'"),
        ({"quantization": ["int8"]}, "choose 'none' or 'int8'"),
        ({"dtype": "float32"}, "this model is in float32; use dtype='bfloat16'"),
        ({"device": "meta"}, "this model is on meta; use device='cpu'"),
    ],
)
def test_what_cannot_be_is_said_before_weights_are_read(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    build("llama", BFLOAT16).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing that could be read")
    wanted: Any = {"device": "cpu", "dtype": "bfloat16", "quantization": "int8", **changes}
    with pytest.raises(InvalidConfig, match=said):
        load_model(tmp_path, **wanted)


def test_cpu_without_the_instructions_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", BFLOAT16).save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(InvalidConfig, match="this CPU has no instructions for them"):
        load_model(tmp_path, device="cpu", dtype="bfloat16", quantization="int8")
