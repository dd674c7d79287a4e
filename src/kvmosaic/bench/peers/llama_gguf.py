"""Conversion of a Llama folder to a GGUF file; needs numpy and, to write, gguf, and imports nothing of kvmosaic.

llama.cpp rotates neighbouring numbers of a head together, (0, 1), (2, 3), …; transformers rotates the two halves
against each other, (0, D/2), (1, D/2 + 1), …. The rows of the query and key projections are sorted so that both rotate
the same pairs.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MAX_HEADER_BYTES = 100_000_000
_ELEMENTS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_WHOLE_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The configuration of a Llama, as far as llama.cpp asks for it."""

    vocab_size: int
    width: int
    feed_forward: int
    num_layers: int
    num_heads: int
    num_key_heads: int
    head_size: int
    max_positions: int
    rope_theta: float
    norm_epsilon: float
    is_head_tied: bool

    @classmethod
    def of(cls, folder: Path) -> LlamaShape:
        """Reads `config.json`.

        Raises:
            ValueError: it is no plain Llama.
        """
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", "default")
        if (
            config["model_type"] != "llama"
            or kind != "default"
            or config.get("attention_bias")
            or config.get("mlp_bias")
        ):
            raise ValueError(
                f"only Llamas without scaled positions and biases are written for llama.cpp, this model is of type "
                f"{config['model_type']!r} with positions of type {kind!r}"
            )
        num_heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            width=config["hidden_size"],
            feed_forward=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_key_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            max_positions=config["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            norm_epsilon=config["rms_norm_eps"],
            is_head_tied=bool(config.get("tie_word_embeddings")),
        )


def write_gguf(folder: Path, path: Path, dtype: str) -> LlamaShape:
    """Writes the model with matrices in `dtype` (float32 or bfloat16), norms in float32, and without a vocabulary.

    Raises:
        ValueError: it is no plain Llama, or the number format is another one.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"models for llama.cpp are written in float32 or bfloat16, not in {dtype}")
    gguf: Any = importlib.import_module("gguf")
    shape = LlamaShape.of(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_key_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    for name, weight in llama_weights(folder, shape):
        if dtype == "bfloat16" and weight.ndim > 1:
            raw = to_bfloat16(weight).view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return shape


def llama_weights(folder: Path, shape: LlamaShape) -> Iterator[tuple[str, Array]]:
    """Every weight under its name in llama.cpp, in float32.

    Raises:
        ValueError: a weight that no plain Llama has, or a number format that is not read.
    """
    for name, weight in _read(folder):
        if name == "lm_head.weight" and shape.is_head_tied:
            continue
        target = llama_name(name)
        if target.endswith(("attn_q.weight", "attn_k.weight")):
            weight = in_pairs(weight, shape.head_size)
        yield target, weight


def llama_name(name: str) -> str:
    """The name in llama.cpp of a weight of transformers.

    Raises:
        ValueError: no plain Llama has it.
    """
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    if not layer.isdecimal() or part not in _LAYER_NAMES:
        raise ValueError(f"{name} is no weight of a plain Llama")
    return f"blk.{layer}.{_LAYER_NAMES[part]}"


def in_pairs(weight: Array, head_size: int) -> Array:
    """Sorts the rows of each head from halves (0, D/2) to neighbours (0, 1); `weight` is (heads x D, inputs)."""
    halves = weight.reshape(-1, 2, head_size // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def to_bfloat16(values: Array) -> Array:
    """float32 to the nearest bfloat16 (of two, the even one), as 16 bits each; infinities and NaN are not expected."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> 16) & 1
    return ((bits + odd + 0x7FFF) >> 16).astype(np.uint16)


def from_bfloat16(bits: Array) -> Array:
    """16 bits each to float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _read(folder: Path) -> Iterator[tuple[str, Array]]:
    """Names and values, in float32, of all safetensors files of a folder."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ValueError(f"there are no safetensors files in {folder}")
    for path in paths:
        content = np.memmap(path, dtype=np.uint8, mode="r")
        header_bytes = int(content[:8].view("<u8")[0])
        if header_bytes > min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError(f"the header of {path.name} is said to be {header_bytes} bytes long")
        header = json.loads(bytes(content[8 : 8 + header_bytes]))
        for name, about in header.items():
            if name == "__metadata__":
                continue
            if about["dtype"] not in _ELEMENTS:
                raise ValueError(f"{name} is {about['dtype']}; only " + ", ".join(_ELEMENTS) + " are read")
            first, last = (8 + header_bytes + offset for offset in about["data_offsets"])
            values = content[first:last].view(_ELEMENTS[about["dtype"]]).reshape(about["shape"])
            yield name, from_bfloat16(values) if about["dtype"] == "BF16" else values.astype(np.float32)
