"""Folders whose weights are quantized already: those that load, and what is said about the others."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.loaded import dense_layout, dense_logits, random_prompt
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.errors import UnsupportedModel
from kvmosaic.model import load_model

SIDE = 128
"""Of a block that shares one scale."""


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def marked(plain: Path, folder: Path, **settings: Any) -> Path:
    """A copy whose configuration says how it is quantized."""
    shutil.copytree(plain, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder


def in_fp8(plain: Path, folder: Path) -> Path:
    """A copy in 8-bit floating point with a scale for each block, as DeepSeek and Qwen publish them."""
    marked(plain, folder, quant_method="fp8", fmt="e4m3", weight_block_size=[SIDE, SIDE], activation_scheme="dynamic")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            stored[name] = weight
            continue
        blocks = weight.float().unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE))
        scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        stored[name] = (blocks / scales).to(torch.float8_e4m3fn).flatten(2, 3).flatten(0, 1)
        stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_composes(folder: Path) -> None:
    """It loads, is checked, composes, and is the same model each time."""
    model = load_model(folder, device="cpu")
    assert load_model(folder, device="cpu").fingerprint == model.fingerprint
    config = ChunkCacheConfig(
        chunk_cache_size="1MiB", position_strategy="shared", chunk_context="system", repair="none"
    )
    with LLM(model, chunk_cache_config=config, engine_config=EngineConfig(request_cache_size="1MiB")) as llm:
        assert llm.has_chunk_cache


def test_fp8_is_dequantized_and_as_near_as_eight_bits_are(plain_folder: Path, tmp_path: Path) -> None:
    folder = in_fp8(plain_folder, tmp_path / "fp8")
    model = load_model(folder, device="cpu", dtype="bfloat16")
    assert not hasattr(model.module.config, "quantization_config")
    assert getattr(model.module, "hf_quantizer", None) is None
    assert model.weights_note.endswith("is quantized (fp8), and dequantized to bfloat16: 0.8 MB of weights")
    plain = load_model(plain_folder, device="cpu", dtype="bfloat16")
    assert model.fingerprint != plain.fingerprint
    layout = dense_layout(random_prompt())
    expected = dense_logits(plain, layout)
    difference = (dense_logits(model, layout) - expected).norm() / expected.norm()
    assert 0 < difference < 0.1
    check_composes(folder)


@pytest.mark.parametrize("settings", [{"load_in_8bit": True}, {"load_in_4bit": True}])
@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
def test_bitsandbytes_composes(plain_folder: Path, tmp_path: Path, settings: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(plain_folder, quantization_config=BitsAndBytesConfig(**settings))
    model.save_pretrained(tmp_path)
    check_composes(tmp_path)


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao is not installed")
def test_torchao_composes_and_its_layers_are_not_packed_again(plain_folder: Path, tmp_path: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(
        plain_folder, quantization_config=settings, dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", prepack="always")
    assert not any("Packed" in type(part).__name__ for part in model.module.model.layers.modules())
    check_composes(tmp_path)


@pytest.mark.parametrize(
    ("settings", "missing", "commands"),
    [
        ({"quant_method": "gptq", "bits": 4}, ("gptqmodel", "optimum"), "pip install gptqmodel optimum"),
        ({"quant_method": "awq", "bits": 4}, ("gptqmodel",), "pip install gptqmodel"),
        ({"quant_method": "compressed-tensors"}, ("compressed_tensors",), "pip install compressed-tensors"),
        ({"quant_method": "torchao"}, ("torchao",), "pip install torchao"),
        ({"load_in_8bit": True}, ("bitsandbytes",), "pip install bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes",), "pip install bitsandbytes"),
        ({"quant_method": "fp8"}, ("accelerate",), "pip install accelerate"),
    ],
)
def test_a_missing_package_is_named_with_its_command(
    plain_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    missing: tuple[str, ...],
    commands: str,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("kvmosaic.model.quantized.find_spec", lambda name: None if name in missing else real(name))
    with pytest.raises(UnsupportedModel, match=commands) as refused:
        load_model(marked(plain_folder, tmp_path, **settings), device="cpu")
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize("method", ["aqlm", "hqq", "quanto", "unheard-of", None])
def test_other_methods_are_refused_with_those_that_load(plain_folder: Path, tmp_path: Path, method: str | None) -> None:
    with pytest.raises(UnsupportedModel, match=rf"quantized by '{method or 'unknown'}'.*compressed-tensors, .*GGUF"):
        load_model(marked(plain_folder, tmp_path, quant_method=method), device="cpu")
