"""GGUF files made from a folder with a Llama, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file

from kvmosaic.assembly import bundled_reader

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CONTROL, NORMAL = 3, 1


def save_gguf(
    path: Path,
    folder: Path | None = None,
    kind: str = "F32",
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    has_tokenizer: bool = True,
) -> Path:
    """Writes the model of a folder (the bundled reader, if none is given) into a file, which is given back.

    Args:
        path: of the file.
        folder: with a Llama.
        kind: how matrices are stored: F32, F16, BF16, Q8_0, Q4_0, Q4_1, …
        architecture: what the file says.
        metadata: more entries, or other ones; None leaves one out.
        tensors: more of them.
        has_tokenizer: whether the file has one.
    """
    folder = folder or bundled_reader()
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    entries: dict[str, Any] = {
        "general.name": "a test",
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        f"{architecture}.attention.head_count": num_heads,
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.vocab_size": config["vocab_size"],
        **(tokenizer_entries(folder) if has_tokenizer else {}),
        **(metadata or {}),
    }
    for key, value in entries.items():
        add_entry(writer, key, value)
    for name, weight in load_file(folder / "model.safetensors").items():
        place, stored = place_and_name(name, NAMES)
        array = weight.float().numpy()
        if place.endswith(("q_proj", "k_proj")):
            array = interleaved(array, array.shape[0] // head_dim)
        _add_tensor(writer, stored, array, kind if array.ndim > 1 else "F32")
    for name, array in (tensors or {}).items():
        _add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def place_and_name(name: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The place of a tensor's module in its layer, and the tensor's name in a file."""
    place, _, part = name.rpartition(".")
    prefix = ""
    if place.startswith("model.layers."):
        _, _, layer, place = place.split(".", 3)
        prefix = f"blk.{layer}."
    return place, f"{prefix}{names[place]}.{part}"


def hf_name(name: str) -> str:
    """The tensor's name in a Llama of transformers."""
    *prefix, place, part = name.split(".")
    layer = f"model.layers.{prefix[1]}." if prefix else ""
    return f"{layer}{next(key for key, value in NAMES.items() if value == place)}.{part}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of queries and keys in the order of llama.cpp, which turns neighbouring dimensions together."""
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _add_tensor(writer: GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    stored = GGMLQuantizationType[kind]
    writer.add_tensor(name, quantize(array, stored), raw_dtype=stored)


def add_entry(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def tokenizer_entries(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    control = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary = {**content["model"]["vocab"], **control}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    entries = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in control else NORMAL for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": settings.get("chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        entries[f"tokenizer.ggml.{key}_token_id"] = vocabulary.get(settings.get(f"{name}_token"))
    return entries
