"""Small chunks and their entries."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace

import torch

from kvmosaic.cache.keys import Key, encode_tokens
from kvmosaic.entries import DecodedEntry, EntryExpectation, EntryHeader, decode_entry, encode_entry
from kvmosaic.entries.entry import sources
from kvmosaic.entries.header import StateShape
from kvmosaic.entries.verification import Checksum
from kvmosaic.layers import LayerGeometry
from kvmosaic.memory import ChunkTensors

GROUPED = LayerGeometry(0, 2, 8, 6, False)
LATENT = LayerGeometry(1, 1, 12, 8, True)
READER = LayerGeometry(0, 2, 8, 6, False)
LAYERS = (GROUPED, LATENT, READER)
"""Grouped heads, a latent, and a layer that reads the keys of the first one."""
STATES: tuple[StateShape, ...] = (("bfloat16", (1, 6, 3)), ("float32", (1, 2, 4, 4)), ("float32", (1, 2, 4, 8)))
"""A tail, M and N."""


def header(num_tokens: int = 5, layers: tuple[LayerGeometry, ...] = LAYERS, **changes: object) -> EntryHeader:
    """A header with something in every field."""
    plain = EntryHeader(
        fingerprint="f" * 64,
        key=Key(bytes(range(32))),
        root=Key(bytes(range(32, 64))),
        start=7,
        tokens=encode_tokens(range(100, 100 + num_tokens)),
        layers=layers,
        dtype="float32",
        names=("Kiel.txt", 'nächster "Name"'),
        tenant="team-a",
        compute_seconds=0.25,
        created=1_700_000_000.5,
    )
    return replace(plain, **changes)


def tensors(header: EntryHeader, seed: int = 0, size: float = 1.0) -> ChunkTensors:
    """Random numbers of the right shapes, channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for source in sources(header):
        channels = torch.rand(source.shape[1:], generator=generator) * 8 + torch.randn(1, generator=generator)
        numbers = torch.randn(source.shape, generator=generator, dtype=torch.float64) * channels * size
        made[source.name] = numbers.to(source.dtype)
    layers = [
        (made[f"layers.{index}.key"], made.get(f"layers.{index}.value"))
        for index in range(len(header.layers))
        if f"layers.{index}.key" in made
    ]
    return [*layers, *((made[f"states.{number}"], None) for number in range(len(header.states)))]


def expectation(header: EntryHeader, **changes: object) -> EntryExpectation:
    """What a reader of this chunk expects."""
    names = ("fingerprint", "key", "root", "start", "tokens", "layers", "dtype", "codec", "states")
    return replace(EntryExpectation(**{name: getattr(header, name) for name in names}), **changes)


@dataclass(frozen=True)
class Stored:
    """A chunk and its entry."""

    header: EntryHeader
    layers: ChunkTensors
    entry: bytes
    secret: str | None = None

    def decode(self, entry: bytes | bytearray | memoryview | None = None) -> DecodedEntry:
        """Reads this or another entry as this chunk."""
        return decode_entry(self.entry if entry is None else entry, expectation(self.header), self.secret)

    def resealed(self, text: bytes, payload: bytes | None = None) -> bytes:
        """An entry with another header (opening included), and a checksum that is right for it."""
        payload = self.entry[self.num_header_bytes :] if payload is None else payload
        entry = bytearray(struct.pack("<Q", len(text)) + text + payload)
        Checksum(self.secret).close(entry)
        return bytes(entry)

    @property
    def num_header_bytes(self) -> int:
        return 8 + struct.unpack_from("<Q", self.entry)[0]

    @property
    def text(self) -> bytes:
        """The header as it stands in the entry."""
        return self.entry[8 : self.num_header_bytes]

    @property
    def table(self) -> dict:
        return json.loads(self.text)


def stored(num_tokens: int = 5, secret: str | None = None, seed: int = 0, **changes: object) -> Stored:
    """A chunk of random numbers, stored."""
    head = header(num_tokens, **changes)
    layers = tensors(head, seed)
    return Stored(head, layers, bytes(encode_entry(head, layers, secret)), secret)


def same_bits(left: ChunkTensors, right: ChunkTensors) -> bool:
    """Whether two chunks are equal bit for bit, NaNs included."""
    if len(left) != len(right):
        return False
    pairs = [pair for one, two in zip(left, right, strict=True) for pair in zip(one, two, strict=True)]
    return all(
        (one is None and two is None)
        or (one.shape == two.shape and one.dtype == two.dtype and torch.equal(_bits(one), _bits(two)))
        for one, two in pairs
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
