"""Task with one long document, cut into pieces of equal length at arbitrary positions.

text      Marla Denwick works as a baker. She lives in Tolbury. ¶ The Silver Heron carries tea. ... pieces    |Marla
Denwick works as a| baker. She lives in Tolb|ury. ¶ The Silver Heron c|arries tea. ...
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvmosaic.eval.case import Case
from kvmosaic.eval.tasks.task import case_of, check_size, draw
from kvmosaic.eval.text.documents import Recipe, TextSource
from kvmosaic.prompt import Document

_USUAL, _LEAST, _MOST = 48, 4, 4_096


@dataclass(frozen=True, slots=True)
class Long:
    """Four to six paragraphs as one document, in pieces of so many tokens; the joined pieces are its tokens."""

    piece_tokens: int = _USUAL

    def __post_init__(self) -> None:
        check_size("long", "tokens", self.piece_tokens, _LEAST, _MOST)

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = source.example(Recipe(documents=(4, 6), sentences=(3, 5), questions=1))
        case = case_of(self, case_id, example, example.questions[0])
        text = "\n".join(document.text for document in example.documents)
        return replace(case, documents=(Document(text),), needs=(0,), piece_tokens=self.piece_tokens)

    def __str__(self) -> str:
        return "long" if self.piece_tokens == _USUAL else f"long({self.piece_tokens})"
