"""The GGUF format: one file of weights, configuration and tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from kvmosaic.model.formats.model_format import LoadRequest, ModelFormat, ReadModel, first_bytes

logger = logging.getLogger("kvmosaic")

MAGIC = b"GGUF"
SUFFIX = ".gguf"


class GGUF(ModelFormat):
    """A GGUF file. It is dequantized when it is loaded, and its tokenizer is used."""

    title: ClassVar[str] = "a GGUF file"
    capacity_note: ClassVar[str] = "weights are counted as the engine has them, dequantized"

    def find(self, name_or_path: str | Path) -> str | None:
        """Any path that ends in .gguf, whether it exists or not, and any file that begins as GGUF files do."""
        text = str(name_or_path)
        if not text.strip() or "\0" in text:
            return None
        path = Path(text).expanduser()
        if path.is_dir():
            return None
        return str(path) if text.lower().endswith(SUFFIX) or first_bytes(path).startswith(MAGIC) else None

    def read(self, request: LoadRequest) -> ReadModel:
        """Dequantizes the weights."""
        from kvmosaic.model.formats.gguf import weights
        from kvmosaic.model.formats.gguf.file import check_gguf, read_gguf
        from kvmosaic.model.formats.gguf.tokenizer import read_file_tokenizer, warn_of_split
        from kvmosaic.model.transformers_loading import build_module, chosen_dtype
        from kvmosaic.model.unsupported import check_config

        file = read_gguf(Path(request.source))
        shown = str(file.path)
        check_gguf(file)
        chosen = chosen_dtype(request.dtype, weights.stored_dtype(file), request.device)
        note = weights.dequantized_text(file, chosen)
        logger.info("%s", note)
        with ExitStack() as stack:
            folder, named = stack.enter_context(weights.alone(file))
            stack.enter_context(weights.bar_in_terminals_only())
            options = {**request.options, **named, "local_files_only": True, "trust_remote_code": False}
            config = weights.read_config(file, folder, options)
            check_config(config)
            module = build_module(shown, folder, config, chosen, {**options, **weights.dequantizing()})
            tokenizer = read_file_tokenizer(file, folder, options)
            warn_of_split(file)
        weights.settle_module(module, file)
        return ReadModel(module, tokenizer, note, partial(weights.identity, file))

    def read_config(self, source: str) -> Any:
        """From the file's metadata."""
        from kvmosaic.model.formats.gguf.weights import describe

        return describe(Path(source))

    def display_name(self, source: str) -> str:
        """The file's name without its extension."""
        return display_name(Path(source))

    def profile_path(self, source: str, file_name: str) -> Path | None:
        """Beside the file, under its name."""
        path = Path(source)
        return path.with_name(f"{self.display_name(source)}.{file_name}") if path.is_file() else None

    def files_in(self, folder: Path) -> Sequence[str]:
        """The folder's GGUF files."""
        return sorted(each.name for each in folder.glob(f"*{SUFFIX}") if each.is_file())


def display_name(path: Path) -> str:
    """The file's name without its extension."""
    return path.stem if path.suffix.lower() == SUFFIX else path.name
