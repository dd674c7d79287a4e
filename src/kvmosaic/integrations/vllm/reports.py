"""Report shelf: reports of in-flight requests, in the process that answers them."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_REPORTS = 4096
MAX_SEGMENTS = 65_536
"""Segments of all kept reports; one takes about half a kilobyte."""
MAX_SECONDS = 600.0
_ADDED = re.compile(r"-[0-9a-f]{8}\Z")
"""Suffix that vLLM appends to request ids inside the engine."""


class ReportShelf:
    """Reports by the id of their request: bounded by their number, by their segments and by age. Thread-safe.

    put("chatcmpl-7-1a2b3c4d", report)    as the engine names the request
    take("chatcmpl-7")                    as the front end does; the second time it is None
    """

    def __init__(
        self,
        max_reports: int = MAX_REPORTS,
        max_segments: int = MAX_SEGMENTS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()
        self._names: dict[str, str] = {}
        self._num_segments = 0
        self._limits = (max_reports, max_segments, max_seconds)
        self._clock = clock
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, request_id: str, report: dict[str, Any]) -> None:
        """Stores a report; replaces an earlier one of the same request."""
        max_reports, max_segments, max_seconds = self._limits
        with self._lock:
            now = self._clock()
            self._drop(request_id)
            self._kept[request_id] = (now, report)
            self._names[_ADDED.sub("", request_id)] = request_id
            self._num_segments += len(report["segments"])
            while self._kept and (
                len(self._kept) > max_reports
                or self._num_segments > max_segments
                or next(iter(self._kept.values()))[0] < now - max_seconds
            ):
                self._drop(next(iter(self._kept)))

    def take(self, request_id: str) -> dict[str, Any] | None:
        """Removes and returns a report; None if there is none, or it was dropped."""
        with self._lock:
            return self._drop(request_id) or self._drop(self._names.get(request_id, ""))

    def _drop(self, request_id: str) -> dict[str, Any] | None:
        _, report = self._kept.pop(request_id, (0.0, None))
        if report is not None:
            self._num_segments -= len(report["segments"])
            name = _ADDED.sub("", request_id)
            if self._names.get(name) == request_id:
                del self._names[name]
        return report


SHELF = ReportShelf()
"""The shelf of this process: vLLM creates the receiver of the reports, and another part answers the requests."""

put, take = SHELF.put, SHELF.take
