"""Loading: from a folder or hub name to a `LoadedModel`, with the dtype and device chosen."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvmosaic.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from kvmosaic.model.int8 import Quantization, check_quantization, quantize
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.prepack import Prepack, cpu_has_bfloat16, let_file_go
from kvmosaic.model.refusing import check_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
    max_positions: int | None = None,
    prepack: Prepack = "auto",
    quantization: Quantization = "none",
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
) -> LoadedModel:
    """Loads a model of transformers and finds out how its attention works.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, or a name on the Hugging Face hub.
        dtype: "auto", "float32", "bfloat16", "float16", "float64" or a torch dtype. "auto" is the checkpoint's on
            CUDA; on a CPU it is bfloat16 for a 16-bit checkpoint if the CPU computes in bfloat16, else float32.
        device: "auto" (CUDA if there is one, else the CPU) or a torch device such as "cuda:1".
        max_positions: the longest sequence to be run; None: what the model allows.
        prepack: keep the weights of linear layers in the order in which a CPU multiplies bfloat16, which makes decoding
            about twice as fast, and fuse the small operations between them where trying it showed no difference.
            "auto": for bfloat16 on a CPU that computes in it; "always" or True: for any bfloat16 on a CPU; "never" or
            False.
        quantization: "int8": linear layers in 8-bit integers, for bfloat16 on a CPU. Half the memory, and less exact;
            small operations are fused whatever `prepack` says.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the checkpoint. Off: such a model is refused.
        local_files_only: never ask the hub, use what was downloaded before.

    Raises:
        ModelNotFound: no such folder, no such name, no safetensors weights in it, or the hub cannot be reached.
        UnsupportedModel: transformers does not know the model, or its attention cannot be reached.
        InvalidConfig: an unknown dtype or device, `max_positions` out of range, `prepack` or `quantization` where
            it cannot be.
    """
    source = _checked_source(name_or_path)
    place = _device(device)
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    config = _fetch(source, lambda: AutoConfig.from_pretrained(source, **options))
    check_config(config)
    chosen = _dtype(dtype, config, place)
    check_quantization(quantization, place, chosen)
    if chosen is torch.float64:
        options["experts_implementation"] = "eager"  # the grouped product of experts has no float64
    model, report = _fetch(
        source,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=chosen, use_safetensors=True, output_loading_info=True, **options
        ),
    )
    _check_complete(source, report["missing_keys"])
    is_int8 = quantization == "int8"
    loaded = LoadedModel.from_module(
        model.to(place),
        _tokenizer(source, options),
        max_positions=max_positions,
        prepack="never" if is_int8 else prepack,
    )
    if is_int8:
        loaded = quantize(loaded)
    let_file_go(loaded.module)
    return loaded


def _checked_source(name_or_path: str | Path) -> str:
    """A folder that holds a model, or text that may be a hub name."""
    path = Path(name_or_path).expanduser()
    text = str(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{text} has no config.json; give the folder that holds config.json and *.safetensors")
        if not any(path.glob("*.safetensors")):
            raise ModelNotFound(
                f"{text} has no *.safetensors file; other weight formats can run code and are not read: "
                "convert them with transformers' save_pretrained"
            )
        return str(path)
    looks_like_path = isinstance(name_or_path, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_like_path or not text.strip():
        raise ModelNotFound(
            f"there is no folder {text!r}; give a folder with config.json and *.safetensors or a hub name"
        )
    return text


def _fetch(source: str, load: Any) -> Any:
    """Runs one transformers loader, with its errors turned into ours."""
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
    """Refuses a checkpoint that leaves weights at random values."""
    names = sorted(missing)
    if names:
        shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        raise UnsupportedModel(
            f"the checkpoint {source!r} lacks {len(names)} weights ({shown}), which would be random; "
            "download it again, or save it from the class it was trained with"
        )


def _tokenizer(source: str, options: dict[str, Any]) -> Any:
    """The model's tokenizer, or None if there is none."""
    path = Path(source)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except OSError:
        return None


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InvalidConfig(f"device is {device!r}; use 'auto', 'cpu', 'cuda' or for example 'cuda:1'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"device is {device!r}, but torch finds no CUDA device here; use 'cpu' or 'auto'")
    return place


def _dtype(dtype: str | torch.dtype, config: Any, device: torch.device) -> torch.dtype:
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; choose 'auto', " + ", ".join(repr(name) for name in _DTYPES))
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES.values():
            raise InvalidConfig(f"dtype is {dtype}; choose a floating point type: " + ", ".join(_DTYPES))
        return dtype
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    stored = _DTYPES.get(stored, torch.float32) if isinstance(stored, str) else stored
    return dtype_on(device, stored)


def dtype_on(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """What "auto" makes of a checkpoint in `stored` on a device."""
    if device.type != "cpu":
        return stored if stored in _DTYPES.values() else torch.bfloat16
    return torch.bfloat16 if stored.itemsize <= 2 and cpu_has_bfloat16() else torch.float32


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
