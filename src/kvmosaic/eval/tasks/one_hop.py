"""Task with questions that one document answers."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, check_size, draw
from kvmosaic.eval.text.documents import Recipe, TextSource

_USUAL, _MOST = 6, 64


@dataclass(frozen=True, slots=True)
class OneHop:
    """One fact of one of k documents, most often about things of one kind."""

    documents: int = _USUAL

    def __post_init__(self) -> None:
        check_size("one-hop", "documents", self.documents, 1, _MOST)

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        recipe = Recipe(documents=(self.documents, self.documents), sentences=(2, 4), questions=1)
        example = source.example(recipe)
        return case_of(self, case_id, example, example.questions[0])

    def __str__(self) -> str:
        return "one-hop" if self.documents == _USUAL else f"one-hop({self.documents})"
