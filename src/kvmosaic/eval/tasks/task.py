"""Task protocol: a source of cases, the same for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import Case
from kvmosaic.eval.text.documents import Example, Question, TextSource
from kvmosaic.prompt import Document

MAX_TASK_CASES = 100_000
MAX_SEED = 2**63 - 1


class Task(Protocol):
    """A kind of question. Its text is its name in tables: "one-hop", or "one-hop(3)" if 3 is not its usual size."""

    def cases(self, seed: int, count: int) -> list[Case]:
        """So many cases. Names in them never occur in training; with a larger count, the first ones are the same.

        Raises:
            InvalidConfig: a seed or a count outside its range.
        """


def draw(task: object, seed: int, count: int, make: Callable[[TextSource, str], Case]) -> list[Case]:
    """Cases from one source, each with an id of its own; every case has documents that no other has."""
    for name, value, low, high in (("seed", seed, 0, MAX_SEED), ("cases", count, 1, MAX_TASK_CASES)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidConfig(f"{name} must be a whole number from {low} to {high}, got {value!r:.80}")
    source = TextSource(seed, "held_out")
    return [make(source, f"{task}:{seed}:{number}") for number in range(count)]


def case_of(task: object, case_id: str, example: Example, question: Question) -> Case:
    """One question of an example, with all of its documents."""
    needs = question.needs or ((question.document,) if question.document >= 0 else ())
    documents = tuple(Document(document.text, document.title) for document in example.documents)
    return Case(case_id, str(task), question.text, (question.answer,), documents, example.system, needs)


def check_size(name: str, what: str, value: object, low: int, high: int) -> None:
    """Checks the number in brackets after a task's name.

    Raises:
        InvalidConfig: not a whole number from `low` to `high`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfig(f"{name}({what}) takes a whole number from {low} to {high}, got {value!r:.80}")
