"""The claimed header of an entry, read unverified, and full verification. Nothing here needs torch."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from kvmosaic.cache.keys import Key
from kvmosaic.entries.checksum import SMALLEST_ENTRY, Bytes, Checksum, check_magic
from kvmosaic.entries.header import EntryHeader, from_texts
from kvmosaic.errors import DamagedEntry

MAX_PREAMBLE_BYTES = 2**24
_MAX_MARKS = 2**18
"""Maximum brackets and commas, which bounds the number of objects parsed from a text."""


@dataclass(frozen=True, slots=True)
class ClaimedHeader:
    """Well-formed header fields of an entry, not yet verified."""

    header: EntryHeader
    digest: str
    label: str
    """Label of its secret."""
    table: dict[str, Any]
    """The tensor table; any JSON values."""


def num_file_header_bytes(start: Bytes) -> int:
    """Bytes up to the payload, from the first 128 bytes of an entry.

    Raises:
        DamagedEntry: not the first bytes of an entry.
    """
    check_magic(start)
    (length,) = struct.unpack_from("<Q", start)
    if not SMALLEST_ENTRY <= 8 + length <= MAX_PREAMBLE_BYTES:
        raise DamagedEntry(
            f"the entry has a header of {length} bytes, expected {SMALLEST_ENTRY - 8} to {MAX_PREAMBLE_BYTES - 8}; "
            "it is left out and computed again"
        )
    return 8 + int(length)


def read_claimed_header(start: Bytes) -> ClaimedHeader:
    """Reads the header of an entry; `start` contains at least the header. Unverified: for listings only.

    Raises:
        ForeignEntry: another version of the format.
        DamagedEntry: not the start of an entry.
    """
    num_bytes = num_file_header_bytes(start)
    if len(start) < num_bytes:
        raise DamagedEntry(
            f"the entry has a header of {num_bytes} bytes, but only {len(start)} bytes are there: it was cut short; "
            "it is left out and computed again"
        )
    table = _parsed(bytes(memoryview(start)[8:num_bytes]))
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        raise unreadable("no metadata")
    digest, label = metadata.pop("blake3", None), metadata.pop("secret", None)
    if not isinstance(digest, str) or not isinstance(label, str):
        raise unreadable("no checksum")
    return ClaimedHeader(from_texts(metadata), digest, label, table)


def num_claimed_bytes(start: Bytes) -> int:
    """Claimed size of a whole entry; `start` contains at least `num_file_header_bytes` of it.

    An entry of another size is damaged, and need not be read further.

    Raises:
        ForeignEntry: another version of the format.
        DamagedEntry: not the start of an entry.
    """
    ends = []
    for place in read_claimed_header(start).table.values():
        offsets = place.get("data_offsets") if isinstance(place, dict) else None
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(number) is not int for number in offsets):
            raise unreadable("a tensor without a place")
        ends.append(offsets[1])
    return num_file_header_bytes(start) + max(ends, default=0)


def check_entry(entry: Bytes, key: Key, seal: Checksum) -> EntryHeader:
    """Verifies every byte of an entry against its checksum and its key; returns its header.

    Raises:
        ForeignEntry: written with another secret, or another version of the format.
        DamagedEntry: not the bytes that were written, or those of another key.
    """
    check_magic(entry)
    seal.check(entry)
    header = read_claimed_header(entry).header
    if header.key != key:
        raise DamagedEntry(
            f"the entry under the key {key.hex()} is that of {header.key.hex()}: was a file renamed or swapped? "
            "It is left out and computed again"
        )
    return header


def unreadable(reason: str) -> DamagedEntry:
    """The error for a header that cannot be read."""
    return DamagedEntry(f"the header of the entry cannot be read ({reason}); it is left out and computed again")


def _parsed(text: bytes) -> dict[str, Any]:
    marks = sum(text.count(mark) for mark in (b"{", b"[", b","))
    if marks > _MAX_MARKS:
        raise unreadable(f"{marks} brackets and commas, at most {_MAX_MARKS} are read")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(str(error)[:80]) from error
    if not isinstance(table, dict):
        raise unreadable("no table")
    return table
