"""Small random float32 models with the bundled model's tokenizer: folders that vLLM and our own engine both read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV2Config,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

from kvmosaic.assembly import bundled_reader
from support.weights import randomize

MODELS = ("llama", "qwen3", "deepseek")
WINDOWS = {"gemma2": 48, "gemma3": 40, "exaone4": 72, "gemma4": 40}
"""Models of which some layers see the last tokens only, and how many."""
SHARED = "gemma4_shared"
"""Another one, whose last two layers read the caches of those before them."""
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    # vLLM's rotation kernel for CPUs turns tokens by wrong positions where queries come as [T, H, D]; torch's does not.
    # With a latent cache, vLLM's CPUs without AMX have no prefix caching, so keys and values are kept whole.
    "deepseek": {
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
        "environment": {"VLLM_MLA_DISABLE": "1"},
    },
}
MAX_TOKEN_ID = 1000
"""Random prompts take their token ids below this."""

_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# vLLM's attention on CPUs knows this latent size only
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "architectures": ["DeepseekV2ForCausalLM"],
    # as DeepSeek's own models have it; vLLM's kernel for plain tables misreads the strides of latent keys on CPUs
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
_IN_TURNS: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA: dict[str, Any] = {**_IN_TURNS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
_WINDOWED: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA, "model_type": "gemma2", "attn_logit_softcapping": 5.0},
    "gemma3": {**_GEMMA, "model_type": "gemma3_text"},
    # its layers without a window have larger heads
    "gemma4": {
        **{"model_type": "gemma4_text", "global_head_dim": 64, "hidden_size_per_layer_input": 0},
        **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
        **{"num_kv_shared_layers": 0, "tie_word_embeddings": True},
    },
    SHARED: {
        **{"model_type": "gemma4_text", "global_head_dim": 32, "hidden_size_per_layer_input": 0},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
        **{"num_kv_shared_layers": 2, "tie_word_embeddings": True},
    },
    "exaone4": {**_IN_TURNS, "model_type": "exaone4"},  # its layers without a window have no positions
}
_DEEP: dict[str, Any] = {"num_hidden_layers": 12}
IMAGE_MODELS: dict[str, str] = {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Models that also take images, and have several positions per token; and the text models of the same weights."""
_IMAGE_CONFIGS: dict[str, Any] = {"qwen2_vl": Qwen2VLConfig, "qwen2_5_vl": Qwen2_5_VLConfig, "qwen3_vl": Qwen3VLConfig}
_VISION: dict[str, Any] = {
    **{"depth": 1, "hidden_size": 32, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "intermediate_size": 64},
    **{"out_hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    **{"fullatt_block_indexes": [0], "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
_IMAGE_TOKENS = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
_PREPROCESSING = """{
  "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
  "size": {"shortest_edge": 3136, "longest_edge": 12544}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]
}
"""
_SHARPNESS = 16.0


def make_model(name: str, folder: Path) -> Path:
    """Writes one of `MODELS`, `WINDOWS` or `IMAGE_MODELS`, `SHARED`, "qwen2" or "deep", and returns its folder.

    "deep" has many layers of sharp attention: its rounding grows from layer to layer as that of trained models does.
    """
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader())
    special = {f"{which}_token_id": getattr(tokenizer, f"{which}_token_id") for which in ("bos", "eos", "pad")}
    shape = {**_SHAPE, **special, "vocab_size": -(-len(tokenizer) // 64) * 64}
    if name in ("llama", "deep"):
        config: Any = LlamaConfig(**{**shape, **(_DEEP if name == "deep" else {})}, head_dim=32)
    elif name == "qwen3":
        config = Qwen3Config(**shape, head_dim=32)
    elif name == "qwen2":
        config = Qwen2Config(**{**shape, "num_attention_heads": 2, "num_key_value_heads": 1})
    elif name in _WINDOWED:
        window = WINDOWS.get(name, 40)
        config = AutoConfig.for_model(**{**shape, **_WINDOWED[name]}, sliding_window=window, head_dim=32)
    elif name in IMAGE_MODELS:
        return _make_image_model(name, folder)
    else:
        config = DeepseekV2Config(**{**shape, **_LATENT})
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(model, 1)
        if name == "deep":
            _sharpen(model)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / name


def _make_image_model(name: str, folder: Path) -> Path:
    """Writes a model that also takes images, with the weights of a text model."""
    origin = folder / IMAGE_MODELS[name]
    if not origin.exists():
        make_model(IMAGE_MODELS[name], folder)
    text = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)
    shape = text.config.to_dict()
    shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    if IMAGE_MODELS[name] == "qwen3":
        shape["rope_parameters"]["mrope_interleaved"] = True
    for key in ("architectures", "model_type"):
        del shape[key]
    special = {key: MAX_TOKEN_ID + number for number, key in enumerate(_IMAGE_TOKENS)}
    config = _IMAGE_CONFIGS[name](text_config=shape, vision_config=_VISION, tie_word_embeddings=False, **special)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(bundled_reader()).save_pretrained(folder / name)
    (folder / name / "preprocessor_config.json").write_text(_PREPROCESSING)
    return folder / name


def _sharpen(model: Any) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(_SHARPNESS)
            layer.self_attn.o_proj.weight.mul_(4.0)
