"""The measured model: what its engines open, and our own engines' copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.assembly import AnyModel, open_model
from kvmosaic.bench.models import TokenCost, model_folder, weigh, weigh_file
from kvmosaic.model import LoadedModel


@dataclass(frozen=True, slots=True)
class Subject:
    """One model in the number formats that are measured."""

    source: Path
    """Its folder, or its GGUF file."""
    models: dict[str, AnyModel]
    """By number format; the weights of a GGUF file in llama.cpp have that of the file."""
    weights: dict[str, TokenCost]
    """By number format."""

    @property
    def is_file(self) -> bool:
        """Whether it is a GGUF file."""
        return self.source.is_file()

    @property
    def first(self) -> AnyModel:
        """Any of its models."""
        return next(iter(self.models.values()))


def open_subject(name: str, dtypes: Sequence[str], scratch: Path) -> Subject:
    """Loads a model in every dtype.

    Args:
        name: a GGUF file, or what `model_folder` takes.
        dtypes: for our own engines; "auto" runs a GGUF file in llama.cpp where it is installed.
        scratch: for a random model.

    Raises:
        KVMosaicError: it cannot be loaded.
    """
    source = Path(name) if name.endswith(".gguf") else model_folder(name, scratch)
    models: dict[str, AnyModel] = {}
    weights: dict[str, TokenCost] = {}
    for dtype in dict.fromkeys(dtypes):
        model = open_model(source, dtype=dtype, local_files_only=True)
        numbers = model.weight_type  # that of "auto" may be one of the others
        models[numbers], weights[numbers] = model, _weighed(model, source)
    return Subject(source, models, weights)


def _weighed(model: AnyModel, source: Path) -> TokenCost:
    kv_bytes = model.bytes_per_token()
    if isinstance(model, LoadedModel):
        return weigh(model.config, model.dtype.itemsize, kv_bytes)
    return weigh_file(source, kv_bytes)
