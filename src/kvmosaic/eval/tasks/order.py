"""Task with contradicting documents, and a question about the first or the last of them."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, draw
from kvmosaic.eval.text.documents import TextSource
from kvmosaic.eval.text.orders import OrderRecipe, order_example


@dataclass(frozen=True, slots=True)
class Order:
    """Two to four documents about one thing."""

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = order_example(source, OrderRecipe(questions=1))
        return case_of(self, case_id, example, example.questions[0])

    def __str__(self) -> str:
        return "order"
