"""Adapter files: `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes and reads them.

Only LoRA of linear layers is read: y = W x + scale * B A x. Whatever else PEFT can express (DoRA, biases, trained
embeddings, …) is refused by name, since leaving it out would give other answers without a word.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvmosaic.errors import InvalidAdapter

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 2**34
MAX_RANK = 1_024
_PREFIX = "base_model.model."
_NAME = re.compile(rf"{re.escape(_PREFIX)}(.+)\.lora_([AB])\.(?:default\.)?weight")
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "fan_in_fan_out": (False, None),
    "alora_invocation_tokens": (None, []),
}
"""Settings of PEFT that change what an adapter computes, and the values with which they change nothing."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Update of one linear layer.

    down: [rank, in_features], A
    up: [out_features, rank], B
    scale: factor of B A x
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter in memory, in float32 or as it was stored."""

    layers: Mapping[str, LowRank]
    """By the name of the linear layer in the model: "model.layers.0.self_attn.q_proj"."""
    digest: str = field(default="")
    """SHA-256 (hex) of all updates. It is the content that identifies an adapter, not its name or folder."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest(self.layers))

    @property
    def num_parameters(self) -> int:
        """Numbers of all updates."""
        return sum(layer.down.numel() + layer.up.numel() for layer in self.layers.values())

    @property
    def changes_nothing(self) -> bool:
        """Whether every update is zero."""
        return all(not layer.up.any() or not layer.down.any() or not layer.scale for layer in self.layers.values())


def read_adapter(folder: str | Path) -> LoraAdapter:
    """Reads an adapter from a folder of PEFT's files.

    Raises:
        InvalidAdapter: no such folder or file, damaged, too large, no LoRA, or a setting that is not supported.
    """
    folder = Path(folder).expanduser()
    config = _read_config(folder / CONFIG_NAME)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidAdapter(f"{folder} has an adapter of the type {kind!r:.80}; only LORA is supported")
    for name, harmless in _UNSUPPORTED.items():
        if name in config and config[name] not in harmless:
            raise InvalidAdapter(
                f"{folder / CONFIG_NAME} sets {name} to {config[name]!r:.80}, which is not supported; train the "
                "adapter without it, or merge it into the weights with PEFT (merge_and_unload) and serve these"
            )
    scales = _Scales.read(config, folder)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _read_weights(folder / WEIGHTS_NAME).items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise InvalidAdapter(
                f"{folder / WEIGHTS_NAME} holds {name!r:.200}, which is no update of a linear layer; only LoRA of "
                "linear layers is supported"
            )
        if tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.isfinite().all():
            raise InvalidAdapter(f"{name!r:.200} in {folder / WEIGHTS_NAME} is no matrix of finite numbers")
        parts.setdefault(found[1], {})[found[2]] = tensor
    layers = {}
    for name, pair in sorted(parts.items()):
        if set(pair) != {"A", "B"}:
            raise InvalidAdapter(f"{folder / WEIGHTS_NAME} holds only one half of the update of {name!r:.200}")
        down, up = pair["A"], pair["B"]
        if down.shape[0] != up.shape[1] or not 1 <= down.shape[0] <= MAX_RANK:
            raise InvalidAdapter(
                f"the update of {name!r:.200} has matrices of {tuple(down.shape)} and {tuple(up.shape)}; expected "
                f"[rank, in] and [out, rank] with a rank of 1 to {MAX_RANK}"
            )
        layers[name] = LowRank(down, up, scales.of(name, down.shape[0]))
    if not layers:
        raise InvalidAdapter(f"{folder / WEIGHTS_NAME} holds no update")
    return LoraAdapter(layers)


def write_adapter(adapter: LoraAdapter, folder: Path, base_model: str) -> None:
    """Writes an adapter as PEFT does, so that PEFT, vLLM and others read it.

    Args:
        adapter: with one rank and one scale for all layers.
        folder: where the files go; it is made where it is missing, existing files are replaced, each at once.
        base_model: name of the model for `base_model_name_or_path`.
    """
    ranks = {layer.down.shape[0] for layer in adapter.layers.values()}
    scales = {layer.scale for layer in adapter.layers.values()}
    assert len(ranks) == len(scales) == 1, "one rank and one scale for all layers"
    rank, scale = ranks.pop(), scales.pop()
    tensors = {}
    for name, layer in adapter.layers.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = layer.down.detach().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = layer.up.detach().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{WEIGHTS_NAME}"
    save_file(tensors, draft, {"format": "pt"})
    draft.replace(folder / WEIGHTS_NAME)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.layers}),
    }
    draft = folder / f".{CONFIG_NAME}"
    draft.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    draft.replace(folder / CONFIG_NAME)


@dataclass(frozen=True, slots=True)
class _Scales:
    """lora_alpha / rank of each layer."""

    alpha: float
    patterns: Mapping[str, float]
    is_rank_stabilized: bool

    @classmethod
    def read(cls, config: Mapping[str, Any], folder: Path) -> _Scales:
        alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
        numbers = [alpha, *(patterns.values() if isinstance(patterns, dict) else [None])]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
            raise InvalidAdapter(f"{folder / CONFIG_NAME}: lora_alpha and alpha_pattern must be finite numbers")
        return cls(float(alpha), patterns, bool(config.get("use_rslora")))

    def of(self, name: str, rank: int) -> float:
        alpha = next(
            (value for pattern, value in self.patterns.items() if name == pattern or name.endswith(f".{pattern}")),
            self.alpha,
        )
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidAdapter(f"{path} has {path.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidAdapter(
            f"{path.parent} has no {CONFIG_NAME}; give a folder that `kvmosaic adapt` or PEFT wrote"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{path} cannot be read: {error}"[:400]) from error
    if not isinstance(config, dict):
        raise InvalidAdapter(f"{path} holds no JSON object")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.stat().st_size > MAX_WEIGHT_BYTES:
            raise InvalidAdapter(f"{path} has {path.stat().st_size} bytes; at most {MAX_WEIGHT_BYTES} are read")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{path.parent} has no {WEIGHTS_NAME}; only safetensors files are read") from error
    except (OSError, SafetensorError) as error:
        raise InvalidAdapter(f"{path} cannot be read: {error}"[:400]) from error


def _digest(layers: Mapping[str, LowRank]) -> str:
    digest = hashlib.sha256(b"kvmosaic-lora-1")
    for name, layer in sorted(layers.items()):
        digest.update(json.dumps([name, repr(layer.scale)]).encode())
        for matrix in (layer.down, layer.up):
            digest.update(f"{tuple(matrix.shape)}{matrix.dtype}".encode())
            digest.update(matrix.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
