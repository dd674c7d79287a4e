"""Progress bar and report of warming a folder, as text and as JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.cache.keys import Key
from kvmosaic.console.text import duration_text, one_line, printable, size_text


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


MAX_LINES = 50
"""Maximum number of failed documents listed; more are only counted."""


@dataclass(slots=True)
class WarmCounts:
    """Counts of warming."""

    documents: int
    computed: int = 0
    """Documents computed, in whole or in part."""
    skipped: int = 0
    """Documents that the tiers already had."""
    tokens: int = 0
    """Tokens computed."""
    chunks: dict[Key, None] = field(default_factory=dict)
    """All chunks of all documents, in order."""
    problems: dict[str, str] = field(default_factory=dict)
    """Errors of documents that cannot be computed, by name."""
    missing: list[Key] = field(default_factory=list)
    """Chunks missing in some tier at the end."""
    num_bytes: int = 0
    """Bytes written to the tiers."""
    seconds: float = 0.0
    is_interrupted: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every document is in all tiers."""
        return not (self.missing or self.problems or self.is_interrupted)

    @property
    def num_left(self) -> int:
        """Documents not processed."""
        return self.documents - self.computed - self.skipped - len(self.problems)


def show_counts(tally: WarmCounts, as_json: bool) -> None:
    """Prints what was done, and what is left."""
    console, notices = Console(soft_wrap=True, highlight=False), Console(stderr=True, soft_wrap=True, highlight=False)
    for name, problem in islice(tally.problems.items(), MAX_LINES):
        notices.print(f"not computed: {printable(name)}: {one_line(problem, 400)}", markup=False)
    if len(tally.problems) > MAX_LINES:
        notices.print(f"… {len(tally.problems) - MAX_LINES:,} more were not computed")
    if as_json:
        print(json.dumps(_fields(tally)), flush=True)
    else:
        console.print(_summary(tally))
    if tally.is_interrupted:
        notices.print(
            f"interrupted with {tally.num_left:,} documents left; the same command goes on where this one stopped",
            style="yellow",
        )
    if tally.missing:
        notices.print(
            f"{len(tally.missing):,} of {len(tally.chunks):,} chunks are not in every tier: one failed, or its quota "
            "is too small for all of them",
            style="red",
        )


def _fields(tally: WarmCounts) -> dict[str, object]:
    return {
        "documents": tally.documents,
        "computed": tally.computed,
        "skipped": tally.skipped,
        "failed": len(tally.problems),
        "left": tally.num_left,
        "not_stored": len(tally.missing),
        "tokens": tally.tokens,
        "bytes": tally.num_bytes,
        "seconds": round(tally.seconds, 3),
        "interrupted": tally.is_interrupted,
    }


def _summary(tally: WarmCounts) -> str:
    speed = f", {tally.tokens / tally.seconds:,.0f} tokens/s" if tally.tokens and tally.seconds else ""
    failed = f", {len(tally.problems):,} failed" if tally.problems else ""
    took = f"{size_text(tally.num_bytes)} written in {duration_text(tally.seconds)}{speed}"
    return (
        f"{tally.documents:,} documents: {tally.computed:,} computed, {tally.skipped:,} skipped (stored already)"
        f"{failed}; {tally.tokens:,} tokens, {took}"
    )
