"""Model loading: from a folder or hub name to a `LoadedModel`, with the dtype and device chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvmosaic.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from kvmosaic.model import gguf
from kvmosaic.model.gguf_checks import check_gguf
from kvmosaic.model.gguf_file import SUFFIX, GgufFile, find_gguf, read_gguf
from kvmosaic.model.int8 import Quantization, check_quantization, quantize
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.prepack import Prepack, cpu_has_bfloat16, let_file_go
from kvmosaic.model.quantized import is_packed, make_plain, prepare_quantized, quantized_text
from kvmosaic.model.unsupported import check_config

logger = logging.getLogger("kvmosaic")

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
    """Loads a model of transformers and detects how its attention works.

    Args:
        name_or_path: a folder with `config.json` and safetensors files, a GGUF file, or a name on the Hugging Face hub.
        dtype: "auto", "float32", "bfloat16", "float16", "float64" or a torch dtype. "auto" is the checkpoint's on
            CUDA; on a CPU it is bfloat16 for a 16-bit checkpoint if the CPU computes in bfloat16, else float32. A GGUF
            file of fewer bits counts as bfloat16.
        device: "auto" (CUDA if there is one, else the CPU) or a torch device such as "cuda:1".
        max_positions: the longest sequence to run; None: the model's limit.
        prepack: keep the weights of linear layers in the order in which a CPU multiplies bfloat16, which makes decoding
            about twice as fast, and fuse the small operations between them if a trial showed no difference.
            "auto": for bfloat16 on a CPU that computes in it; "always" or True: for any bfloat16 on a CPU; "never" or
            False.
        quantization: "int8": linear layers in 8-bit integers, for bfloat16 on a CPU. Half the memory, and less exact;
            small operations are fused whatever `prepack` says.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the checkpoint. Off: such a model is refused.
        local_files_only: never access the hub, use only what was downloaded before.

    Raises:
        ModelNotFound: no such folder, file or name, no safetensors weights in it, or the hub cannot be reached.
        UnsupportedModel: transformers does not know the model, its attention cannot be reached, a GGUF file is damaged,
            or the package is missing that reads its weights.
        InvalidConfig: an unknown dtype or device, `max_positions` out of range, `prepack` or `quantization` where
            it is not supported.
    """
    place = _device(device)
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "local_files_only": local_files_only,
    }
    path = find_gguf(name_or_path)
    if path is None:
        source = _checked_source(name_or_path)
        module, tokenizer, note = _read_checkpoint(source, dtype, place, quantization, options)
    else:
        file = read_gguf(path)
        module, tokenizer, note = _read_gguf(file, dtype, place, quantization, options)
    is_int8 = quantization == "int8"
    loaded = LoadedModel.from_module(
        module.to(place),
        tokenizer,
        max_positions=max_positions,
        prepack="never" if is_int8 else prepack,
    )
    loaded = replace(loaded, weights_note=note)
    if path is not None:
        loaded = replace(loaded, fingerprint=gguf.identity(file, loaded.fingerprint))
    if is_int8:
        loaded = quantize(loaded)
    let_file_go(loaded.module)
    return loaded


def _read_checkpoint(
    source: str, dtype: str | torch.dtype, place: torch.device, quantization: Quantization, options: dict[str, Any]
) -> tuple[Any, Any, str]:
    """Module and tokenizer of a folder or a hub name, and a note on the weights."""
    config = _fetch(source, lambda: AutoConfig.from_pretrained(source, **options))
    check_config(config)
    method = prepare_quantized(source, config, quantization)
    chosen = _dtype(dtype, _stored_dtype(config), place)
    check_quantization(quantization, place, chosen)
    module = _build(source, source, config, chosen, {"use_safetensors": True, **options})
    if method and not is_packed(module.config):
        make_plain(module)
    note = quantized_text(source, method, module) if method else ""
    if note:
        logger.info("%s", note)
    return module, _tokenizer(source, options), note


def _read_gguf(
    file: GgufFile, dtype: str | torch.dtype, place: torch.device, quantization: Quantization, options: dict[str, Any]
) -> tuple[Any, Any, str]:
    """Module and tokenizer of a GGUF file, and a note on the weights."""
    shown = str(file.path)
    check_gguf(file)
    chosen = _dtype(dtype, gguf.stored_dtype(file), place)
    check_quantization(quantization, place, chosen)
    note = gguf.dequantized_text(file, chosen)
    logger.info("%s", note)
    with ExitStack() as stack:
        folder, named = stack.enter_context(gguf.alone(file))
        options = {**options, **named, "local_files_only": True, "trust_remote_code": False}
        config = gguf.read_config(file, folder, options)
        check_config(config)
        module = _build(shown, folder, config, chosen, {**options, **gguf.dequantizing()})
        tokenizer = None
        if gguf.has_tokenizer(file):
            told = gguf.tokenizer_options(file)
            tokenizer = _fetch(shown, lambda: AutoTokenizer.from_pretrained(folder, **options, **told))
    gguf.settle_module(module, file)
    return module, tokenizer, note


def _build(shown: str, source: str, config: Any, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """The module with all its weights."""
    if dtype is torch.float64:
        options = {**options, "experts_implementation": "eager"}  # the grouped product of experts has no float64
    module, report = _fetch(
        shown,
        lambda: AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, output_loading_info=True, **options
        ),
    )
    _check_complete(shown, report["missing_keys"])
    return module


def _checked_source(name_or_path: str | Path) -> str:
    """A folder with a model, or text that may be a hub name."""
    path = Path(name_or_path).expanduser()
    text = str(name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(each.name for each in path.glob(f"*{SUFFIX}") if each.is_file())
            if files:
                raise ModelNotFound(
                    f"{text} is a folder with GGUF files and no config.json; give one of them: {_some(files)}"
                )
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
            f"the checkpoint {source!r} lacks {len(names)} weights ({_some(names)}), which would be random; "
            "download it again, or save it from the class it was trained with"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


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


def _stored_dtype(config: Any) -> torch.dtype:
    """The dtype of a checkpoint's weights, from its configuration."""
    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32
    return _DTYPES.get(stored, torch.float32) if isinstance(stored, str) else stored


def _dtype(dtype: str | torch.dtype, stored: torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, str) and dtype != "auto":
        if dtype not in _DTYPES:
            raise InvalidConfig(f"dtype is {dtype!r}; choose 'auto', " + ", ".join(repr(name) for name in _DTYPES))
        return _DTYPES[dtype]
    if isinstance(dtype, torch.dtype):
        if dtype not in _DTYPES.values():
            raise InvalidConfig(f"dtype is {dtype}; choose a floating point type: " + ", ".join(_DTYPES))
        return dtype
    return dtype_on(device, stored)


def dtype_on(device: torch.device, stored: torch.dtype) -> torch.dtype:
    """The dtype that "auto" selects on a device, for a checkpoint in `stored`."""
    if device.type != "cpu":
        return stored if stored in _DTYPES.values() else torch.bfloat16
    return torch.bfloat16 if stored.itemsize <= 2 and cpu_has_bfloat16() else torch.float32


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
