"""Task with one fact among many short documents of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, check_size, draw
from kvmosaic.eval.text.documents import Recipe, TextSource

_USUAL, _MOST = 12, 256


@dataclass(frozen=True, slots=True)
class Needle:
    """One fact of one of k documents of one or two sentences."""

    documents: int = _USUAL

    def __post_init__(self) -> None:
        check_size("needle", "documents", self.documents, 2, _MOST)

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        recipe = Recipe(
            documents=(self.documents, self.documents), sentences=(1, 2), questions=1, same_kind=0, fillers=0
        )
        example = source.example(recipe)
        return case_of(self, case_id, example, example.questions[0])

    def __str__(self) -> str:
        return "needle" if self.documents == _USUAL else f"needle({self.documents})"
