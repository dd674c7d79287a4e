"""Rotations that scale frequencies, and models that are refused or have no chunk cache, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_conformance import ask, params
from support.gguf import save_gguf
from support.gguf_families import random_file
from support.llama_engine import RecordingLlamaRunner, llama_engine

from kvmosaic.errors import NotMovable, UnsupportedModel
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.llama.self_check import check_llama
from kvmosaic.prompt import Prompt

LONG, SHORT = np.linspace(1, 4, 32, dtype=np.float32), np.ones(32, np.float32)
SCALING = "llama.rope.scaling."
LINEAR = {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0}
YARN = {f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 1024}
TWO_SETS = {
    f"{SCALING}type": "longrope",
    f"{SCALING}original_context_length": 1100,
    f"{SCALING}attn_factor": 1.2,
}
LONG_AND_SHORT = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
ROTATIONS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "linear": (LINEAR, {}),
    "yarn": (YARN, {}),
    "llama3": ({}, {"rope_freqs.weight": LONG}),
    "longrope": (TWO_SETS, LONG_AND_SHORT),
}
PROMPT = Prompt.from_tokens(list(range(2, 12)), [list(range(20, 60)), list(range(300, 350))], [5, 300, 11])


def scaled_file(folder: Path, rotation: str) -> Path:
    metadata, tensors = ROTATIONS[rotation]
    return save_gguf(folder / f"{rotation}.gguf", metadata=metadata, tensors=tensors)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("cache_type", ["f32", "f16", "bf16"])
def test_documents_are_moved_under_every_rotation(tmp_path: Path, rotation: str, cache_type: str) -> None:
    check = check_llama(load_llama(scaled_file(tmp_path, rotation), kv_cache_dtype=cache_type), num_threads=1)
    assert check.passed and check.is_moved, check


@pytest.mark.parametrize("rotation", ["yarn", "longrope"])
def test_scaled_keys_of_8_bits_are_not_moved(tmp_path: Path, rotation: str) -> None:
    model = load_llama(scaled_file(tmp_path, rotation), kv_cache_dtype="q8_0")
    check = check_llama(model, num_threads=1)
    assert not check.passed and "kv_cache_dtype='f16'" in check.reason


def first_logits(model: LlamaModel, num_blocks: int) -> torch.Tensor:
    engine = llama_engine(model, blocks=(num_blocks, num_blocks))
    ask(engine, PROMPT, params(1), position_strategy="sequential")
    assert isinstance(engine.runner, RecordingLlamaRunner)
    return next(logits for logits in reversed(engine.runner.logits) if len(logits))[-1]


def test_long_factors_are_taken_for_long_models_whatever_the_number_of_cells(tmp_path: Path) -> None:
    """llama.cpp takes them in contexts of more than 1,100 cells, and documents are moved in one of 1,025."""
    file = scaled_file(tmp_path, "longrope")
    long, short = load_llama(file, kv_cache_dtype="f32"), load_llama(file, kv_cache_dtype="f32", max_positions=1100)
    few, many, others = first_logits(long, 64), first_logits(long, 400), first_logits(short, 400)
    assert float((few - many).abs().max()) < 0.05 < 0.5 < float((few - others).abs().max())
    assert long.fingerprint != short.fingerprint, "their keys are not the same"


def layer(num_qkv: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer of GPT-2 or BLOOM."""
    matrices = {"attn_qkv": (num_qkv, 64), "attn_output": (64, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    norms = {"attn_norm": (64,), "ffn_norm": (64,)}
    weights = {f"blk.0.{name}.weight": shape for name, shape in {**matrices, **norms}.items()}
    biases = {f"blk.0.{name}.bias": shape[:1] for name, shape in {**matrices, **norms}.items()}
    return {"token_embd.weight": (128, 64), "output_norm.weight": (64,), "output_norm.bias": (64,), **weights, **biases}


def unrotated_file(architecture: str) -> Path:
    more = {"position_embd.weight": (4096, 64)}
    if architecture == "bloom":
        more = {"token_embd_norm.weight": (64,), "token_embd_norm.bias": (64,)}
    return random_file(architecture, {"attention.head_count_kv": 4}, {**layer(192), **more})


@pytest.mark.parametrize(
    ("architecture", "reason"), [("gpt2", "values depend on the position"), ("bloom", "keys are not rotated")]
)
def test_models_without_a_rotation_answer_ordinary_prompts_only(architecture: str, reason: str) -> None:
    model = load_llama(unrotated_file(architecture))
    check = check_llama(model, num_threads=1)
    assert not check.passed and reason in check.reason
    engine = llama_engine(model)
    output = ask(engine, Prompt.plain(list(range(2, 40))), params(3))
    assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(NotMovable, match=reason):
        engine.add_request(Prompt.from_tokens([2, 3], [[4, 5], [7, 8]], [6]), params(), position_strategy="sequential")


def ordinary_layer(*, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """Tensors of a model of one layer like Qwen2's, or Llama's."""
    sizes = {"q": 64, "k": 32, "v": 32}
    return {
        "token_embd.weight": (128, 64),
        "output_norm.weight": (64,),
        **{f"blk.0.{name}_norm.weight": (64,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}.weight": (size, 64) for name, size in {**sizes, "output": 64}.items()},
        **({f"blk.0.attn_{name}.bias": (size,) for name, size in sizes.items()} if has_bias else {}),
        **{f"blk.0.ffn_{name}.weight": (96, 64) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (64, 96),
    }


def test_several_positions_per_token_are_refused() -> None:
    file = random_file("qwen2vl", {"rope.dimension_sections": [4, 4, 0, 0]}, ordinary_layer(has_bias=True))
    with pytest.raises(UnsupportedModel, match=r"several positions per token \(M-RoPE\).*engine='transformers'"):
        load_llama(file)


def test_latent_attention_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    file = save_gguf(tmp_path / "latent.gguf", metadata={"llama.attention.key_length_mla": 64})
    with pytest.raises(UnsupportedModel, match=r"latent attention \(MLA\).*engine='transformers'"):
        load_llama(file)


def test_heads_may_be_stated_for_each_layer(tmp_path: Path) -> None:
    heads = {"attention.head_count": [4], "attention.head_count_kv": [2]}
    model = load_llama(random_file("llama", heads, ordinary_layer(has_bias=False)))
    assert [(each.num_query_heads, each.num_kv_heads) for each in model.layers] == [(4, 2)]
    stated = load_llama(save_gguf(tmp_path / "heads.gguf", metadata={"llama.attention.head_count": [4] * 6}))
    assert [each.num_query_heads for each in stated.layers] == [4] * 6
