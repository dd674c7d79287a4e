"""The measured model: what its engines open, and our own engines' copies of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.assembly import AnyModel, runs_in_llama
from kvmosaic.bench.models import TokenCost, model_folder, weigh
from kvmosaic.bench.peers.own import number_format
from kvmosaic.model import load_model
from kvmosaic.model.formats.gguf.file import GgufFile, read_gguf


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
        model, weight = _opened(source, dtype)
        numbers = number_format(model)  # that of "auto" may be one of the others
        models[numbers], weights[numbers] = model, weight
    return Subject(source, models, weights)


def _opened(source: Path, dtype: str) -> tuple[AnyModel, TokenCost]:
    if runs_in_llama(source, "auto", dtype, "none"):
        from kvmosaic.llama.model import load_llama

        model = load_llama(source)
        return model, _weigh_file(read_gguf(source), model.bytes_per_token())
    loaded = load_model(source, dtype=dtype, local_files_only=True)
    return loaded, weigh(loaded.config, loaded.dtype.itemsize, loaded.bytes_per_token())


def _weigh_file(file: GgufFile, kv_bytes_per_token: int) -> TokenCost:
    sizes = {tensor.name: tensor.num_numbers for tensor in file.tensors}
    table = sizes.get("token_embd.weight", 0)
    output = sizes.get("output.weight", table)
    linear = file.num_numbers - table - sizes.get("output.weight", 0)
    return TokenCost(file.num_numbers, linear, output, kv_bytes_per_token, file.num_bytes / file.num_numbers)
