"""The file header of an entry: a safetensors header in a canonical form."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from kvmosaic.entries.checksum import NO_DIGEST, OPENING, Bytes
from kvmosaic.entries.claimed_header import num_file_header_bytes, read_claimed_header, unreadable
from kvmosaic.entries.header import EntryHeader, to_texts
from kvmosaic.entries.payload import COMPRESSED, num_payload_bytes, places_of
from kvmosaic.tiers import MAX_ENTRY_BYTES

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A parsed file header."""

    header: EntryHeader
    num_bytes: int
    """Of the header itself; the payload starts here."""
    payload_bytes: int
    """Of the stored payload."""


def write_file_header(header: EntryHeader, label: str, compressed_bytes: int | None = None) -> bytes:
    """Length and header of a safetensors file, without its checksum, padded to a multiple of `ALIGNMENT`."""
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


def read_file_header(start: Bytes) -> FileHeader:
    """Reads the file header of an entry; `start` contains at least the header.

    Raises:
        ForeignEntry: another version of the format.
        DamagedEntry: differs in any byte but the checksum from what `write_file_header` writes.
    """
    claims = read_claimed_header(start)
    num_bytes, header = num_file_header_bytes(start), claims.header
    compressed_bytes = _compressed_bytes(claims.table) if header.compression == "zstd" else None
    expected = write_file_header(header, claims.label, compressed_bytes)
    at, found = 8 + len(OPENING), claims.digest.encode("utf-8", "replace")
    if expected[:at] + found + expected[at + len(NO_DIGEST) :] != bytes(start[:num_bytes]):
        raise unreadable("a table of tensors that does not follow from its metadata")
    payload_bytes = compressed_bytes if compressed_bytes is not None else num_payload_bytes(places_of(header))
    return FileHeader(header, num_bytes, payload_bytes)


def _compressed_bytes(table: dict[str, Any]) -> int:
    """Bytes of the compressed payload, from an untrusted table."""
    place = table.get(COMPRESSED)
    shape = place.get("shape") if isinstance(place, dict) else None
    count = shape[0] if isinstance(shape, list) and len(shape) == 1 else None
    if type(count) is not int or not 0 < count <= MAX_ENTRY_BYTES:
        raise unreadable("no compressed payload")
    return count
