"""What every stage of a run on a GPU has: its device, rows that are saved one by one, and clocks."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_MAX_FAILURE = 2_000
"""Characters of a failure that are kept."""


class Stage:
    """One stage, in a process of its own."""

    def __init__(self, path: Path, seconds: float, *, dry_run: bool) -> None:
        self.is_dry = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._end = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Until this process is stopped."""
        return self._end - time.monotonic()

    @contextmanager
    def part(self, name: str, **shape: Any) -> Iterator[dict[str, Any]]:
        """Yields a row to fill, and saves it; a part that fails leaves its failure, and the next one begins."""
        row: dict[str, Any] = {"part": name, **shape}
        begin = time.monotonic()
        try:
            yield row
        except Exception:
            text = traceback.format_exc()
            row["failed"] = text if len(text) <= _MAX_FAILURE else f"{text[:300]}\n…\n{text[300 - _MAX_FAILURE :]}"
        row["took"] = round(time.monotonic() - begin, 2)
        self.rows.append(row)
        self._path.write_text(json.dumps({"rows": self.rows}, default=str) + "\n")
        shown = {key: value for key, value in row.items() if key != "failed"}
        print(shown, row.get("failed", ""), flush=True)
        self.free()

    def free(self) -> None:
        """Frees what the last part has left."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], *, repeats: int = 10, warm: int = 3, calls: int = 1) -> float:
        """The median time of a call, by events on the device; `calls` follow each other within one measurement."""
        for _ in range(1 if self.is_dry else warm):
            function()
        taken = []
        for _ in range(2 if self.is_dry else repeats):
            self.wait()
            if self.device.type == "cuda":
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                for _ in range(calls):
                    function()
                last.record()
                last.synchronize()
                taken.append(first.elapsed_time(last) / 1e3 / calls)
            else:
                begin = time.perf_counter()
                for _ in range(calls):
                    function()
                taken.append((time.perf_counter() - begin) / calls)
        return statistics.median(taken)

    def wall_seconds(self, function: Callable[[], Any]) -> float:
        """The time of one call, until the device has done it."""
        self.wait()
        begin = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - begin
