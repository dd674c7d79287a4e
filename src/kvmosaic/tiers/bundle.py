"""Bundle: entries in one file, for import into a tier of another machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidBundle
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES, Entry

MANIFEST = "kvmosaic-bundle.json"
FORMAT_VERSION = 1
MAX_ENTRIES = 10**6
_KEY_BYTES = 32
_SUFFIX = ".safetensors"
_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)


@dataclass(frozen=True, slots=True)
class BundleContents:
    """Number of entries and bytes in a bundle."""

    num_entries: int
    num_bytes: int
    """Total bytes of the entries, without tar headers."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a bundle: its key, offset and size."""

    key: Key
    num_bytes: int
    begin: int


def write_bundle(path: Path, entries: Iterable[tuple[Key, Entry]]) -> BundleContents:
    """Writes a bundle, entry by entry; it gets its name only when complete and synced to disk.

        kvmosaic-bundle.json          number of entries and bytes: one block of text, written last
        <64 hex>.safetensors          an entry, under its key
        …

    It is a plain tar file, readable by its owner only, since it holds the text of documents. An existing file of that
    name is replaced. If anything raises, also `entries`, no file remains.

    Raises:
        InvalidBundle: the file cannot be written, or has too many entries, or one twice.
    """
    draft = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}.partial")
    try:
        file = os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
    except OSError as error:
        raise _failing("written", path, error) from error
    try:
        with file:
            contents = _write(file, entries)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise _failing("written", path, error) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return contents


class Bundle:
    """A bundle opened for reading. Its whole structure is validated when it is opened, before any entry is used.

    Nothing in it is used as a file name. Every header must be, byte for byte, the one that `write_bundle` writes for
    this key and this size, so there are no links, no other kinds of files, no folders and no long names. The content
    of entries is not validated.
    """

    def __init__(self, path: Path) -> None:
        """Opens a bundle; close it, or use it in a `with`.

        Raises:
            InvalidBundle: it cannot be read, or is not what `write_bundle` writes.
        """
        self._path = path
        try:
            self._file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
        except OSError as error:
            raise _failing("read", path, error) from error
        try:
            facts = os.fstat(self._file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise InvalidBundle(f"{path} is not a file; give a bundle that 'kvmosaic cache export' has written")
            self.contents = self._read_manifest(facts.st_size)
            self.members = tuple(self._walk(facts.st_size))
        except OSError as error:
            self._file.close()
            raise _failing("read", path, error) from error
        except BaseException:
            self._file.close()
            raise

    def read(self, member: Member, num_bytes: int | None = None) -> bytes:
        """The bytes of an entry, or its first `num_bytes`, not verified.

        Raises:
            InvalidBundle: the file became unreadable.
        """
        try:
            return self._read(member.begin, member.num_bytes if num_bytes is None else min(num_bytes, member.num_bytes))
        except OSError as error:
            raise _failing("read", self._path, error) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_manifest(self, file_bytes: int) -> BundleContents:
        if file_bytes < 2 * _BLOCK or self._read(0, _BLOCK) != _header(MANIFEST, _BLOCK):
            raise self._refused("does not begin as one")
        text = self._read(_BLOCK, _BLOCK)
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._refused("has no manifest that can be read") from error
        version = fields.get("version") if isinstance(fields, dict) else None
        if type(version) is int and version != FORMAT_VERSION:
            raise InvalidBundle(
                f"{self._path} is a bundle of version {version!r:.20}, expected {FORMAT_VERSION}; "
                "export it again with the version of kvmosaic that imports it"
            )
        numbers = fields if isinstance(fields, dict) else {}
        num_entries, num_bytes = numbers.get("entries"), numbers.get("bytes")
        if type(num_entries) is not int or type(num_bytes) is not int:
            raise self._refused("has a manifest without numbers")
        if not 0 <= num_entries <= MAX_ENTRIES or not 0 <= num_bytes <= MAX_ENTRIES * MAX_ENTRY_BYTES:
            raise self._refused(f"would have {num_entries:,} entries, at most {MAX_ENTRIES:,} are read")
        contents = BundleContents(num_entries, num_bytes)
        if _manifest(contents) != text:
            raise self._refused("has another manifest than was written")
        return contents

    def _walk(self, file_bytes: int) -> Iterator[Member]:
        at, total = 2 * _BLOCK, 0
        seen: set[Key] = set()
        for _ in range(self.contents.num_entries):
            member = self._member_at(at, file_bytes)
            if member.key in seen:
                raise self._refused(f"has the entry {member.key.hex()} twice")
            seen.add(member.key)
            total += member.num_bytes
            at = member.begin + _padded(member.num_bytes)
            yield member
        if total != self.contents.num_bytes or file_bytes != at + len(_END) or self._read(at, len(_END)) != _END:
            raise self._refused(
                f"has {file_bytes:,} bytes and should end after {at + len(_END):,}, with {self.contents.num_bytes:,} "
                f"bytes of entries and not {total:,}: it was cut short or changed"
            )

    def _member_at(self, at: int, file_bytes: int) -> Member:
        block = self._read(at, _BLOCK) if at + _BLOCK <= file_bytes else b""
        try:
            found = tarfile.TarInfo.frombuf(block, "ascii", "strict")
            key = Key(bytes.fromhex(found.name.removesuffix(_SUFFIX)))
        except (tarfile.HeaderError, ValueError) as error:
            raise self._refused(f"has no entry at byte {at:,}: it was cut short or changed") from error
        num_bytes, begin = found.size, at + _BLOCK
        if len(key) != _KEY_BYTES or not 0 <= num_bytes <= MAX_ENTRY_BYTES or block != _member_header(key, num_bytes):
            raise self._refused(f"has something at byte {at:,} that is no entry: {found.name!r:.100}")
        if begin + _padded(num_bytes) > file_bytes:
            raise self._refused(f"has {file_bytes:,} bytes, fewer than its entries: it was cut short")
        if any(self._read(begin + num_bytes, _padded(num_bytes) - num_bytes)):
            raise self._refused(f"has bytes after the entry at byte {at:,} that belong to no entry")
        return Member(key, num_bytes, begin)

    def _read(self, begin: int, num_bytes: int) -> bytes:
        self._file.seek(begin)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self._refused("became shorter while it was read")
        return data

    def _refused(self, why: str) -> InvalidBundle:
        return InvalidBundle(
            f"{self._path} is not a bundle of 'kvmosaic cache export': it {why}; nothing of it is used now, copy or "
            "export it again"
        )


def _write(file: IO[bytes], entries: Iterable[tuple[Key, Entry]]) -> BundleContents:
    num_entries = num_bytes = 0
    seen: set[Key] = set()
    file.write(_header(MANIFEST, _BLOCK) + bytes(_BLOCK))
    for key, entry in entries:
        if key in seen or len(key) != _KEY_BYTES or num_entries == MAX_ENTRIES:
            raise InvalidBundle(f"a bundle has at most {MAX_ENTRIES:,} entries, each once, got {key.hex()} more")
        seen.add(key)
        size = len(entry)
        file.write(_member_header(key, size))
        file.write(entry)
        file.write(bytes(_padded(size) - size))
        num_entries, num_bytes = num_entries + 1, num_bytes + size
    file.write(_END)
    file.seek(_BLOCK)
    contents = BundleContents(num_entries, num_bytes)
    file.write(_manifest(contents))
    return contents


def _manifest(contents: BundleContents) -> bytes:
    fields = {
        "format": "kvmosaic-bundle",
        "version": FORMAT_VERSION,
        "entries": contents.num_entries,
        "bytes": contents.num_bytes,
    }
    return json.dumps(fields).encode().ljust(_BLOCK - 1) + b"\n"


def _member_header(key: Key, num_bytes: int) -> bytes:
    return _header(key.hex() + _SUFFIX, num_bytes)


def _header(name: str, num_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o600
    return member.tobuf(tarfile.GNU_FORMAT)  # its numbers may be larger than 8 GiB


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


def _failing(what: str, path: Path, error: OSError) -> InvalidBundle:
    return InvalidBundle(f"{path} cannot be {what}: {error.strerror or error}")
