"""GGUF file: metadata and the table of tensors, read and checked without a library and before any weight is read.

    magic, version │ counts │ metadata: key, type, value … │ tensors: name, shape, type, offset … │ padding │ data

Every length comes from the file and is compared with the remaining size before it is used.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

from kvmosaic.errors import ModelNotFound, UnsupportedModel, pip_install
from kvmosaic.model.formats.gguf.gguf_format import MAGIC, display_name
from kvmosaic.model.formats.model_format import what_begins_with

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
}
_KEPT_ELEMENTS = 4_096
"""Max length of a kept array; of longer arrays (vocabularies) and of all text arrays only the length is kept."""
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 8
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_DOWNLOAD_AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """In the file's order: the fastest dimension first."""
    kind: int
    """Storage type, as a number of ggml."""
    offset: int
    """Bytes from `data_start`."""

    @property
    def num_numbers(self) -> int:
        """Count of its numbers, whatever the storage type."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    num_bytes: int
    metadata: Mapping[str, Any]
    """Numbers, texts and short arrays of numbers; a longer array, or one of texts, as its length."""
    tensors: tuple[GgufTensor, ...]
    data_start: int

    @property
    def architecture(self) -> str:
        """Name of the architecture in ggml."""
        return str(self.metadata["general.architecture"])

    @property
    def name(self) -> str:
        """The file's name without its extension."""
        return display_name(self.path)

    @property
    def num_numbers(self) -> int:
        """Count of numbers in all tensors."""
        return sum(tensor.num_numbers for tensor in self.tensors)

    @property
    def has_states(self) -> bool:
        """Whether some layers carry a state: state space models, linear attention, short convolutions, RWKV."""
        kinds = tuple(f"{self.architecture}.{kind}." for kind in ("ssm", "shortconv", "wkv", "kda"))
        return any(key.startswith(kinds) for key in self.metadata)

    def stated(self, key: str) -> Any:
        """An entry of the architecture's own metadata, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file; no weights.

    Raises:
        ModelNotFound: there is no such file.
        UnsupportedModel: it is empty, not GGUF, damaged, of another version, a part of a split one, or no model.
    """
    try:
        with path.open("rb") as file:
            num_bytes = file.seek(0, 2)
            if num_bytes == 0:
                raise UnsupportedModel(f"{path} is empty (0 bytes); {_DOWNLOAD_AGAIN}")
            file.seek(0)
            if not (start := file.read(64)).startswith(MAGIC):
                told = f"{path} is not a GGUF file: {what_begins_with(start)}"
                raise UnsupportedModel(f"{told}; give a .gguf file, or the folder of a model")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _read_header(path, _Cursor(path, data))
    except OSError as error:
        what = "there is no file" if isinstance(error, FileNotFoundError) else f"cannot read ({error.strerror})"
        raise ModelNotFound(f"{what} {path}; give a .gguf file, a folder of a model or a hub name") from None
    _check_whole(header)
    return header


class _Cursor:
    """A read position in the file, which never passes the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.place = path, data, 0

    def skip(self, count: int) -> int:
        """Advances; returns the position before."""
        start, end = self.place, self.place + count
        if end > len(self.data):
            raise self.damaged(f"its header says {count:,} bytes at byte {start:,}, and it has {len(self.data):,}")
        self.place = end
        return start

    def number(self, layout: struct.Struct) -> Any:
        start = self.skip(layout.size)
        return layout.unpack_from(self.data, start)[0]

    def count(self) -> int:
        return int(self.number(_NUMBERS[10]))

    def text(self) -> str:
        length = self.count()
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def damaged(self, why: str) -> UnsupportedModel:
        """The error for a file that contradicts itself."""
        return UnsupportedModel(f"{self.path} is damaged or incomplete: {why}; {_DOWNLOAD_AGAIN}")


def _read_header(path: Path, cursor: _Cursor) -> GgufFile:
    cursor.skip(len(MAGIC))
    version = cursor.number(_NUMBERS[4])
    if version not in _VERSIONS:
        what = "is stored big-endian" if version >= 1 << 16 else f"has version {version} of the format"
        raise UnsupportedModel(
            f"{path} {what}; versions {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian, are read: "
            "convert the model again with a newer llama.cpp"
        )
    num_tensors, num_entries = cursor.count(), cursor.count()
    metadata: dict[str, Any] = {}
    for _ in range(num_entries):
        key = cursor.text()
        metadata[key] = _read_value(cursor, int(cursor.number(_NUMBERS[4])))
    _check_is_model(path, metadata)
    tensors = tuple(_read_tensor(cursor) for _ in range(num_tensors))
    if not tensors:
        raise UnsupportedModel(f"{path} holds no weights, only a description or a vocabulary; give the model's file")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"general.alignment is {alignment!r:.40}")
    data_start = -(-cursor.place // alignment) * alignment
    return GgufFile(path, len(cursor.data), metadata, tensors, data_start)


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY:
        raise cursor.damaged(f"its metadata has a value of type {kind}")
    element, length = int(cursor.number(_NUMBERS[4])), cursor.count()
    if element in _NUMBERS:
        layout = _NUMBERS[element]
        start = cursor.skip(length * layout.size)
        if length > _KEPT_ELEMENTS:
            return length
        return [value for (value,) in layout.iter_unpack(cursor.data[start : cursor.place])]
    if element != _STRING:
        raise cursor.damaged(f"its metadata has an array of type {element}")
    for _ in range(length):
        cursor.skip(cursor.count())
    return length


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    name, num_dimensions = cursor.text(), int(cursor.number(_NUMBERS[4]))
    if num_dimensions > _MAX_DIMENSIONS:
        raise cursor.damaged(f"the tensor {name!r:.80} has {num_dimensions:,} dimensions")
    shape = tuple(cursor.count() for _ in range(num_dimensions))
    return GgufTensor(name, shape, int(cursor.number(_NUMBERS[4])), cursor.count())


def _check_is_model(path: Path, metadata: Mapping[str, Any]) -> None:
    """Refuses parts of a split model and files that are no model; a first part has all metadata and few weights."""
    part = _PART.search(path.name)
    number, count = (int(part[1]), int(part[2])) if part else (_whole(metadata, "split.no", 0) + 1, 1)
    count = max(count, _whole(metadata, "split.count", 1))
    if count > 1:
        raise UnsupportedModel(
            f"{path} is part {number} of {count} of a split GGUF, and one file is read: join them with llama.cpp's "
            f"`llama-gguf-split --merge FIRST-PART {_PART.sub('', path.name)}`, and give the result"
        )
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModel(f"{path} is not a model but of type {kind!r:.40}; give the file of the model itself")
    if not isinstance(metadata.get("general.architecture"), str):
        raise UnsupportedModel(f"{path} does not say its architecture (general.architecture); convert the model again")


def _whole(metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    return value if isinstance(value, int) else default


def _check_whole(file: GgufFile) -> None:
    """Refuses a file that ends before the last tensor begins; the loader, which knows all types, checks its end."""
    last = max(file.tensors, key=lambda tensor: tensor.offset)
    if file.data_start + last.offset >= file.num_bytes:
        raise missing_bytes(file, file.data_start + last.offset + 1)


def missing_bytes(file: GgufFile, needed: int) -> UnsupportedModel:
    """The error for a file that is shorter than its own table of tensors says."""
    return UnsupportedModel(
        f"{file.path} is damaged or incomplete: it has {file.num_bytes:,} bytes, and its weights need at least "
        f"{needed:,}; {_DOWNLOAD_AGAIN}"
    )


_PACKAGES = ("gguf", "accelerate")
_NOT_MODELS = {"general", "tokenizer"}
"""Entries of transformers' table of architectures that are not models."""


def check_gguf(file: GgufFile) -> None:
    """Refuses files that cannot be loaded: a missing package, an unknown architecture, a truncated file.

    Raises:
        UnsupportedModel: what is missing, and the fix.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"GGUF files run in llama.cpp ({pip_install('llama')}), or dequantized in transformers, for which "
            f"{' and '.join(missing)} must be installed ({pip_install('gguf')})"
        )
    known = _architectures()
    if _plain(file.architecture) not in {_plain(name) for name in known}:
        raise UnsupportedModel(
            f"{file.path} is a GGUF of architecture {file.architecture!r:.60}, which transformers does not read; it "
            f"reads {', '.join(sorted(known))}: give the model's folder of safetensors instead"
        )
    if file.architecture in _newly_read() and find_spec("kernels"):
        raise UnsupportedModel(
            f"{file.path} is a GGUF of architecture {file.architecture!r:.60}, for which transformers would download "
            "compiled code with the package kernels, and run it; uninstall kernels, or give the model's folder of "
            "safetensors"
        )
    _check_end(file)


def _architectures() -> set[str]:
    """Names of the architectures that transformers reads from GGUF, in its spelling."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return {*GGUF_SUPPORTED_ARCHITECTURES, *_newly_read()} - _NOT_MODELS


def _newly_read() -> set[str]:
    """Architectures of its newer reader, which looks for compiled code on the hub even when weights are dequantized."""
    try:
        from transformers.integrations.gguf import GGUF_ARCHS
    except ImportError:
        return set()
    return set(GGUF_ARCHS)


def _plain(architecture: str) -> str:
    return architecture.replace("-", "").replace("_", "").lower()


def _check_end(file: GgufFile) -> None:
    """Refuses a file that ends before its last weight, and unknown storage types."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    needed = file.num_bytes
    for tensor in file.tensors:
        try:
            numbers, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        except (ValueError, KeyError):
            raise UnsupportedModel(
                f"{file.path} stores the weight {tensor.name!r:.80} as type {tensor.kind}, which the installed package "
                "gguf does not know; upgrade it, or give a file of another quantization such as Q4_K_M or Q8_0"
            ) from None
        end = file.data_start + tensor.offset + -(-tensor.num_numbers // numbers) * num_bytes
        needed = max(needed, end)
    if needed > file.num_bytes:
        raise missing_bytes(file, needed)
