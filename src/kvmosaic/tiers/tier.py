"""Tier: a place that keeps entries, each the bytes of one chunk, under the chunk's key."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from kvmosaic.cache.keys import Key
from kvmosaic.errors import DamagedEntry
from kvmosaic.tiers.deadline import Deadline

Entry: TypeAlias = bytes | bytearray | memoryview
"""A whole entry as it is stored: header, tokens, keys and values. A tier never looks inside."""

MAX_KEY_BYTES = 64
MAX_ENTRY_BYTES = 2**36


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """What a tier knows of an entry without reading it."""

    key: Key
    num_bytes: int
    """Of the entry itself; what a file system or a server adds is not counted."""
    last_used: float
    """Seconds since the epoch; 0.0 if the tier does not know."""


@dataclass(frozen=True, slots=True)
class TierStat:
    """One moment of a tier. Counters run since the tier was opened by this process."""

    name: str
    """`host`, `disk`, `redis`, …"""
    address: str
    """Where it is, without passwords: a folder, a URL, or nothing."""
    num_entries: int
    num_bytes: int
    """Of all entries; exact for what only this process writes, else as of the last look."""
    quota_bytes: int | None
    """Most bytes that it keeps; None: no limit of its own."""
    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    evictions: int = 0
    """Entries that left to make room."""
    failures: int = 0
    """Calls that raised."""
    quarantined: int = 0
    """Entries that were put aside because they were not what they should be."""


@runtime_checkable
class Tier(Protocol):
    """A key-value store for serialized chunks.

        put_many ──▶ [ key -> entry, at most quota_bytes, least recently used leaves first ] ──▶ get_many

    What every tier promises (`tests/tiers/conformance.py` asks for it):

    - An entry comes back as it was put, or not at all: never a part of it, never that of another key.
    - Putting a key that is there already is harmless: the entry is the same, or the new one replaces the old one whole.
    - Asking for keys that are not there, deleting them or touching them is harmless.
    - Any thread may call any method at any time; other processes may use the same place at the same time.
    - Nothing takes much longer than its deadline. What was not done by then was not done: `get_many` returns what it
      has, and `put_many` the keys that are safely stored.
    - What lies at a place is not believed, not even its size: nothing that is larger than the bound of a call is read.
    - Whatever lies in place of one entry costs this entry, and no other.
    - A place that fails raises `TierUnavailable`, one that is full `TierFull`, and nothing else; after that, the tier
      may be asked again at any time, and answers again when the place does.
    """

    @property
    def name(self) -> str:
        """What configuration, metrics and reports call this kind of tier."""
        ...

    @property
    def is_persistent(self) -> bool:
        """Whether entries outlive the process. Those of other tiers are only worth a copy when the device lets go."""
        ...

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """Stores entries, making room by letting others leave; returns the keys that are stored now.

        An entry that is larger than the quota is not stored, and takes no other's place.

        Raises:
            TierUnavailable: the place fails. TierFull: it has no room, though the quota says so.
        """
        ...

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """The entries that are there, whole, but not verified; using them counts as a use.

        Args:
            keys: of the entries.
            deadline: of the call.
            max_bytes: that an entry of any of these keys can have, header included; None: as many as the tier takes.

        Raises:
            DamagedEntry: one has more than `max_bytes`. It was not read, and nothing is given: `quarantine` it.
            TierUnavailable: the place fails.
        """
        ...

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """Those of the keys that have an entry now; not a use.

        Raises:
            TierUnavailable: the place fails.
        """
        ...

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """Removes entries; returns the keys that had one.

        Raises:
            TierUnavailable: the place fails.
        """
        ...

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """Counts as a use of these entries, without reading them.

        Raises:
            TierUnavailable: the place fails.
        """
        ...

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Puts an entry aside that is not what it should be, so that nobody finds it under its key again.

        Raises:
            TierUnavailable: the place fails.
        """
        ...

    def scan(self, deadline: Deadline) -> Iterator[EntryInfo]:
        """All entries, in no particular order; those that come or go meanwhile may be missing.

        Raises:
            TierUnavailable: the place fails; also while iterating.
        """
        ...

    def stat(self) -> TierStat:
        """What it holds and has done; never raises, never waits for the place."""
        ...

    def close(self) -> None:
        """Gives back files, threads and connections; the entries stay if they are persistent. Again is harmless."""
        ...


def check_size(key: Key, num_bytes: int, max_bytes: int | None) -> None:
    """Refuses an entry, before it is read, that is larger than any of its key.

    Raises:
        DamagedEntry: it has more than `max_bytes`.
    """
    if max_bytes is not None and num_bytes > max_bytes:
        raise DamagedEntry(
            f"the entry {key.hex()} has {num_bytes:,} bytes, expected at most {max_bytes:,}; it is not read, and "
            "computed again; find out who else writes to this place"
        )
