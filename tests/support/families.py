"""Tiny random models of as many transformers architectures as possible, each with what detection must find.

Sizes are small and awkward on purpose: windows of 8 that matter in a prompt of 30 tokens, grouped queries, partial
rotations, layers without positions. Weights are scaled so that logits are of order 1 and no norm weight is 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from support.float64 import Float64, make_float64
from support.weights import randomize

_SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 32,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": None,
    "num_key_value_heads": 4,
}
_COMPRESSED: dict[str, Any] = {
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "hc_mult": 2,
    "sliding_window": 8,
}
_MIXED = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A model type, its settings, and what is true of it.

    rotations: per layer "layout offset+dims/head", with "-" before it for the negative direction; "none" without one
    masks: per layer, as `str(MaskSpec)`
    reason: part of why it cannot be moved ("fixed") or is refused; empty for movable models
    attention: transformers' implementation of attention that is taken for the truth
    """

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    rotations: tuple[str, ...] = ("half 0+16/16",)
    masks: tuple[str, ...] = ("full",)
    reason: str = ""
    is_refused: bool = False
    architecture: str | None = None
    attention: str = "eager"
    leave_out: tuple[str, ...] = ()

    @property
    def is_movable(self) -> bool:
        """Whether cached keys may be used at another position."""
        return not self.reason


def _family(model_type: str, *parts: dict[str, Any], **more: Any) -> Family:
    settings: dict[str, Any] = {}
    for part in parts:
        settings |= part
    return Family(model_type, settings, **more)


_LEARNED = {"rotations": ("none",), "reason": "its values depend on the position"}
_WINDOW_FULL = ("window 8", "full")
_LATENT_HALF = {"rotations": ("half 32+8/40",)}
_INDEXED: dict[str, Any] = {"index_topk": 12, "index_n_heads": 24, "index_head_dim": 16}
_INDEX_KEYS = {"rotations": (*["half 32+8/40"] * 2, *["half 0+8/16"] * 2)}
_UNREACHABLE = {"is_refused": True, "reason": "cannot be reached"}
_HEADS_ONLY = ("head_dim", "num_key_value_heads")
_TWELVE = {"num_attention_heads": 12, "hidden_size": 192}
_FALCON = {"attention": "sdpa", "leave_out": ("head_dim", "num_key_value_heads", "intermediate_size")}
_ALIBI = {"rotations": ("none",), "leave_out": (*_HEADS_ONLY, "max_position_embeddings")}
_ROUNDED = {"rotations": ("none",), "reason": "rounded to bfloat16", **_FALCON}
_CROSS = {"is_refused": True, "reason": "cross-attention"}
_BUCKETS: dict[str, Any] = {"is_refused": True, "reason": "relative position buckets"}
_STATE = {"is_refused": True, "reason": "state"}

FAMILIES: dict[str, Family] = {
    # One rotation over the whole head, every layer alike.
    "llama": _family("llama"),
    "apertus": _family("apertus"),
    "arcee": _family("arcee"),
    "bitnet": _family("bitnet"),
    "cwm": _family("cwm", _WINDOWS, masks=_WINDOW_FULL),
    "hyperclovax": _family("hyperclovax"),
    "jais2": _family("jais2"),
    "seed_oss": _family("seed_oss"),
    "gemma": _family("gemma"),
    "granite": _family("granite", {"attention_multiplier": 0.3}),
    "olmo": _family("olmo", {"clip_qkv": 2.0}),
    "olmo2": _family("olmo2"),
    "nanochat": _family("nanochat", rotations=("-half 0+16/16",)),
    "qwen2": _family("qwen2"),
    "qwen3": _family("qwen3"),
    "smollm3": _family("smollm3", {"no_rope_layers": [1, 0]}, rotations=("half 0+16/16", "none")),
    "moshi": _family("moshi", {"num_key_value_heads": 4, "ffn_dim": 96}, architecture="MoshiForCausalLM"),
    # Windows: by argument, by mask alone, alternating with full layers.
    "mistral": _family("mistral", {"sliding_window": 8}, masks=("window 8",)),
    "ministral": _family("ministral", _WINDOWS, masks=_WINDOW_FULL),
    "ministral3": _family("ministral3", {"sliding_window": 8}, masks=("window 8",)),
    "starcoder2": _family("starcoder2", {"sliding_window": 8}, masks=("window 8",), leave_out=("head_dim",)),
    "qwen2_window": _family(
        "qwen2", _WINDOWS, {"use_sliding_window": True, "max_window_layers": 0}, masks=_WINDOW_FULL
    ),
    "gemma2": _family("gemma2", _WINDOWS, {"attn_logit_softcapping": 5.0}, masks=_WINDOW_FULL),
    "vaultgemma": _family("vaultgemma", _WINDOWS, {"attn_logit_softcapping": 5.0}, masks=_WINDOW_FULL),
    "gemma3": _family("gemma3_text", _WINDOWS, {"query_pre_attn_scalar": 20}, masks=_WINDOW_FULL),
    "gemma3n": _family(
        "gemma3n_text",
        {"num_hidden_layers": 4, "sliding_window": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 128},
        {"hidden_size_per_layer_input": 16, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
        masks=_WINDOW_FULL,
    ),
    "gemma4": _family(
        "gemma4_text",
        {"num_hidden_layers": 4, "sliding_window": 8, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 128},
        {"hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"global_head_dim": 32},
        rotations=("half 0+16/16", "half 0+32/32"),
        masks=_WINDOW_FULL,
    ),
    "granite_swa": _family("granite_swa", _WINDOWS, masks=_WINDOW_FULL),
    "modernbert_decoder": _family(
        "modernbert-decoder",
        {"local_attention": 16, "layer_types": ["sliding_attention", "full_attention"]},
        masks=_WINDOW_FULL,
    ),
    "olmo3": _family("olmo3", _WINDOWS, masks=_WINDOW_FULL),
    "exaone4": _family(
        "exaone4", _MIXED, {"sliding_window": 8}, rotations=("half 0+16/16", "none"), masks=_WINDOW_FULL
    ),
    # Partial rotations.
    "phi": _family("phi", {"partial_rotary_factor": 0.5}, rotations=("half 0+8/16",), leave_out=("head_dim",)),
    "persimmon": _family("persimmon", rotations=("half 0+8/16",), leave_out=("head_dim",)),
    "stablelm": _family("stablelm", rotations=("half 0+4/16",), leave_out=("head_dim",)),
    "nemotron": _family("nemotron", rotations=("half 0+8/16",)),
    "gpt_neox": _family("gpt_neox", rotations=("half 0+4/16",), leave_out=("head_dim", "num_key_value_heads")),
    "phi3": _family(
        "phi3", {"sliding_window": 8, "partial_rotary_factor": 0.5}, rotations=("half 0+8/16",), masks=("window 8",)
    ),
    # Interleaved pairs.
    "cohere": _family("cohere", rotations=("interleaved 0+16/16",)),
    "cohere2": _family("cohere2", _WINDOWS, rotations=("interleaved 0+16/16", "none"), masks=_WINDOW_FULL),
    "ernie4_5": _family("ernie4_5", rotations=("interleaved 0+16/16",)),
    "glm": _family("glm", rotations=("interleaved 0+8/16",)),
    "glm4": _family("glm4", rotations=("interleaved 0+8/16",)),
    "helium": _family("helium", rotations=("interleaved 0+16/16",)),
    # Experts.
    "mixtral": _family("mixtral", _EXPERTS, {"sliding_window": 8}, masks=("window 8",)),
    "qwen2_moe": _family(
        "qwen2_moe", _EXPERTS, _WINDOWS, {"use_sliding_window": True, "max_window_layers": 0}, masks=_WINDOW_FULL
    ),
    "qwen3_moe": _family("qwen3_moe", _EXPERTS),
    "olmoe": _family("olmoe", _EXPERTS),
    "flex_olmo": _family("flex_olmo", _EXPERTS),
    "granitemoe": _family("granitemoe", _EXPERTS),
    "granitemoeshared": _family("granitemoeshared", _EXPERTS, {"shared_intermediate_size": 32}),
    "granitemoe_swa": _family("granitemoe_swa", _EXPERTS, _WINDOWS, masks=_WINDOW_FULL),
    "granitemoehybrid": _family(
        "granitemoehybrid",
        _EXPERTS,
        {"layer_types": ["full_attention"] * 2, "shared_intermediate_size": 32, "position_embedding_type": "rope"},
    ),
    "aria_text": _family("aria_text", {"moe_num_experts": 4, "moe_topk": 2}),
    "phimoe": _family("phimoe", _EXPERTS, {"sliding_window": 8}, masks=("window 8",)),
    "ernie4_5_moe": _family(
        "ernie4_5_moe", _EXPERTS, {"moe_num_experts": 4, "moe_k": 2}, rotations=("interleaved 0+16/16",)
    ),
    "cohere2_moe": _family(
        "cohere2_moe", _EXPERTS, _WINDOWS, rotations=("interleaved 0+16/16", "none"), masks=_WINDOW_FULL
    ),
    "dots1": _family("dots1", _EXPERTS, {"first_k_dense_replace": 1}),
    "glm4_moe": _family("glm4_moe", _EXPERTS, {"first_k_dense_replace": 1}, rotations=("half 0+8/16",)),
    "minimax_m2": _family("minimax_m2", _EXPERTS),
    "solar_open": _family("solar_open", _EXPERTS),
    "jetmoe": _family("jetmoe", _EXPERTS, {"kv_channels": 16}, leave_out=("head_dim", "num_attention_heads")),
    "gpt_oss": _family("gpt_oss", _EXPERTS, _WINDOWS, masks=_WINDOW_FULL),
    "afmoe": _family(
        "afmoe", _EXPERTS, _WINDOWS, {"num_dense_layers": 1}, rotations=("half 0+16/16", "none"), masks=_WINDOW_FULL
    ),
    "exaone_moe": _family(
        "exaone_moe",
        _EXPERTS,
        _WINDOWS,
        {"mlp_layer_types": ["dense", "sparse"]},
        masks=_WINDOW_FULL,
        rotations=("half 0+16/16", "none"),
    ),
    "laguna": _family("laguna", _EXPERTS, _WINDOWS, rotations=("half 0+16/16", "half 0+8/16"), masks=_WINDOW_FULL),
    "mellum": _family("mellum", _EXPERTS, _WINDOWS, masks=_WINDOW_FULL),
    "kolibri1": _family("kolibri1", _EXPERTS, _WINDOWS, rotations=("half 0+16/16", "none"), masks=_WINDOW_FULL),
    "hy_v3": _family("hy_v3", _EXPERTS, {"mlp_layer_types": ["dense", "sparse"]}),
    "flint": _family("flint", _EXPERTS, _WINDOWS, rotations=("half 0+16/16", "none"), masks=_WINDOW_FULL),
    "beam": _family("beam", _EXPERTS, _WINDOWS, rotations=("half 0+16/16", "none"), masks=_WINDOW_FULL),
    "mimo_v2_flash": _family(
        "mimo_v2_flash",
        _EXPERTS,
        _WINDOWS,
        {"v_head_dim": 12, "mlp_layer_types": ["dense", "sparse"]},
        rotations=("half 0+6/16",),
        masks=_WINDOW_FULL,
    ),
    "llama4": _family(
        "llama4_text",
        _EXPERTS,
        {"num_hidden_layers": 4, "attention_chunk_size": 8, "intermediate_size_mlp": 96},
        rotations=("interleaved 0+16/16", "interleaved 0+16/16", "interleaved 0+16/16", "none"),
        masks=("chunked 8", "chunked 8", "chunked 8", "full"),
    ),
    # Latent attention: one latent per token, the rotary part beside it.
    "deepseek_v2": _family("deepseek_v2", _EXPERTS, _LATENT, rotations=("interleaved 32+8/40",)),
    "deepseek_v3": _family("deepseek_v3", _EXPERTS, _LATENT, {"first_k_dense_replace": 1}, **_LATENT_HALF),
    "glm4_moe_lite": _family("glm4_moe_lite", _EXPERTS, _LATENT, **_LATENT_HALF),
    # Latent attention that reads the best keys only: its indexers are layers beside the others.
    "deepseek_v32": _family("deepseek_v32", _EXPERTS, _LATENT, _INDEXED, **_INDEX_KEYS),
    "glm_moe_dsa": _family(
        "glm_moe_dsa",
        _EXPERTS,
        _LATENT,
        _INDEXED,
        {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
        rotations=(*["half 32+8/40"] * 4, *["half 0+8/16"] * 2),
    ),
    "axk2": _family("axk2", _EXPERTS, _LATENT, _INDEXED, **_INDEX_KEYS),
    "hy_v4": _family("hy_v4", _EXPERTS, _LATENT, _INDEXED, rotations=(*["half 32+8/40"] * 2, *["half 8+8/16"] * 2)),
    "dots3_note": _family("dots3_note_text", _EXPERTS, _LATENT, _INDEXED, **_INDEX_KEYS),
    "youtu": _family("youtu", _LATENT, **_LATENT_HALF),
    "minicpm3": _family("minicpm3", _LATENT, **_LATENT_HALF),
    "axk1": _family("axk1", _EXPERTS, _LATENT, **_LATENT_HALF),
    "mistral4": _family("mistral4", _EXPERTS, _LATENT, architecture="Mistral4ForCausalLM", **_LATENT_HALF),
    "longcat_flash": _family(
        "longcat_flash",
        _EXPERTS,
        _LATENT,
        {
            "num_layers": 1,
            "head_dim": 8,
            "moe_topk": 2,
            "zero_expert_num": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
        },
        leave_out=("num_hidden_layers", "intermediate_size"),
        **_LATENT_HALF,
    ),
    # Not movable: positions are added, or keys are scaled after turning.
    "gpt2": _family("gpt2", leave_out=("head_dim", "num_key_value_heads"), **_LEARNED),
    "opt": _family("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, **_LEARNED),
    "biogpt": _family("biogpt", **_LEARNED),
    "gpt_bigcode": _family("gpt_bigcode", leave_out=("head_dim", "num_key_value_heads"), **_LEARNED),
    "hunyuan_v1_dense": _family("hunyuan_v1_dense", rotations=("none",), reason="rotated and then scaled"),
    "hunyuan_v1_moe": _family("hunyuan_v1_moe", _EXPERTS, rotations=("none",), reason="rotated and then scaled"),
    "deepseek_v4": _family(
        "deepseek_v4",
        _EXPERTS,
        _COMPRESSED,
        {"layer_types": ["sliding_attention"] * 2},
        masks=("window 8",),
        **_LEARNED,
    ),
    "gpt_neo": _family(
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]]},
        masks=("full", "window 8"),
        leave_out=(*_HEADS_ONLY, "num_hidden_layers", "num_attention_heads"),
        **_LEARNED,
    ),
    "xglm": _family("xglm", {"num_layers": 2, "ffn_dim": 96, "attention_heads": 4}, leave_out=_HEADS_ONLY, **_LEARNED),
    # Attention written into the model, opened at load.
    "falcon": _family("falcon", **_FALCON),
    "falcon_groups": _family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, **_FALCON),
    "gptj": _family("gptj", {"rotary_dim": 8}, rotations=("interleaved 0+8/16",), leave_out=_HEADS_ONLY),
    "codegen": _family("codegen", {"rotary_dim": 8}, rotations=("interleaved 0+8/16",), leave_out=_HEADS_ONLY),
    # A bias by distance (ALiBi), and no rotation.
    "bloom": _family("bloom", **_ALIBI),
    "bloom_twelve": _family("bloom", _TWELVE, **_ALIBI),
    "mpt": _family("mpt", {"max_seq_len": 4096}, **_ALIBI),
    "mpt_twelve": _family("mpt", _TWELVE, {"max_seq_len": 4096}, **_ALIBI),
    "falcon_alibi": _family("falcon", {"alibi": True}, **_ROUNDED),
    "falcon_alibi_twelve": _family("falcon", _TWELVE, {"alibi": True, "multi_query": False}, **_ROUNDED),
    # Refused: an encoder beside it, or positions that are not given or not added.
    "bart": _family("bart", {"encoder_layers": 1, "decoder_layers": 1, "d_model": 64}, leave_out=_HEADS_ONLY, **_CROSS),
    "gpt2_cross": _family("gpt2", {"add_cross_attention": True}, leave_out=_HEADS_ONLY, **_CROSS),
    "bert": _family("bert", leave_out=_HEADS_ONLY, is_refused=True, reason="neither causal nor"),
    "roberta": _family(
        "roberta", {"is_decoder": True}, leave_out=_HEADS_ONLY, is_refused=True, reason="does not begin at position 0"
    ),
    "xlnet": Family(
        "xlnet",
        {"vocab_size": 128, "d_model": 64, "n_layer": 1, "n_head": 4, "d_inner": 96},
        leave_out=tuple(_SHAPE),
        **_BUCKETS,
    ),
    # Refused: attention that cannot be reached, or a state beside it.
    "roformer": _family("roformer", {"is_decoder": True}, leave_out=_HEADS_ONLY, **_UNREACHABLE),
    "openai_gpt": _family("openai-gpt", leave_out=_HEADS_ONLY, **_UNREACHABLE),
    "diffllama": _family("diffllama", is_refused=True, reason="more than once"),
    "doge": _family("doge", is_refused=True, reason="use the mask"),
    "mamba": _family("mamba", **_STATE),
    "mamba2": _family("mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 1}, **_STATE),
    "falcon_mamba": _family("falcon_mamba", **_STATE),
    "rwkv": _family("rwkv", **_STATE),
    "xlstm": _family("xlstm", leave_out=("head_dim",), **_STATE),
    "recurrent_gemma": _family("recurrent_gemma", {"num_hidden_layers": 3}, **_STATE),
    "zaya": _family("zaya", _EXPERTS, {"num_experts_per_tok": 1}, is_refused=True, reason="one output per token"),
    "deepseek_v4_compressed": _family(
        "deepseek_v4",
        _EXPERTS,
        _COMPRESSED,
        {"layer_types": ["sliding_attention", "heavily_compressed_attention"]},
        is_refused=True,
        reason="compressed groups",
    ),
}

_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
_ALTERNATING = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}

HYBRIDS: dict[str, Family] = {
    "qwen3_next": _family("qwen3_next", _EXPERTS, _DELTA),
    "qwen3_5": _family("qwen3_5_text", _DELTA, {"linear_key_head_dim": 20}),
    "olmo_hybrid": _family("olmo_hybrid", _DELTA, {"linear_num_key_heads": 4, "linear_value_head_dim": 16}),
    "kimi_linear": _family("kimi_linear", _EXPERTS, _LATENT, _DELTA, {"linear_num_heads": 4, "linear_head_dim": 8}),
    "minimax": _family("minimax", _EXPERTS, _ALTERNATING, {"block_size": 8}),
    "jamba": _family("jamba", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4}),
    "bamba": _family("bamba", _MAMBA, {"attn_layer_indices": [1], "num_hidden_layers": 3, "mamba_chunk_size": 8}),
    "granitemoehybrid_mamba": _family(
        "granitemoehybrid",
        _EXPERTS,
        _MAMBA,
        {"layer_types": ["mamba", "attention", "mamba"], "num_hidden_layers": 3, "shared_intermediate_size": 32},
    ),
    "falcon_h1": _family("falcon_h1", _MAMBA, {"mamba_d_ssm": 128, "mamba_chunk_size": 8}),
    "nemotron_h": _family(
        "nemotron_h",
        _EXPERTS,
        {"layers_block_type": ["mamba", "attention", "moe", "mamba"], "num_hidden_layers": 4, "chunk_size": 8},
        {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
        {"moe_shared_expert_intermediate_size": 32, "time_step_min": 1e-12},  # transformers clamps in prefills alone
    ),
    "lfm2": _family("lfm2", {"layer_types": ["conv", "full_attention"]}),
}
"""Models with layers that carry a state from token to token, beside layers with attention."""

SPECIMENS = frozenset(
    "llama nanochat olmo granite smollm3 starcoder2 gemma2 gemma3n phi3 cohere2 glm gpt_oss laguna llama4 "
    "deepseek_v2 deepseek_v3 gpt2 falcon gptj bloom beam".split()
)
"""One model or two of each kind of rotation, mask, score and storage."""


def each_family(names: Iterable[str]) -> list[Any]:
    """The parameters of a test over families; all but specimens are slow."""
    return [name if name in SPECIMENS else pytest.param(name, marks=pytest.mark.slow) for name in names]


def configuration(family: str, **changes: Any) -> Any:
    """The family's tiny configuration."""
    about = (FAMILIES | HYBRIDS)[family]
    if about.model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {about.model_type}")
    settings = {name: value for name, value in _SHAPE.items() if name not in about.leave_out} | about.settings | changes
    settings = {name: value for name, value in settings.items() if value is not None}
    return transformers.CONFIG_MAPPING[about.model_type](**settings)


def build(family: str, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """A tiny random model in evaluation mode. In float64 it computes in float64 throughout (see `Float64`).

    Args:
        family: a key of `FAMILIES`.
        dtype: of the weights.
        seed: of the weights.
        changes: settings that replace the family's.
    """
    with Float64() if dtype is torch.float64 else nullcontext():
        about, config = (FAMILIES | HYBRIDS)[family], configuration(family, **changes)
        architecture = about.architecture
        source = (
            getattr(transformers, architecture)._from_config
            if architecture
            else (transformers.AutoModelForCausalLM.from_config)
        )
        model = source(config, dtype=dtype, attn_implementation=about.attention, experts_implementation="eager")
        randomize(model, seed)
        for name, parameter in model.named_parameters() if family in HYBRIDS else ():
            if name.endswith("A_log"):
                parameter.data.sub_(5.0)  # memories that last for more than a token
    model.eval().requires_grad_(False)
    return make_float64(model) if dtype is torch.float64 else model
