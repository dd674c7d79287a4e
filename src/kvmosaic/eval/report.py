"""Report of an evaluation: JSON, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from kvmosaic.console.text import printable
from kvmosaic.eval.case import Case
from kvmosaic.eval.rows import TaskRow
from kvmosaic.eval.summary import Summary, findings, summarize
from kvmosaic.eval.table import (
    LEGEND,
    NARROW_HEADINGS,
    ROW_HEADINGS,
    SUMMARY_HEADINGS,
    markdown_table,
    narrow_cells,
    row_cells,
    summary_cells,
    task_table,
    terminal_table,
)

FORMAT = 2
"""Version of the JSON."""
MAX_SHOWN_CASES = 1_000
"""Cases whose documents are in the JSON; of later ones only question and answers are."""
_WIDE_COLUMNS = 140
"""Columns of a terminal from which on all headings have room."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """All results of one run."""

    model: str
    about: str
    """Number of parameters, dtype and device."""
    seed: int
    facts: dict[str, Any]
    cases: Sequence[Case]
    rows: Sequence[TaskRow]
    notes: Sequence[str]
    """Remarks for the reader: what was left out, and why."""
    seconds: float
    """How long the run took."""

    @property
    def summaries(self) -> list[Summary]:
        """Each variant, over all tasks."""
        return summarize(self.rows)

    def to_json(self) -> str:
        """Everything, with every answer."""
        content = {
            "format": FORMAT,
            "model": self.model,
            "about": self.about,
            "seed": self.seed,
            "machine": self.facts,
            "summaries": [summary.to_dict() for summary in self.summaries],
            "findings": findings(self.rows),
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
            "cases": [_case(case, number < MAX_SHOWN_CASES) for number, case in enumerate(self.cases)],
            "seconds": self.seconds,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Tables for people."""
        parts = [
            f"# {self.model}: answers from cached documents beside full attention",
            self._heading(),
            *findings(self.rows),
            *self.notes,
            "## All tasks",
            markdown_table(SUMMARY_HEADINGS, map(summary_cells, self.summaries)),
            LEGEND[0].upper() + LEGEND[1:] + ".",
            "## Each task",
            markdown_table(ROW_HEADINGS, map(row_cells, self.rows)),
        ]
        return "\n\n".join(parts) + "\n"

    def to_tables(self, width: int = _WIDE_COLUMNS) -> Group:
        """Returns tables for a terminal of this many columns; a narrow one shows the most important columns."""
        said = [Text(printable(text)) for text in (*findings(self.rows), *self.notes)]
        with_context = len({row.way.context for row in self.rows}) > 1
        wide = terminal_table(SUMMARY_HEADINGS, map(summary_cells, self.summaries))
        cells = [narrow_cells(summary, with_context=with_context) for summary in self.summaries]
        return Group(
            Text(printable(self._heading()), style="dim"),
            Text(),
            terminal_table(NARROW_HEADINGS, cells) if width < _WIDE_COLUMNS else wide,
            Text(),
            terminal_table(*task_table(self.rows, with_context=with_context)),
            Text(),
            *said,
            Text("\n" + LEGEND, style="dim"),
        )

    def save(self, folder: Path, name: str) -> list[Path]:
        """Writes JSON and Markdown, and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.json", folder / f"{name}.md"]
        for path, text in zip(paths, (self.to_json(), self.to_markdown()), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths

    def _heading(self) -> str:
        facts = self.facts
        return (
            f"{self.about}; {facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), load average "
            f"{facts['load_average']}; {len(self.cases)} questions, seed {self.seed}; commit {facts['commit']}; "
            f"{self.seconds:.0f} s"
        )


def _case(case: Case, with_documents: bool) -> dict[str, Any]:
    fields = asdict(case)
    documents = [document.plain_text for document in case.documents]
    return fields | {"documents": documents if with_documents else len(documents)}
