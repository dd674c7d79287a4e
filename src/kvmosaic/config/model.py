"""Settings of a model: numbers, device, packing, and whether it may compose documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from kvmosaic.config.setting import setting
from kvmosaic.tools import TOOL_FORMATS

_model = partial(setting, panel="Model")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a model is loaded: keyword arguments of `LLM`. `load_model` checks them, since that needs torch."""

    dtype: str = _model(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        help="Type of the weights and of the cache.",
    )
    device: str = _model("auto", max_length=64, metavar="NAME", help="auto, cpu, cuda or for example cuda:1.")
    prepack: bool | Literal["auto", "always", "never"] = _model(
        "auto",
        help="Keep linear layers in bfloat16 in the order in which a CPU multiplies them, which makes answers about "
        "twice as fast; auto: on CPUs that compute in bfloat16.",
    )
    engine: Literal["auto", "transformers", "llama"] = _model(
        "auto",
        help="What computes: transformers, which dequantizes GGUF files, or llama.cpp (llama), which runs them as they "
        "are; auto: llama.cpp for GGUF files where it is installed.",
    )
    kv_cache_dtype: Literal["auto", "f32", "f16", "bf16", "q8_0"] = _model(
        "auto", help="Type of cached keys and values in llama.cpp; auto: f16."
    )
    tool_format: str = _model(
        "auto",
        choices=("auto", *TOOL_FORMATS),
        help="How the model writes tool calls; auto: as its chat template does.",
    )
    adapter: tuple[str, ...] = _model(
        (),
        metavar="[NAME=]FOLDER",
        help="Low-rank adapter (LoRA) that kvmosaic adapt or PEFT wrote; several may be given. The first one computes "
        "prompts with documents, ordinary prompts are the base model's.",
    )
    merge_adapter: bool = _model(
        False, help="Add the only adapter to the weights: it computes all prompts, and costs no time."
    )
    trust_remote_code: bool = _model(False, help="Run Python code that comes with the checkpoint.")
    enable_chunk_cache: bool = _model(
        True, panel="Chunk cache", help="Compose prompts from cached documents; off, they are ordinary prompts."
    )
    profile: bool | str | Path = _model(
        True,
        panel="Chunk cache",
        flag_default="auto",
        max_length=4_096,
        metavar="auto | none | FILE",
        help="What kvmosaic tune found for this model: auto: kvmosaic_profile.json in its folder, if it is there; "
        "none; or a file.",
    )
