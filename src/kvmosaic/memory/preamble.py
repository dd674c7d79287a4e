"""The beginning of an entry: the header of a safetensors file, in one spelling only."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from kvmosaic.errors import DamagedEntry
from kvmosaic.memory.header import EntryHeader, from_texts, to_texts
from kvmosaic.memory.payload import COMPRESSED, num_payload_bytes, places_of
from kvmosaic.memory.seal import NO_DIGEST, OPENING, SMALLEST_ENTRY, Bytes, check_opening
from kvmosaic.tiers import MAX_ENTRY_BYTES

ALIGNMENT = 64
MAX_PREAMBLE_BYTES = 2**24
_MAX_MARKS = 2**18
"""Most brackets and commas: what bounds the number of objects that a text can become."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """The beginning of an entry, read."""

    header: EntryHeader
    num_bytes: int
    """Of the beginning itself; the payload starts here."""
    payload_bytes: int
    """Of the payload as it is stored."""


def write_preamble(header: EntryHeader, label: str, compressed_bytes: int | None = None) -> bytes:
    """Length and header of a safetensors file, without its checksum, ending on a multiple of `ALIGNMENT`."""
    if compressed_bytes is None:
        placed = sorted((place for each in places_of(header) for place in each), key=lambda place: place.begin)
        table = {place.name: place.entry for place in placed}
    else:
        table = {COMPRESSED: {"dtype": "U8", "shape": [compressed_bytes], "data_offsets": [0, compressed_bytes]}}
    metadata = {"blake3": NO_DIGEST, "secret": label, **to_texts(header)}
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    assert text.startswith(OPENING)
    return struct.pack("<Q", len(text)) + text


def num_preamble_bytes(start: Bytes) -> int:
    """Bytes up to the payload, from the first 128 bytes of an entry.

    Raises:
        DamagedEntry: not the first bytes of an entry.
    """
    check_opening(start)
    (length,) = struct.unpack_from("<Q", start)
    if not SMALLEST_ENTRY <= 8 + length <= MAX_PREAMBLE_BYTES:
        raise DamagedEntry(
            f"the entry has a header of {length} bytes, expected {SMALLEST_ENTRY - 8} to {MAX_PREAMBLE_BYTES - 8}; "
            "it is left out and computed again"
        )
    return 8 + int(length)


def read_preamble(start: Bytes) -> Preamble:
    """Reads the beginning of an entry, of which `start` has at least that.

    Raises:
        ForeignEntry: another version of the format.
        DamagedEntry: anything but what `write_preamble` gives, byte for byte, apart from the checksum.
    """
    num_bytes = num_preamble_bytes(start)
    if len(start) < num_bytes:
        raise DamagedEntry(
            f"the entry has a header of {num_bytes} bytes, but only {len(start)} bytes are there: it was cut short; "
            "it is left out and computed again"
        )
    text = bytes(memoryview(start)[8:num_bytes])
    table = _parsed(text)
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise _unreadable("no metadata")
    digest, label = metadata.pop("blake3", None), metadata.pop("secret", None)
    if not isinstance(digest, str) or not isinstance(label, str):
        raise _unreadable("no checksum")
    header = from_texts(metadata)
    compressed_bytes = _compressed_bytes(table) if header.compression == "zstd" else None
    expected = write_preamble(header, label, compressed_bytes)
    at = 8 + len(OPENING)
    if expected[:at] + digest.encode("utf-8", "replace") + expected[at + len(NO_DIGEST) :] != bytes(start[:num_bytes]):
        raise _unreadable("a table of tensors that does not follow from its metadata")
    payload_bytes = compressed_bytes if compressed_bytes is not None else num_payload_bytes(places_of(header))
    return Preamble(header, num_bytes, payload_bytes)


def _parsed(text: bytes) -> dict[str, Any]:
    marks = sum(text.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MAX_MARKS:
        raise _unreadable(f"{marks} brackets and commas, at most {_MAX_MARKS} are read")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(error)[:80]) from error
    if not isinstance(table, dict):
        raise _unreadable("no table")
    return table


def _compressed_bytes(table: dict[str, Any]) -> int:
    """Bytes of the compressed payload, from a table that may be anything."""
    place = table.get(COMPRESSED)
    shape = place.get("shape") if isinstance(place, dict) else None
    count = shape[0] if isinstance(shape, list) and len(shape) == 1 else None
    if type(count) is not int or not 0 < count <= MAX_ENTRY_BYTES:
        raise _unreadable("no compressed payload")
    return count


def _unreadable(reason: str) -> DamagedEntry:
    return DamagedEntry(f"the header of the entry cannot be read ({reason}); it is left out and computed again")
