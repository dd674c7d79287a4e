"""Small random float32 models with the bundled model's tokenizer: folders that vLLM and our own engine both read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV2Config, LlamaConfig, Qwen3Config

from kvmosaic.assembly import bundled_reader
from support.weights import randomize

MODELS = ("llama", "qwen3", "deepseek")
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
_DEEP: dict[str, Any] = {"num_hidden_layers": 12}
_SHARPNESS = 16.0


def make_model(name: str, folder: Path) -> Path:
    """Writes one of `MODELS`, or "deep", and returns its folder.

    "deep" has many layers of sharp attention: its rounding grows from layer to layer as that of trained models does.
    """
    tokenizer = AutoTokenizer.from_pretrained(bundled_reader())
    special = {f"{which}_token_id": getattr(tokenizer, f"{which}_token_id") for which in ("bos", "eos", "pad")}
    shape = {**_SHAPE, **special, "vocab_size": -(-len(tokenizer) // 64) * 64}
    if name in ("llama", "deep"):
        config: Any = LlamaConfig(**{**shape, **(_DEEP if name == "deep" else {})}, head_dim=32)
    elif name == "qwen3":
        config = Qwen3Config(**shape, head_dim=32)
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


def _sharpen(model: Any) -> None:
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(_SHARPNESS)
            layer.self_attn.o_proj.weight.mul_(4.0)
