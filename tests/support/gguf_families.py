"""Tiny random models of `support.families` as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter

from kvmosaic.assembly import bundled_reader
from kvmosaic.model import LoadedModel
from support.families import build, configuration
from support.gguf import NAMES, add_entry, interleaved, place_and_name, tokenizer_entries

_GEMMA = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
WINDOW = 8
"""Tokens that a token sees in the layers with windows."""
_WINDOWS = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_THREE_LAYERS = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False, True]}
_BASES = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "gemma2": ({**_WINDOWS, "query_pre_attn_scalar": 16}, {**_THREE_LAYERS, "attn_logit_softcapping": 5.0}, _GEMMA),
    "gemma3": ({**_WINDOWS, "query_pre_attn_scalar": 16}, {**_THREE_LAYERS, **_BASES}, _GEMMA),
    "cohere2": ({**_WINDOWS, "logit_scale": 1.0}, {**_THREE_LAYERS, "logit_scale": 1.0}, NAMES),
    "smollm3": ({"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, {}, NAMES),
}
"""Changes of the family's configuration, entries of the file, and names of its tensors."""


@cache
def family_model(family: str) -> LoadedModel:
    """The model in float32, in transformers."""
    return LoadedModel.from_module(build(family, torch.float32, **FAMILIES[family][0]), None)


@cache
def family_file(family: str) -> Path:
    """The same weights for llama.cpp."""
    _, entries, names = FAMILIES[family]
    module = build(family, torch.float32, **FAMILIES[family][0])
    config = module.config
    writer = _writer(family, {**_facts(config), **entries})
    for name, weight in module.state_dict().items():
        if name == "lm_head.weight":
            continue
        place, stored = place_and_name(name, names)
        array = weight.float().numpy()
        if family.startswith("gemma") and array.ndim == 1:
            array = array + 1
        if family == "smollm3" and place.endswith(("q_proj", "k_proj")):
            array = interleaved(array, array.shape[0] // config.head_dim)
        writer.add_tensor(stored, np.ascontiguousarray(array))
    return _written(writer)


_LFM2 = {
    **NAMES,
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_QWEN35 = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}


def hybrid_file(path: Path, architecture: str) -> Any:
    """Writes a model with states and the bundled reader's tokenizer: "lfm2", "qwen35"; returns it in float32."""
    entries, is_lfm2 = tokenizer_entries(bundled_reader()), architecture == "lfm2"
    changes = {} if is_lfm2 else {"linear_num_value_heads": 2, "head_dim": 32}
    size = len(entries["tokenizer.ggml.tokens"])
    module = build("lfm2" if is_lfm2 else "qwen3_5", torch.float32, vocab_size=size, **changes)
    config = module.config
    if is_lfm2:
        facts = {
            "attention.head_count_kv": [
                config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types
            ],
            "feed_forward_length": module.model.layers[0].feed_forward.w1.out_features,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "shortconv.l_cache": config.conv_L_cache,
        }
    else:
        facts = {
            "full_attention_interval": 4,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
        }
    writer = GGUFWriter(path, architecture)
    for key, value in {
        **entries,
        **{f"{architecture}.{key}": value for key, value in {**_facts(config), **facts}.items()},
    }.items():
        add_entry(writer, key, value)
    for name, weight in module.state_dict().items():
        writer.add_tensor(*_hybrid_tensor(name, weight.numpy(), is_lfm2))
    _written(writer)
    return module


def _hybrid_tensor(name: str, array: np.ndarray, is_lfm2: bool) -> tuple[str, np.ndarray]:
    """The name and the numbers of a tensor in the file."""
    for ending, stored in (("A_log", "ssm_a"), ("dt_bias", "ssm_dt.bias")):
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{stored}", -np.exp(array) if ending == "A_log" else array
    place, stored = place_and_name(name, _LFM2 if is_lfm2 else _QWEN35)
    if not is_lfm2 and array.ndim == 1 and place != "linear_attn.norm":
        array = array + 1
    return stored, np.ascontiguousarray(array[:, 0] if place in ("conv.conv", "linear_attn.conv1d") else array)


def random_file(architecture: str, entries: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A model of one layer with random weights; shapes of tensors as in PyTorch."""
    writer = _writer(architecture, {**_facts(configuration("llama", num_hidden_layers=1)), **entries})
    chance = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(name, (chance.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32))
    return _written(writer)


def _facts(config: Any) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.to_dict()["rope_parameters"].get("rope_theta", 1e4)),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
    }


def _writer(architecture: str, entries: dict[str, Any]) -> GGUFWriter:
    writer = GGUFWriter(Path(tempfile.mkdtemp()) / f"{architecture}.gguf", architecture)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for key, value in entries.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    return writer


def _written(writer: GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(str(writer.path))
