"""Task with stories whose pieces begin in the middle: an earlier document names "she"."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, draw
from kvmosaic.eval.text.documents import TextSource
from kvmosaic.eval.text.stories import StoryRecipe, story_example

_ALL = 64
"""More questions than a prompt of stories has."""


@dataclass(frozen=True, slots=True)
class Story:
    """One to three stories in two or three pieces; the answer is after the first piece."""

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = story_example(source, StoryRecipe(questions=_ALL))
        question = next(question for question in example.questions if question.needs)
        return case_of(self, case_id, example, question)

    def __str__(self) -> str:
        return "story"
