"""Quantized checkpoints: which methods load, and with which packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvmosaic.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch

_DEQUANTIZED = ("fp8", "mxfp8", "mxfp4")
"""Methods that are dequantized at load: otherwise transformers looks for compiled code on the hub, or needs a GPU."""
_PACKAGES: dict[str, Mapping[str, str]] = {
    **{method: {"accelerate": "accelerate"} for method in _DEQUANTIZED},
    "compressed-tensors": {"compressed_tensors": "compressed-tensors"},
    "bitsandbytes": {"bitsandbytes": "bitsandbytes", "accelerate": "accelerate"},
    "torchao": {"torchao": "torchao"},
    "gptq": {"gptqmodel": "gptqmodel", "optimum": "optimum"},
    "awq": {"gptqmodel": "gptqmodel", "accelerate": "accelerate"},
}
"""Supported methods by their name in `quantization_config`, with the modules they need and their pip names."""


def quantization_method(config: Any) -> str:
    """The quantization method of a checkpoint; empty if it is not quantized."""
    settings = quantization_settings(config)
    if not settings:
        return ""
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    method = settings.get("quant_method") or "unknown"
    return str(getattr(method, "value", method))


def quantization_settings(config: Any) -> dict[str, Any]:
    """The entry `quantization_config` of a configuration as a dict; empty if there is none."""
    for each in (config, config.get_text_config()):
        settings = getattr(each, "quantization_config", None)
        if settings:
            return dict(settings) if isinstance(settings, Mapping) else dict(settings.to_dict())
    return {}


def prepare_quantized(source: str, config: Any) -> str:
    """Refuses a quantized checkpoint that cannot be loaded, and requests plain weights where there is a choice.

    Args:
        source: name of the checkpoint for messages.
        config: its configuration; changed.

    Returns:
        The method of the checkpoint, or an empty text.

    Raises:
        UnsupportedModel: its method is not known here, or its package is not installed.
    """
    method = quantization_method(config)
    if not method:
        return ""
    if method not in _PACKAGES:
        known = ", ".join(_PACKAGES)
        raise UnsupportedModel(
            f"the weights of {source!r} are quantized by {method!r:.40}; supported are {known}, and GGUF files: "
            "take the checkpoint that is not quantized, or one of these"
        )
    packages = _PACKAGES[method]
    missing = [name for module, name in packages.items() if not _is_installed(module)]
    if missing:
        raise UnsupportedModel(
            f"the weights of {source!r} are quantized by {method!r}, which needs {' and '.join(missing)}: "
            f"pip install {' '.join(missing)}; or take the checkpoint that is not quantized"
        )
    if method in _DEQUANTIZED:
        for each in (config, config.get_text_config()):
            if getattr(each, "quantization_config", None):
                each.quantization_config = {**quantization_settings(config), "dequantize": True}
    return method


def is_packed(config: Any) -> bool:
    """Whether a loaded model computes with quantized weights."""
    return bool(quantization_settings(config))


def make_plain(module: Any, dtype: torch.dtype) -> None:
    """Removes the quantization marks from a model whose weights were dequantized, and widens these to its dtype.

    With the marks, readers of its configuration take the weights for packed. transformers dequantizes to the
    checkpoint's own dtype, also where another one was asked for.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)
    for config in {id(each): each for each in (module.config, module.config.get_text_config())}.values():
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.__dict__.pop("_is_quantized", None)
    for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
        module.__dict__.pop(mark, None)


def quantized_text(source: str, method: str, module: Any) -> str:
    """Describes how quantized weights were loaded, and their memory if they are plain now."""
    if is_packed(module.config):
        return f"{source} is quantized ({method}), and computed by the package of that method"
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    name = str(next(module.parameters()).dtype).removeprefix("torch.")
    return f"{source} is quantized ({method}), and dequantized to {name}: {bytes_text(num_bytes)} of weights"


def bytes_text(num_bytes: int) -> str:
    """File size as text: "98.4 MB", "1.25 GB"."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
