"""Verification of an entry: its BLAKE3 checksum, and its claimed header, read unverified. Nothing here needs torch.

    0        8                           35         99           111     127
    | length | {"__metadata__":{"blake3":" | checksum | ","secret":" | label | …

The checksum is BLAKE3 over the whole entry with zeros in its own place, so it is verified before a single byte is
interpreted. With a secret it is keyed: without the secret, an entry can be neither changed nor made. The label
identifies the secret, and reveals nothing that could not be guessed by trial anyway.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

from blake3 import blake3

from kvmosaic.cache.keys import Key
from kvmosaic.entries.header import EntryHeader, from_texts
from kvmosaic.errors import DamagedEntry, InvalidConfig, OtherSecret

Bytes: TypeAlias = bytes | bytearray | memoryview

OPENING = b'{"__metadata__":{"blake3":"'
BETWEEN = b'","secret":"'
_DIGEST_AT = 8 + len(OPENING)
_DIGEST_END = _DIGEST_AT + 64
_LABEL_AT = _DIGEST_END + len(BETWEEN)
_LABEL_END = _LABEL_AT + 16
NO_DIGEST = "0" * 64
NO_LABEL = "0" * 16
SMALLEST_ENTRY = _LABEL_END


class Checksum:
    """Computation and verification of checksums, with or without a secret."""

    def __init__(self, secret: str | None = None) -> None:
        """Accepts any text as a secret; use a long random one against attackers.

        Raises:
            InvalidConfig: an empty secret, which would protect nothing.
        """
        if secret == "":
            raise InvalidConfig("the secret of the cache tiers is empty; give one, or leave it out")
        self._key: bytes | None = None
        self.label = NO_LABEL
        if secret is not None:
            text = secret.encode("utf-8", "surrogatepass")
            self._key = blake3(text, derive_key_context="kvmosaic 2026-11-21 entry checksum").digest()
            self.label = blake3(text, derive_key_context="kvmosaic 2026-11-21 secret label").hexdigest(8)

    def digest(self, entry: Bytes) -> bytes:
        """The checksum (64 hexadecimal digits) of an entry with our label, whatever both fields contain."""
        view = memoryview(entry)
        hasher = blake3(key=self._key) if self._key is not None else blake3()
        hasher.update(view[:_DIGEST_AT])
        hasher.update(NO_DIGEST.encode())
        hasher.update(view[_DIGEST_END:_LABEL_AT])
        hasher.update(self.label.encode())
        hasher.update(view[_LABEL_END:])
        return hasher.hexdigest().encode()

    def close(self, entry: bytearray | memoryview) -> None:
        """Writes the checksum and the label into an otherwise complete entry."""
        entry[_DIGEST_AT:_DIGEST_END] = self.digest(entry)

    def check(self, entry: Bytes) -> None:
        """Verifies every byte of an entry.

        Raises:
            OtherSecret: written with another secret, or with none.
            DamagedEntry: not the bytes that were written.
        """
        view = memoryview(entry)
        found, digest = bytes(view[_DIGEST_AT:_DIGEST_END]), self.digest(entry)
        label = bytes(view[_LABEL_AT:_LABEL_END])
        is_ours = label == self.label.encode()
        if found == digest and is_ours:
            return
        if found == digest:
            raise DamagedEntry(
                f"the entry is sealed as ours, but names {_named(label)}: it was changed; "
                "it is left out and computed again"
            )
        if not is_ours:
            raise OtherSecret(
                f"the entry is sealed with {_named(label)}, expected {_named(self.label.encode())}; give all processes "
                "that share this cache the same secret, or each its own place"
            )
        raise DamagedEntry(
            f"the checksum of the entry is {digest.decode()}, but {_shown(found)} is written in it: its bytes are not "
            "the stored ones; it is left out and computed again; check the medium if it happens often"
        )


def check_magic(start: Bytes) -> None:
    """Checks the magic bytes of an entry.

    Raises:
        DamagedEntry: too short, or other bytes where every version has the same ones.
    """
    start = bytes(memoryview(start)[:SMALLEST_ENTRY])
    if len(start) < SMALLEST_ENTRY:
        raise DamagedEntry(
            f"the entry has {len(start)} bytes, expected at least {SMALLEST_ENTRY}: it was cut short; "
            "it is left out and computed again"
        )
    if start[8:_DIGEST_AT] != OPENING or start[_DIGEST_END:_LABEL_AT] != BETWEEN:
        raise DamagedEntry(
            f"the entry starts with {_shown(start[8:_DIGEST_AT])}, expected {OPENING.decode()!r}: "
            "it is no stored chunk; it is left out and computed again; keep other files away from this place"
        )


def _named(label: bytes) -> str:
    return "no secret" if label == NO_LABEL.encode() else f"the secret {_shown(label)}"


def _shown(data: bytes) -> str:
    return repr(data.decode("ascii", "backslashreplace"))


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
    """Reads the header of an entry; `start` contains at least the header. Unverified.

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
