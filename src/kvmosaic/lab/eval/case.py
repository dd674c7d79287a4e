"""Evaluation case: one question with its documents and accepted answers, and the sampling of other documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt import Document

Metric = Literal["exact", "f1", "contains_any", "only"]
METRICS: tuple[Metric, ...] = get_args(Metric)

MAX_ID_CHARACTERS = 200
MAX_ANSWERS = 1_000
MAX_ANSWER_CHARACTERS = 100_000
MAX_CASE_DOCUMENTS = 10_000
MAX_TEXT_CHARACTERS = 2**25
MAX_ANSWER_TOKENS = 4_096
MAX_PIECE_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Case:
    """A system text, documents, a question, and the accepted answers.

    Raises:
        InvalidConfig: a field is empty, too long or not what it should be; the message names the case and the field.
    """

    id: str
    """Unique in its set."""
    task: str
    """The task it belongs to in tables: "two-hop", "hotpotqa"."""
    question: str
    answers: tuple[str, ...] = ()
    """Every answer that is accepted; the best match counts. Empty: the case is unlabelled, and has no score."""
    documents: tuple[Document, ...] = ()
    system: str | None = None
    needs: tuple[int, ...] = ()
    """Numbers of the documents (from 0) needed for the answer; empty: unknown."""
    metric: Metric = "exact"
    answer_tokens: int = 32
    """Maximum tokens of an answer."""
    piece_tokens: int | None = None
    """Length of the pieces into which each document is cut, at any position; each piece is a chunk of its own. None:
    each document is one chunk."""
    others: tuple[str, ...] = ()
    """What the same question has as answers for other documents: saying one of them is wrong."""
    companions: tuple[str, ...] = ()
    """Texts like its documents, which these see with the chunk context "companions"; empty: those of the settings."""
    is_ordered: bool = False
    """Whether its answer depends on the order of its documents."""

    def __post_init__(self) -> None:
        self._check_text("id", self.id, MAX_ID_CHARACTERS)
        self._check_text("task", self.task, MAX_ID_CHARACTERS)
        self._check_text("question", self.question, MAX_TEXT_CHARACTERS)
        if self.system is not None:
            self._check_text("system", self.system, MAX_TEXT_CHARACTERS)
        self._check(isinstance(self.answers, tuple), f"answers must be a tuple, got {self.answers!r:.80}")
        self._check(
            len(self.answers) <= MAX_ANSWERS, f"at most {MAX_ANSWERS} answers are allowed, got {len(self.answers)}"
        )
        for answer in (*self.answers, *self.others):
            self._check_text("answer", answer, MAX_ANSWER_CHARACTERS)
        self._check(
            isinstance(self.documents, tuple) and all(isinstance(document, Document) for document in self.documents),
            "documents must be a tuple of Document",
        )
        count = len(self.documents)
        self._check(count <= MAX_CASE_DOCUMENTS, f"at most {MAX_CASE_DOCUMENTS} documents are allowed, got {count}")
        for number in self.needs:
            self._check(number in range(count), f"it needs document {number!r}, and has {count} (counted from 0)")
        self._check(self.metric in METRICS, f"the metric must be one of {', '.join(METRICS)}, got {self.metric!r:.80}")
        self._check_count("answer_tokens", self.answer_tokens, MAX_ANSWER_TOKENS)
        if self.piece_tokens is not None:
            self._check_count("piece_tokens", self.piece_tokens, MAX_PIECE_TOKENS)

    @property
    def is_labelled(self) -> bool:
        """Whether an accepted answer is known."""
        return bool(self.answers)

    def turned(self) -> Case:
        """The same with its first document last."""
        return replace(self, documents=(*self.documents[1:], *self.documents[:1]), needs=())

    def _check_text(self, name: str, value: object, limit: int) -> None:
        self._check(
            isinstance(value, str) and bool(value.strip()),
            f"its {name} must be a text that says something, got {value!r:.80}",
        )
        assert isinstance(value, str)
        self._check(len(value) <= limit, f"its {name} has {len(value)} characters; at most {limit} are allowed")

    def _check_count(self, name: str, value: object, limit: int) -> None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        self._check(
            is_whole and 1 <= value <= limit,  # type: ignore[operator]
            f"{name} must be a whole number from 1 to {limit}, got {value!r:.80}",
        )

    def _check(self, is_good: bool, what: str) -> None:
        if not is_good:
            raise InvalidConfig(f"case {self.id!r:.80}: {what}")


USUAL_DOCUMENTS = 3
"""Default number of documents of a prompt."""


def draw_documents(needed: Sequence[int], total: int, count: int, seed: int, name: str) -> list[int]:
    """Numbers of `count` of `total` documents, in the order of the prompt; fewer if there are not so many.

    The result depends only on the arguments, so that a question has the same documents in every run.

    Args:
        needed: documents that are among them, each once; if they are more than `count`, the first ones.
        total: documents there are.
        count: documents of a prompt.
        seed: another seed draws other documents and positions.
        name: of the question.
    """
    chance = Random(f"{seed}:{name}")  # noqa: S311 - a draw that can be repeated, and no secret
    kept = list(dict.fromkeys(needed))[:count]
    num_others = min(count, total) - len(kept)
    others: list[int] = []
    while len(others) < num_others:
        number = chance.randrange(total)
        if number not in kept and number not in others:
            others.append(number)
    drawn = others
    for number in kept:
        drawn.insert(chance.randrange(len(drawn) + 1), number)
    return drawn
