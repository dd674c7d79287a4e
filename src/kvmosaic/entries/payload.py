"""The payload of an entry: the tensors after the header, and their offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kvmosaic.entries.codec import CODECS, Along, Part, Shape
from kvmosaic.entries.header import DtypeName, EntryHeader
from kvmosaic.layers.geometry import LayerGeometry, stored_layers
from kvmosaic.memory.buffer import bytes_of
from kvmosaic.memory.storage import ChunkTensors

DTYPES: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
}


@dataclass(frozen=True, slots=True)
class PayloadTensor:
    """One tensor of the payload."""

    name: str
    part: Part
    begin: int
    """Its first byte, counted from the end of the header."""

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.begin + self.part.num_bytes

    @property
    def entry(self) -> dict[str, object]:
        """Its row in the tensor table of a safetensors file."""
        dtype, shape = _FORMAT_NAMES[self.part.dtype], list(self.part.shape)
        return {"dtype": dtype, "shape": shape, "data_offsets": [self.begin, self.end]}


@dataclass(frozen=True, slots=True)
class ChunkTensor:
    """One tensor of the chunk, before it is encoded."""

    name: str
    shape: Shape
    along: Along


def sources(layers: Sequence[LayerGeometry], num_tokens: int) -> Iterator[ChunkTensor]:
    """The keys and values of all layers that store any."""
    for index, layer in stored_layers(layers):
        key_shape = (num_tokens, layer.num_kv_heads, layer.key_dim)
        yield ChunkTensor(f"layers.{index}.key", key_shape, "channels" if layer.value_in_key else "tokens")
        if not layer.value_in_key:
            yield ChunkTensor(f"layers.{index}.value", (num_tokens, layer.num_kv_heads, layer.value_dim), "channels")


def places_of(header: EntryHeader) -> list[list[PayloadTensor]]:
    """The place of every part of every source. It follows from the header alone, so a file cannot claim another.

        layers.0.key.scale | layers.0.value.scale | … | layers.0.key.code | …

    Wide types come first, so that all of them are aligned without padding, which the format does not allow.
    """
    codec, dtype = CODECS[header.codec], DTYPES[header.dtype]
    found = [
        (number, f"{source.name}.{part.name}".rstrip("."), part)
        for number, source in enumerate(sources(header.layers, header.num_tokens))
        for part in codec.parts(source.shape, dtype, source.along)
    ]
    found.sort(key=lambda item: -item[2].dtype.itemsize)
    places: list[list[PayloadTensor]] = [[] for _ in range(1 + max(number for number, _, _ in found))]
    begins = accumulate((part.num_bytes for _, _, part in found), initial=0)
    for (number, name, part), begin in zip(found, begins, strict=False):
        places[number].append(PayloadTensor(name, part, begin))
    return places


def num_payload_bytes(places: Sequence[Sequence[PayloadTensor]]) -> int:
    """Bytes of the payload."""
    return sum(place.part.num_bytes for each in places for place in each)


def shape_counts(layers: Sequence[LayerGeometry]) -> Counter[LayerGeometry]:
    """Number of storing layers per shape; all of them as layer 0."""
    return Counter(replace(layer, source_layer=0) for _, layer in stored_layers(layers))


def max_payload_bytes(shapes: Counter[LayerGeometry], dtype: DtypeName, num_tokens: int) -> int:
    """Maximum payload bytes of so many tokens, over all codecs; see `shape_counts`."""
    each = [(source, count) for layer, count in shapes.items() for source in sources((layer,), num_tokens)]
    return max(
        sum(
            count * part.num_bytes
            for source, count in each
            for part in codec.parts(source.shape, DTYPES[dtype], source.along)
        )
        for codec in CODECS.values()
    )


def flattened(layers: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """The tensors of a chunk in the order of `sources`."""
    return [tensor for pair in layers for tensor in pair if tensor is not None]


def pack(header: EntryHeader, tensors: Sequence[Tensor], target: Tensor) -> bool:
    """Writes the payload to `target` [bytes] uint8; False if the codec cannot represent a number."""
    codec, tensor_sources = CODECS[header.codec], sources(header.layers, header.num_tokens)
    for source, tensor, each in zip(tensor_sources, tensors, places_of(header), strict=True):
        parts = codec.encode(tensor, source.along)
        if parts is None:
            return False
        for part, place in zip(parts, each, strict=True):
            target[place.begin : place.end] = bytes_of(part)
    return True


def unpack(header: EntryHeader, payload: Tensor) -> ChunkTensors:
    """Inverse of `pack`; without a codec the tensors are views of the payload."""
    codec, dtype = CODECS[header.codec], DTYPES[header.dtype]
    tensors = iter(
        codec.decode(tuple(_tensor(payload, place) for place in each), source.shape, dtype, source.along)
        for source, each in zip(sources(header.layers, header.num_tokens), places_of(header), strict=True)
    )
    return [(next(tensors), None if layer.value_in_key else next(tensors)) for _, layer in stored_layers(header.layers)]


def _tensor(payload: Tensor, place: PayloadTensor) -> Tensor:
    return payload[place.begin : place.end].view(place.part.dtype).view(place.part.shape)
