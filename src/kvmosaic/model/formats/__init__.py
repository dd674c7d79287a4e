"""Model formats: a checkpoint is a folder or hub name, as transformers loads it. No torch.

To add one: write its file or room, and add it to `FORMATS`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar, Final

from kvmosaic.errors import ModelNotFound, UnsupportedModel
from kvmosaic.model.formats.gguf.gguf_format import GGUF
from kvmosaic.model.formats.model_format import LoadRequest, ModelFormat, ReadModel, first_bytes, what_begins_with

__all__ = ["FORMATS", "LoadRequest", "ModelFormat", "ReadModel", "describe_formats", "find_format", "model_help"]


logger = logging.getLogger("kvmosaic")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


class Checkpoint(ModelFormat):
    """A folder or a hub name, as transformers loads it."""

    title: ClassVar[str] = "a model folder, a hub name"
    is_last: ClassVar[bool] = True

    def find(self, name_or_path: str | Path) -> str | None:
        """Takes every name; `read` refuses one that is neither a folder nor a hub name."""
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return str(path)
        if isinstance(name_or_path, Path):  # never the name of a model on the hub
            return str(path) if path.is_absolute() else f"./{path}"
        return name_or_path

    def read(self, request: LoadRequest) -> ReadModel:
        """Loads safetensors weights; quantized ones as they are, or converted, as their method allows."""
        from transformers import AutoConfig

        from kvmosaic.model.quantized import is_packed, make_plain, prepare_quantized, quantized_text
        from kvmosaic.model.transformers_loading import build_module, chosen_dtype, fetch, stored_dtype
        from kvmosaic.model.unsupported import check_config

        source = _checked_source(request.source)
        options = dict(request.options)
        if not options.get("local_files_only"):
            options |= hub_options(source, options.get("revision"))
        config = fetch(source, lambda: AutoConfig.from_pretrained(source, **options))
        check_config(config)
        method = prepare_quantized(source, config)
        chosen = chosen_dtype(request.dtype, stored_dtype(config), request.device)
        module = build_module(source, source, config, chosen, {"use_safetensors": True, **options})
        if method and not is_packed(module.config):
            make_plain(module, chosen)
        note = quantized_text(source, method, module) if method else ""
        if note:
            logger.info("%s", note)
        return ReadModel(module, _tokenizer(source, options), note)

    def read_config(self, source: str) -> Any:
        """From config.json."""
        from transformers import AutoConfig

        from kvmosaic.model.transformers_loading import fetch

        options = hub_options(source)
        return fetch(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=False, **options))

    def display_name(self, source: str) -> str:
        """The folder's name, or the hub name."""
        path = Path(source)
        return path.resolve().name if path.is_dir() else source

    def profile_path(self, source: str, file_name: str) -> Path | None:
        """In the folder."""
        path = Path(source)
        return path / file_name if path.is_dir() else None


def _checked_source(source: str) -> str:
    """A folder with a model, or text that may be a hub name."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"{source} {_missing_config(path)}")
        if not any(path.glob("*.safetensors")):
            raise ModelNotFound(
                f"{source} has no *.safetensors file; other weight formats can run code and are not read: "
                "convert them with transformers' save_pretrained"
            )
        return str(path)
    if path.is_file():
        raise UnsupportedModel(
            f"{source} is a file of no known format: {what_begins_with(first_bytes(path))}; give {describe_formats()}"
        )
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or not source.strip():
        raise ModelNotFound(
            f"there is no folder {source!r}; give a folder with config.json and *.safetensors or a hub name"
        )
    return source


def _missing_config(folder: Path) -> str:
    from kvmosaic.model.transformers_loading import some_of

    for name, model_format in FORMATS.items():
        if files := model_format.files_in(folder):
            return f"is a folder with {name.upper()} files and no config.json; give one of them: {some_of(files)}"
    return f"has no config.json and *.safetensors; give a model's folder (documents: kvmosaic serve MODEL {folder})"


def _tokenizer(source: str, options: Any) -> Any:
    """The model's tokenizer, or None if there is none."""
    from transformers import AutoTokenizer

    path = Path(source)
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except OSError:
        return None


FORMATS: Final[dict[str, ModelFormat]] = {"checkpoint": Checkpoint(), "gguf": GGUF()}


def find_format(name_or_path: str | Path) -> tuple[ModelFormat, str]:
    """The format of what a user gave, and its source in that format."""
    for model_format in sorted(FORMATS.values(), key=lambda each: each.is_last):
        if (source := model_format.find(name_or_path)) is not None:
            return model_format, source
    raise AssertionError("the last format takes everything")


def describe_formats() -> str:
    """What users may give, for errors: "a model folder, a hub name, a GGUF file"."""
    return ", ".join(model_format.title for model_format in FORMATS.values())


def model_help() -> str:
    """Help text of the argument MODEL."""
    text = describe_formats()
    return f"{text[0].upper()}{text[1:]}, or 'reader' for the bundled model."


TIMEOUT_SECONDS = 10.0


def hub_options(source: str, revision: str | None = None) -> dict[str, bool]:
    """`local_files_only` for a hub name where the hub does not answer.

    transformers retries each file for half a minute. This way a downloaded model loads at once, and a mistyped name is
    refused at once.
    """
    if Path(source).is_dir():
        return {}
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(source, "config.json", revision=revision), timeout=TIMEOUT_SECONDS)
    except (HfHubHTTPError, ValueError):
        return {}  # it answered, or the name is none: transformers says what is wrong
    except Exception:  # the errors of an HTTP client, which is another one in each version of the hub's package
        return {"local_files_only": True}
    return {}
