"""Tier protocol: a key-value store of entries, the serialized bytes of one chunk each; its counters and warnings."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from kvmosaic.cache.keys import Key
from kvmosaic.errors import DamagedEntry

Entry: TypeAlias = bytes | bytearray | memoryview
"""A whole stored entry: header, tokens, keys and values. A tier never interprets it."""
MAX_KEY_BYTES = 64
MAX_ENTRY_BYTES = 2**36


class Deadline:
    """A moment on a monotonic clock."""

    def __init__(self, seconds: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Ends `seconds` from now; never, by default."""
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0.0 when it has passed."""
        return max(0.0, self._end - self._clock())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self._clock() >= self._end


@dataclass(frozen=True, slots=True)
class TierStat:
    """A snapshot of a tier. Counters run since the tier was opened by this process."""

    name: str
    """`host`, `disk`, `redis`, …"""
    address: str
    """Its location, without passwords: a folder, a URL, or empty."""
    num_entries: int | None
    num_bytes: int | None
    """Of all entries, as far as this process knows; None: the place counts them."""
    quota_bytes: int | None
    """Maximum bytes; None: no limit of its own."""
    hits: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    evictions: int = 0
    """Entries evicted for space."""
    failures: int = 0
    """Calls that raised."""
    quarantined: int = 0
    """Invalid entries that were moved out of use."""


@runtime_checkable
class Tier(Protocol):
    """A key-value store for serialized chunks.

        put_many ──▶ [ key -> entry, at most quota_bytes, LRU eviction ] ──▶ get_many

    Contract of every tier (checked by `tests/tiers/conformance.py`):

    - An entry comes back as it was put, or not at all: never a part of it, never that of another key.
    - Putting an existing key is harmless: the entry is the same, or the new one replaces the old one whole.
    - Getting, deleting or touching absent keys is harmless.
    - Any thread may call any method at any time; other processes may use the same location at the same time.
    - No call takes much longer than its deadline. What was not done by then was not done: `get_many` returns what it
      has, and `put_many` the keys that are safely stored.
    - Stored data is untrusted, even its size: nothing larger than the bound of a call is read.
    - Anything invalid in place of one entry affects this entry, and no other.
    - A failing location raises `TierUnavailable`, a full one `TierFull`, and nothing else; after that, the tier may be
      called again at any time, and works again when the location does.
    """

    @property
    def name(self) -> str:
        """Kind of tier, as in configuration, metrics and reports."""
        ...

    @property
    def is_persistent(self) -> bool:
        """Whether entries outlive the process. Other tiers are only written when the device evicts a chunk."""
        ...

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """Stores entries, evicting others for space; returns the keys that are stored now.

        An entry larger than the quota is not stored, and evicts no other.

        Raises:
            TierUnavailable: the location fails. TierFull: it is full, though below the quota.
        """
        ...

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """Present entries, whole, but not verified; counts as a use.

        Args:
            keys: of the entries.
            deadline: of the call.
            max_bytes: maximum of an entry of these keys, header included; None: the tier's own limit.

        Raises:
            DamagedEntry: one has more than `max_bytes`. It was not read, and nothing is returned: `quarantine` it.
            TierUnavailable: the location fails.
        """
        ...

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """The keys that have an entry now; not a use.

        Raises:
            TierUnavailable: the location fails.
        """
        ...

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """Removes entries; returns the keys that had one.

        Raises:
            TierUnavailable: the location fails.
        """
        ...

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """Counts as a use of these entries, without reading them.

        Raises:
            TierUnavailable: the location fails.
        """
        ...

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Moves an invalid entry out of use, so that it is not found under its key again.

        Raises:
            TierUnavailable: the location fails.
        """
        ...

    def stat(self) -> TierStat:
        """Fill level and counters; never raises, never waits for the location."""
        ...

    def close(self) -> None:
        """Closes files, threads and connections; persistent entries stay. A second call does nothing."""
        ...


def check_size(key: Key, num_bytes: int, max_bytes: int | None) -> None:
    """Rejects an entry, before it is read, that exceeds the maximum size for its key.

    Raises:
        DamagedEntry: it has more than `max_bytes`.
    """
    if max_bytes is not None and num_bytes > max_bytes:
        raise DamagedEntry(
            f"the entry {key.hex()} has {num_bytes:,} bytes, expected at most {max_bytes:,}; it is not read, and "
            "computed again; find out who else writes to this place"
        )


class TierCounters:
    """Thread-safe counters of a `TierStat`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("hits", "misses", "puts", "put_bytes", "get_bytes", "evictions", "failures", "quarantined"), 0
        )

    def count(self, **more: int) -> None:
        """Adds to the named counters."""
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def counts(self) -> dict[str, int]:
        """All counters by name, as the fields of a `TierStat`."""
        with self._lock:
            return dict(self._counts)


EVERY_SECONDS = 60.0
_MAX_SUBJECTS = 256


class Notices:
    """Warnings about subjects, each logged at most once a minute, with the number suppressed since.

    It remembers 256 subjects and drops the oldest above that. Thread-safe.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[Hashable, tuple[float, int]] = {}
        """Per subject: time of the last log line, and occurrences since."""

    def warn(self, subject: Hashable, text: str) -> bool:
        """Logs a warning unless its subject had one within a minute; returns whether it was logged."""
        if (left_out := self.count(subject)) is not None:
            self._log.warning("%s%s", text, left_out)
        return left_out is not None

    def count(self, subject: Hashable) -> str | None:
        """Counts an occurrence: None within a minute of the last one that was not, else those left out, in words."""
        with self._lock:
            now = self._clock()
            last, since = self._said.get(subject, (-math.inf, 0))
            is_due = now - last >= EVERY_SECONDS
            self._note(subject, (now, 0) if is_due else (last, since + 1))
        if not is_due:
            return None
        return f" ({since:,} times more in the last {now - last:,.0f} s)" if since else ""

    def warn_once(self, subject: Hashable, text: str) -> None:
        """Logs a warning about a subject that had none yet."""
        with self._lock:
            is_new = subject not in self._said
            if is_new:
                self._note(subject, (self._clock(), 0))
        if is_new:
            self._log.warning("%s", text)

    def _note(self, subject: Hashable, said: tuple[float, int]) -> None:
        self._said[subject] = said
        if len(self._said) > _MAX_SUBJECTS:
            del self._said[next(iter(self._said))]
