"""An entry: the serialized form of a chunk in a tier, a valid safetensors file.

    8 bytes | header: checksum, label, metadata, tensor table, padding | keys and values, layer by layer, or scales and
    length  | JSON, ends on a multiple of 64 bytes                     | codes; of models with states, tensors of these

Nothing is used before the checksum over all bytes is verified, and before model, root, tokens and start match the
requested ones. Reading allocates no object larger than expected. The payload is the tensors after the header.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from kvmosaic.cache.keys import TOKEN_BYTES, Key
from kvmosaic.entries.codec import CODECS, Along, Codec, Part, Shape, choose_codec
from kvmosaic.entries.header import CodecName, DtypeName, EntryHeader, StateShape, check_header, to_texts
from kvmosaic.entries.verification import (
    MAX_PREAMBLE_BYTES,
    NO_DIGEST,
    OPENING,
    Bytes,
    Checksum,
    check_magic,
    num_file_header_bytes,
    read_claimed_header,
    unreadable,
)
from kvmosaic.errors import DamagedEntry, ForeignEntry, InvalidConfig
from kvmosaic.layers.geometry import LayerGeometry, stored_layers
from kvmosaic.memory import ChunkTensors, bytes_of, memory_of, new_bytes, view_of
from kvmosaic.tiers import MAX_ENTRY_BYTES

ALIGNMENT = 64
_MAX_TEXT_BYTES = 2**17
"""Maximum header bytes without tokens and layers: up to 16 names of 256 characters, each escaped twice in 14 bytes."""
_MAX_LAYER_BYTES = 2**10
"""Maximum header bytes of one layer: its shape, and the offsets of at most four tensors."""
_WAYS_OUT = {
    "fingerprint": "it was computed by another model; give every model its own place, or let these entries leave",
    "key": "it lies under a key that is not its own: was a file renamed or swapped?",
    "root": "it saw another system text, or belongs to another tenant",
    "start": "its keys were turned from another position",
    "tokens": "it is another text with the same key: unless it was tampered with, use hash_algorithm 'sha256'",
    "layers": "the layers of the model have another shape",
    "states": "the layers of the model have another state",
    "dtype": "load the model in the same dtype, or give every dtype its own place",
}
__all__ = ["DecodedEntry", "EntryBound", "EntryExpectation", "decode_entry", "encode_entry"]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A parsed file header."""

    header: EntryHeader
    num_bytes: int
    """Of the header itself; the payload starts here."""
    payload_bytes: int
    """Of the stored payload."""


def write_file_header(header: EntryHeader, label: str) -> bytes:
    """Length and header of a safetensors file, without its checksum, padded to a multiple of `ALIGNMENT`."""
    placed = sorted((place for each in places_of(header) for place in each), key=lambda place: place.begin)
    table = {place.name: place.entry for place in placed}
    metadata = {"blake3": NO_DIGEST, "secret": label, **to_texts(header)}
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    assert text.startswith(OPENING)
    return struct.pack("<Q", len(text)) + text


def read_file_header(start: Bytes) -> FileHeader:
    """Reads the file header of an entry; `start` contains at least the header.

    Raises:
        ForeignEntry: another version of the format, or a codec of another version.
        DamagedEntry: differs in any byte but the checksum from what `write_file_header` writes.
    """
    claims = read_claimed_header(start)
    num_bytes, header = num_file_header_bytes(start), claims.header
    expected = write_file_header(header, claims.label)
    at, found = 8 + len(OPENING), claims.digest.encode("utf-8", "replace")
    if expected[:at] + found + expected[at + len(NO_DIGEST) :] != bytes(start[:num_bytes]):
        raise unreadable("a table of tensors that does not follow from its metadata")
    return FileHeader(header, num_bytes, num_payload_bytes(places_of(header)))


@dataclass(frozen=True, slots=True)
class EntryExpectation:
    """What an entry must match to be used; see the fields of `EntryHeader`."""

    fingerprint: str
    key: Key
    root: Key
    start: int
    tokens: bytes
    layers: tuple[LayerGeometry, ...]
    dtype: DtypeName
    codec: CodecName = "none"
    """Allowed loss: entries stored with this codec, or without any."""
    states: tuple[StateShape, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodedEntry:
    """A verified entry that matches what was expected."""

    header: EntryHeader
    layers: ChunkTensors
    """As given to `encode_entry`. Without a codec these are views of the entry: copy them at once, and never write to
    them."""


def encode_entry(
    header: EntryHeader, layers: Sequence[tuple[Tensor, Tensor | None]], secret: str | None = None
) -> memoryview:
    """Serializes a chunk.

    Args:
        header: metadata. `codec` is a request: numbers that no scale can represent are stored uncoded.
        layers: keys [n, G, D] and values [n, G, Dv] (None where they are in the keys) of every layer that stores
            something, on the CPU, as returned by `BlockStorage.read_chunk`; and each state, and None.
        secret: without it, an entry can be neither made nor changed.

    Returns:
        A read-only view of fresh memory.

    Raises:
        InvalidConfig: a codec that the dtype does not support, or a chunk too large for an entry.
    """
    seal = Checksum(secret)
    check_header(header)
    choose_codec(header.codec, DTYPES[header.dtype])
    tensors = flattened(layers)
    _check_tensors(header, tensors)
    num_bytes = num_payload_bytes(places_of(header))
    _check_size(num_bytes)
    preamble = write_file_header(header, seal.label)
    entry = new_bytes(len(preamble) + num_bytes)
    if not pack(header, tensors, entry[len(preamble) :]):
        return encode_entry(replace(header, codec="none"), layers, secret)
    result = memory_of(entry)
    result[: len(preamble)] = preamble
    seal.close(result)
    return result.toreadonly()


class EntryBound:
    """Maximum entry sizes of a model, over all codecs, names and secrets.

    Larger data under a chunk's key is no valid entry, and need not be read.
    """

    def __init__(self, layers: Sequence[LayerGeometry], dtype: DtypeName, states: Sequence[StateShape] = ()) -> None:
        """Bounds for entries with these layers, in this dtype."""
        self._shapes, self._dtype = shape_counts(layers), dtype
        self.state_bytes = sum(part.num_bytes for source in _state_sources(states) for part in source.parts)
        self._text_bytes = _MAX_TEXT_BYTES + _MAX_LAYER_BYTES * (len(layers) + len(states))

    def max_bytes(self, num_tokens: int) -> int:
        """Maximum bytes of an entry of so many tokens, header included."""
        header_bytes = self._text_bytes + 2 * TOKEN_BYTES * num_tokens  # as base64: 4/3
        payload_bytes = max_payload_bytes(self._shapes, self._dtype, num_tokens) + self.state_bytes
        return min(header_bytes, MAX_PREAMBLE_BYTES) + payload_bytes


def decode_entry(entry: Bytes, expected: EntryExpectation, secret: str | None = None) -> DecodedEntry:
    """Verifies an entry and decodes it.

    Raises:
        DamagedEntry: not the bytes that were written.
        ForeignEntry: written by another version, with another secret, or not as expected.
    """
    entry = memoryview(entry)
    check_magic(entry)
    _check_length(len(entry), MAX_ENTRY_BYTES)
    Checksum(secret).check(entry)
    preamble = read_file_header(entry)
    header = preamble.header
    if len(entry) != preamble.num_bytes + preamble.payload_bytes:
        raise DamagedEntry(
            f"the entry has {len(entry)} bytes, expected {preamble.num_bytes + preamble.payload_bytes}; "
            "it is left out and computed again"
        )
    _check_expected(header, expected)
    return DecodedEntry(header, unpack(header, view_of(entry[preamble.num_bytes :])))


def _check_tensors(header: EntryHeader, tensors: Sequence[Tensor]) -> None:
    wanted = [(source.shape, source.dtype) for source in sources(header)]
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    assert found == wanted, "the tensors are not those of the header's layers"
    assert all(tensor.device.type == "cpu" for tensor in tensors)


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_ENTRY_BYTES // 2:
        raise InvalidConfig(
            f"a chunk of {num_bytes} bytes is too large to be stored, at most {MAX_ENTRY_BYTES // 2} bytes can be; "
            "split the document, or make max_chunk_tokens smaller"
        )


def _check_length(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise DamagedEntry(f"the entry has {num_bytes} bytes, expected at most {most}; it is left out")


def _check_expected(header: EntryHeader, expected: EntryExpectation) -> None:
    for name, way_out in _WAYS_OUT.items():
        found, wanted = getattr(header, name), getattr(expected, name)
        if found != wanted:
            raise ForeignEntry(
                f"the entry has {name} {_shown(found)}, expected {_shown(wanted)}: {way_out}; it is not used"
            )
    if header.codec not in ("none", expected.codec):
        raise ForeignEntry(
            f"the entry was stored with codec {header.codec!r}, expected {expected.codec!r}; "
            "it is not used, since its numbers are rounded otherwise; configure the same codec, or let it leave"
        )


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 32 else f"{value[:32].hex()}… ({len(value)} bytes)"
    return f"{value!r:.80}"


DTYPES: Mapping[str, torch.dtype] = {
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
    dtype: torch.dtype
    along: Along
    codec: Codec

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is stored of it."""
        return self.codec.parts(self.shape, self.dtype, self.along)


def sources(header: EntryHeader) -> Iterator[ChunkTensor]:
    """The keys and values of all layers that store any, and the states, which no codec changes."""
    yield from _layer_sources(header.layers, header.num_tokens, DTYPES[header.dtype], CODECS[header.codec])
    yield from _state_sources(header.states)


def _state_sources(states: Sequence[StateShape]) -> Iterator[ChunkTensor]:
    for number, (dtype, shape) in enumerate(states):
        yield ChunkTensor(f"states.{number}", shape, DTYPES[dtype], "tokens", CODECS["none"])


def _layer_sources(
    layers: Sequence[LayerGeometry], num_tokens: int, dtype: torch.dtype, codec: Codec
) -> Iterator[ChunkTensor]:
    for index, layer in stored_layers(layers):
        key_shape = (num_tokens, layer.num_kv_heads, layer.key_dim)
        along: Along = "channels" if layer.value_in_key else "tokens"
        yield ChunkTensor(f"layers.{index}.key", key_shape, dtype, along, codec)
        if not layer.value_in_key:
            value_shape = (num_tokens, layer.num_kv_heads, layer.value_dim)
            yield ChunkTensor(f"layers.{index}.value", value_shape, dtype, "channels", codec)


def places_of(header: EntryHeader) -> list[list[PayloadTensor]]:
    """The place of every part of every source. It follows from the header alone, so a file cannot claim another.

        layers.0.key.scale | layers.0.value.scale | … | layers.0.key.code | …

    Wide types come first, so that all of them are aligned without padding, which the format does not allow.
    """
    found = [
        (number, f"{source.name}.{part.name}".rstrip("."), part)
        for number, source in enumerate(sources(header))
        for part in source.parts
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
    return max(
        sum(
            count * part.num_bytes
            for layer, count in shapes.items()
            for source in _layer_sources((layer,), num_tokens, DTYPES[dtype], codec)
            for part in source.parts
        )
        for codec in CODECS.values()
    )


def flattened(layers: Sequence[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """The tensors of a chunk in the order of `sources`."""
    return [tensor for pair in layers for tensor in pair if tensor is not None]


def pack(header: EntryHeader, tensors: Sequence[Tensor], target: Tensor) -> bool:
    """Writes the payload to `target` [bytes] uint8; False if the codec cannot represent a number."""
    for source, tensor, each in zip(sources(header), tensors, places_of(header), strict=True):
        parts = source.codec.encode(tensor, source.along)
        if parts is None:
            return False
        for part, place in zip(parts, each, strict=True):
            target[place.begin : place.end] = bytes_of(part)
    return True


def unpack(header: EntryHeader, payload: Tensor) -> ChunkTensors:
    """Inverse of `pack`; without a codec the tensors are views of the payload."""
    tensors = iter(
        source.codec.decode(tuple(_tensor(payload, place) for place in each), source.shape, source.dtype, source.along)
        for source, each in zip(sources(header), places_of(header), strict=True)
    )
    layers = [
        (next(tensors), None if layer.value_in_key else next(tensors)) for _, layer in stored_layers(header.layers)
    ]
    return [*layers, *((state, None) for state in tensors)]


def _tensor(payload: Tensor, place: PayloadTensor) -> Tensor:
    return payload[place.begin : place.end].view(place.part.dtype).view(place.part.shape)
