"""Model formats. To add one: write its file or room, and add it to `FORMATS`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvmosaic.model.formats.checkpoint import Checkpoint
from kvmosaic.model.formats.gguf.gguf_format import GGUF
from kvmosaic.model.formats.model_format import LoadRequest, ModelFormat, ReadModel

__all__ = ["FORMATS", "LoadRequest", "ModelFormat", "ReadModel", "describe_formats", "find_format", "model_help"]

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
