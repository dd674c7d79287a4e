"""A tier in a dictionary that can be slow, hang or fail on purpose: what real places do only now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from kvmosaic.cache import Key
from kvmosaic.errors import TierError, TierUnavailable
from kvmosaic.tiers import Deadline, Entry, TierStat

GATE_SECONDS = 120.0


class HandClock:
    """Seconds that pass when a test says so: how fast the machine is makes no difference."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class TroubledTier:
    """Keeps entries for ever, as slowly and as badly as it is told."""

    def __init__(self, name: str = "troubled", *, is_persistent: bool = True) -> None:
        self.name = name
        self.is_persistent = is_persistent
        self.entries: dict[Key, bytes] = {}
        self.aside: dict[Key, str] = {}
        self.calls: list[tuple[str, frozenset[Key]]] = []
        self.bounds: list[int | None] = []
        """`max_bytes` of every get."""
        self.get_seconds = 0.0
        self.put_seconds = 0.0
        self.sleep: Callable[[float], None] = time.sleep
        """How these seconds pass."""
        self.error: TierError | None = None
        self.gate = threading.Event()
        """Calls wait here; set at first."""
        self.gate.set()
        self.is_closed = False

    def _call(self, what: str, keys: Collection[Key], seconds: float = 0.0) -> None:
        self.calls.append((what, frozenset(keys)))
        if not self.gate.wait(GATE_SECONDS):
            raise TierUnavailable("the gate was never opened")
        self.sleep(seconds)
        if self.error is not None:
            raise self.error

    def count(self, what: str) -> int:
        """How often a method was called."""
        return sum(name == what for name, _ in self.calls)

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        self._call("put", entries, self.put_seconds)
        self.entries |= {key: bytes(entry) for key, entry in entries.items()}
        return set(entries)

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        self.bounds.append(max_bytes)
        self._call("get", keys, self.get_seconds)
        return {key: self.entries[key] for key in keys if key in self.entries}

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        self._call("exists", keys)
        return {key for key in keys if key in self.entries}

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        self._call("delete", keys)
        return {key for key in keys if self.entries.pop(key, None) is not None}

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        self._call("touch", keys)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        self._call("quarantine", [key])
        self.entries.pop(key, None)
        self.aside[key] = reason

    def stat(self) -> TierStat:
        num_bytes = sum(map(len, self.entries.values()))
        return TierStat(self.name, "", len(self.entries), num_bytes, None)

    def close(self) -> None:
        self.is_closed = True
