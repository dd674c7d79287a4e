"""Progress display of a run: a live table, or lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from kvmosaic.console.text import printable
from kvmosaic.eval.rows import TaskRow
from kvmosaic.eval.summary import Summary, summarize
from kvmosaic.eval.table import NARROW_HEADINGS, narrow_cells, percent, terminal_table, way_text

_TABLE_SECONDS, _LINE_SECONDS = 1.0, 30.0
"""Minimum seconds between updates of the table, and between lines: with many short questions, counting costs more than
generating."""


class Display:
    """Shows the progress of a run. Use it as a context manager, and pass `progress` and `news` to `evaluate`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console)
        self._line = self._bar.add_task("answering", total=None)
        self._live = Live(self._bar, console=console, transient=True, refresh_per_second=4) if _shows(console) else None
        self._shown = time.monotonic()

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def progress(self, done: int, total: int) -> None:
        """Counts answers."""
        self._bar.update(self._line, completed=done, total=total)

    def news(self, rows: Sequence[TaskRow]) -> None:
        """Shows the results of all questions so far."""
        now, every = time.monotonic(), _LINE_SECONDS if self._live is None else _TABLE_SECONDS
        if now - self._shown < every:
            return
        self._shown = now
        summaries = summarize(rows)
        with_context = len({summary.way.context for summary in summaries}) > 1
        if self._live is None:
            count = sum(row.num_cases for row in rows if row.way.is_full)
            self._console.print(Text(printable(_one_line(count, summaries, with_context)), style="dim"))
            return
        cells = (narrow_cells(summary, with_context=with_context) for summary in summaries)
        self._live.update(Group(terminal_table(NARROW_HEADINGS, cells), self._bar))


def _shows(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _one_line(count: int, summaries: Sequence[Summary], with_context: bool) -> str:
    """Returns divergence and agreement of every variant so far."""
    found = (
        f"{way_text(each.way, with_context=with_context)} {each.divergence:.4f} {percent(each.agreement)}"
        for each in summaries
        if not each.way.is_full
    )
    return f"{count} question{'s' if count > 1 else ''}: {'; '.join(found)}"
