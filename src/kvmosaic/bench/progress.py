"""Progress of a benchmark: callbacks of long work, and a progress bar that shows them."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Watcher:
    """Progress callbacks of long work; this one does nothing."""

    def stage(self, what: str) -> None:
        """A stage without a known length begins."""

    def total(self, count: int) -> None:
        """Announces the number of answers."""

    def answered(self, what: str) -> None:
        """One more answer is finished."""


class ProgressBar(Watcher):
    """Progress line with the current stage and the remaining answers."""

    def __init__(self, notices: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._notices = notices
        self._progress = Progress(*columns, console=notices, transient=True)
        self._task = self._progress.add_task("beginning", total=None)
        self._said = ""

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, what: str) -> None:
        """See `Watcher.stage`."""
        self._progress.update(self._task, description=what, total=None)
        self._say(what)

    def total(self, count: int) -> None:
        """See `Watcher.total`."""
        self._progress.update(self._task, total=count, completed=0)

    def answered(self, what: str) -> None:
        """See `Watcher.answered`."""
        self._progress.update(self._task, description=what, advance=1)
        self._say(what.split(":")[0])

    def _say(self, what: str) -> None:
        """Without a terminal, logs one line per stage."""
        if not self._notices.is_terminal and what != self._said:
            self._said = what
            self._notices.print(what, markup=False)
