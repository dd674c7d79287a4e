"""Redis form of an entry: parts of a bounded size, and a manifest that lists them."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.redis.link import Session
from kvmosaic.tiers.redis.scripts import MAX_PARTS
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES

_WINDOW_BYTES = 2**23
"""Maximum bytes of parts in flight."""
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
        self.num_bytes = num_bytes
        self.part_bytes = part_bytes
        self.num_parts = max(1, math.ceil(num_bytes / part_bytes))
        self._stem = f"{prefix}:{{{self.entry_id}}}:{write}:"

    @classmethod
    def new(cls, prefix: str, key: Key, num_bytes: int, part_bytes: int) -> Parts:
        """Parts with a new unique id; larger than asked for if there were too many."""
        part_bytes = max(part_bytes, math.ceil(num_bytes / MAX_PARTS))
        return cls(prefix, key, secrets.token_hex(8), num_bytes, part_bytes)

    @classmethod
    def from_manifest(cls, prefix: str, key: Key, manifest: object) -> Parts | None:
        """Parts of a manifest; None if it is none, or one that we would not write."""
        match = _MANIFEST.fullmatch(manifest) if isinstance(manifest, bytes) else None
        if match is None or int(match[2]) > MAX_ENTRY_BYTES or int(match[3]) < 1:
            return None
        return cls(prefix, key, match[1].decode(), int(match[2]), int(match[3]))

    def put(self, session: Session, entry: memoryview, seconds: int) -> None:
        """Writes all parts, which expire after so many seconds."""
        size = self.part_bytes
        for some in self._windows():
            session.ask(*(("SET", f"{self._stem}{i}", entry[i * size : (i + 1) * size], "EX", seconds) for i in some))

    def get(self, session: Session, max_bytes: int | None = None) -> bytearray | None:
        """Reads the entry, or its first `max_bytes`; None if a part is missing or has the wrong length.

        Reads at most one excess byte of a part that grew meanwhile.
        """
        wanted = self.num_bytes if max_bytes is None else min(max_bytes, self.num_bytes)
        entry = bytearray(wanted)
        for some in self._windows(max(1, math.ceil(wanted / self.part_bytes))):
            sizes = [min(self.part_bytes, wanted - i * self.part_bytes) for i in some]
            commands = (("GETRANGE", f"{self._stem}{i}", 0, size) for i, size in zip(some, sizes, strict=True))
            for i, size, part in zip(some, sizes, session.ask(*commands), strict=True):
                start = i * self.part_bytes
                is_cut = start + size < self.num_bytes and size < self.part_bytes
                if not isinstance(part, bytes) or len(part) != size + is_cut:
                    return None
                entry[start : start + size] = memoryview(part)[:size]
        return entry

    def _windows(self, num_parts: int | None = None) -> Iterator[Sequence[int]]:
        num_parts = self.num_parts if num_parts is None else num_parts
        return slices(range(num_parts), max(1, _WINDOW_BYTES // self.part_bytes))


def slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items in order, up to `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
