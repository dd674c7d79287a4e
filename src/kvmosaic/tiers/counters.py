"""Counters of a tier since it was opened."""

from __future__ import annotations

import threading


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
