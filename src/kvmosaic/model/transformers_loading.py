"""Loading through transformers: configuration, module and tokenizer, with its errors converted to ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as bars

from kvmosaic.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from kvmosaic.model.cpu.prepack import cpu_has_bfloat16

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def build_module(shown: str, source: str, config: Any, dtype: torch.dtype, options: Mapping[str, Any]) -> Any:
    """The module with all its weights; `shown` names the source in errors."""
    if dtype is torch.float64:
        options = {**options, "experts_implementation": "eager"}  # the grouped product of experts has no float64
    # where PEFT is installed, transformers asks the hub whether it has an adapter of this name, without our options
    options = {**options, "adapter_kwargs": {"local_files_only": True}}
    load = partial(AutoModelForCausalLM.from_pretrained, source, config=config, dtype=dtype, output_loading_info=True)
    hook = bars.set_tqdm_hook(lambda _, given, named: bars.EmptyTqdm(*given, **named))  # those of downloads stay
    try:
        module, report = fetch(shown, partial(load, **options))
    finally:
        bars.set_tqdm_hook(hook)
    _check_complete(shown, report["missing_keys"])
    return module


def read_tokenizer(shown: str, source: str, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a source that has one."""
    return fetch(shown, lambda: AutoTokenizer.from_pretrained(source, **options))


def fetch(source: str, load: Any) -> Any:
    """Runs one transformers loader, and converts its errors to ours."""
    try:
        return load()
    except OSError as error:
        raise ModelNotFound(
            f"{source!r} is neither a folder here nor a model that can be fetched from the hub ({_first_line(error)}); "
            "check the name, download it where there is a network, and give the folder"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        message = _first_line(error)
        if "trust_remote_code" in str(error):
            message = "it brings its own Python code; pass trust_remote_code=True if you have read and trust it"
        raise UnsupportedModel(f"transformers cannot load {source!r} as a causal language model: {message}") from error


def _check_complete(source: str, missing: Iterable[str]) -> None:
    """Refuses a checkpoint with missing weights, which would stay random."""
    names = sorted(missing)
    if names:
        raise UnsupportedModel(
            f"the checkpoint {source!r} lacks {len(names)} weights ({some_of(names)}), which would be random; "
            "download it again, or save it from the class it was trained with"
        )


def some_of(names: Sequence[str]) -> str:
    """The first three names, for an error."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def stored_dtype(config: Any) -> torch.dtype:
    """The dtype of a checkpoint's weights, from its configuration."""
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return DTYPES.get(stored, torch.float32) if isinstance(stored, str) else stored


def chosen_dtype(dtype: str | torch.dtype, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and cache: the requested one, or `dtype_on` for "auto".

    Raises:
        InvalidConfig: an unknown dtype.
    """
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; choose 'auto', " + ", ".join(repr(name) for name in DTYPES))
        return DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise InvalidConfig(f"dtype is {dtype}; choose a floating point type: " + ", ".join(DTYPES))
        return dtype
    return dtype_on(device, stored)


def dtype_on(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype that "auto" selects on a device, for a checkpoint in `stored`."""
    if device.type != "cpu":
        return stored if stored in DTYPES.values() else torch.bfloat16
    return torch.bfloat16 if stored.itemsize <= 2 and cpu_has_bfloat16() else torch.float32


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
