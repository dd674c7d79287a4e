"""Tiny random models of `support.families` as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter

from kvmosaic.model import LoadedModel
from support.families import build, configuration
from support.gguf import NAMES, interleaved, place_and_name

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
