"""Progress bar of warming: documents, tokens per second, and remaining time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class WarmingBar:
    """Progress bar drawn on terminals only. Its length counts file bytes, the best estimate of the remaining time."""

    def __init__(self, notices: Console, paths: Mapping[str, Path]) -> None:
        self._sizes: dict[str, int] = dict.fromkeys(paths, 1)
        for name, path in paths.items():
            with contextlib.suppress(OSError):
                self._sizes[name] += path.stat().st_size
        self._began = time.perf_counter()
        self._num_documents = self._num_bytes = 0
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[documents]:,} of {task.fields[all_documents]:,} documents"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)
        self._task = self._bar.add_task(
            "computing", total=sum(self._sizes.values()), documents=0, all_documents=len(paths), speed=0.0
        )

    def advance(self, names: Iterable[str]) -> None:
        """Marks documents as done."""
        for name in names:
            self._num_documents += 1
            self._num_bytes += self._sizes[name]
        self._bar.update(self._task, completed=self._num_bytes, documents=self._num_documents)

    def within(self, names: list[str], share: float, num_tokens: int) -> None:
        """Sets the progress within these documents, and the number of tokens computed so far."""
        self._bar.update(
            self._task,
            completed=self._num_bytes + share * sum(self._sizes[name] for name in names),
            documents=self._num_documents + int(share * len(names)),
            speed=num_tokens / (time.perf_counter() - self._began),
        )

    def writing(self) -> None:
        """Shows that all chunks are computed, but not yet written."""
        self._bar.update(self._task, description="writing")

    def __enter__(self) -> WarmingBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
