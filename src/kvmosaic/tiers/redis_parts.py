"""Entries as Redis keeps them: parts of a bounded size, and a manifest that says which parts are one entry."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.redis_link import Session
from kvmosaic.tiers.redis_scripts import MAX_PARTS
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES

_WINDOW_BYTES = 2**23
"""Parts that are under way at once."""
_MANIFEST = re.compile(rb"kvm1 ([0-9a-f]{1,32}) ([0-9]{1,12}) ([0-9]{1,12})")

_T = TypeVar("_T")


class Parts:
    """The parts of one version of one entry: `<prefix>:{<id>}:<write>:<i>` for i from 0.

    Each is `part_bytes` long, but for the last one; an entry without bytes is one part without bytes.
    """

    def __init__(self, prefix: str, key: Key, write: str, num_bytes: int, part_bytes: int) -> None:
        self.key = key
        self.entry_id = key.hex()
        self.write = write
        self.group = write
        """Whose room it takes: that of the first of the writes that are promised room together."""
        self.is_last = True
        """Whether no other write of the group follows."""
        self.num_bytes = num_bytes
        self.part_bytes = part_bytes
        self.num_parts = max(1, math.ceil(num_bytes / part_bytes))
        self._stem = f"{prefix}:{{{self.entry_id}}}:{write}:"

    @classmethod
    def new(cls, prefix: str, key: Key, num_bytes: int, part_bytes: int) -> Parts:
        """Parts that nobody else writes; larger ones than asked for if there were too many."""
        part_bytes = max(part_bytes, math.ceil(num_bytes / MAX_PARTS))
        return cls(prefix, key, secrets.token_hex(8), num_bytes, part_bytes)

    @classmethod
    def from_manifest(cls, prefix: str, key: Key, manifest: bytes) -> Parts | None:
        """Those that a manifest names; None if it is none, or one that we would not write."""
        match = _MANIFEST.fullmatch(manifest)
        if match is None or int(match[2]) > MAX_ENTRY_BYTES or int(match[3]) < 1:
            return None
        return cls(prefix, key, match[1].decode(), int(match[2]), int(match[3]))

    def put(self, session: Session, entry: memoryview, seconds: int) -> None:
        """Writes all parts, which go away by themselves after so many seconds."""
        size = self.part_bytes
        for some in self._windows():
            session.ask(*(("SET", f"{self._stem}{i}", entry[i * size : (i + 1) * size], "EX", seconds) for i in some))

    def get(self, session: Session, most_bytes: int | None = None) -> bytearray | None:
        """Reads all parts, or those that begin before `most_bytes`; None if one is gone."""
        num_parts = self.num_parts
        if most_bytes is not None:
            num_parts = min(num_parts, max(1, math.ceil(most_bytes / self.part_bytes)))
        entry = bytearray(min(self.num_bytes, num_parts * self.part_bytes))
        for some in self._windows(num_parts):
            for i, part in zip(some, session.ask(*(("GET", f"{self._stem}{i}") for i in some)), strict=True):
                start = i * self.part_bytes
                if part is None or len(part) != min(self.part_bytes, self.num_bytes - start):
                    return None
                entry[start : start + len(part)] = part
        return entry

    def _windows(self, num_parts: int | None = None) -> Iterator[Sequence[int]]:
        num_parts = self.num_parts if num_parts is None else num_parts
        return slices(range(num_parts), max(1, _WINDOW_BYTES // self.part_bytes))


def slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items in order, up to `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
