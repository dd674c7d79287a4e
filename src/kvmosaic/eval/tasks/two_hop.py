"""Task with questions that need two documents: one names a thing, the other describes it."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, draw
from kvmosaic.eval.text.chains import ChainRecipe, chain_example
from kvmosaic.eval.text.documents import TextSource


@dataclass(frozen=True, slots=True)
class TwoHop:
    """Two or three such pairs in one prompt; one of them is asked for."""

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = chain_example(source, ChainRecipe(questions=1, one_hop=0))
        return case_of(self, case_id, example, example.questions[0])

    def __str__(self) -> str:
        return "two-hop"
