"""Tasks with exact answers: questions about invented things, drawn from a seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from types import MappingProxyType
from typing import ClassVar, Protocol

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.text.documents import Example, Question, Recipe, TextSource
from kvmosaic.lab.eval.text.recipes import (
    LANGUAGES,
    MAX_RECORDS,
    ChainRecipe,
    OrderRecipe,
    StoryRecipe,
    chain_example,
    order_example,
    similar_records,
    story_example,
)
from kvmosaic.prompt import Document

__all__ = ["FORMS", "TASKS", "Long", "Needle", "OneHop", "Order", "Story", "Task", "TwoHop", "task"]


MAX_TASK_CASES = 100_000
MAX_SEED = 2**63 - 1


class Task(Protocol):
    """A kind of question. Its text is its name in tables: "one-hop", or "one-hop(3)" if 3 is not its usual size."""

    def cases(self, seed: int, count: int) -> list[Case]:
        """So many cases. Names in them never occur in training; with a larger count, the first ones are the same.

        Raises:
            InvalidConfig: a seed or a count outside its range.
        """


def check_draw(seed: int, count: int) -> None:
    """Checks what cases are drawn with.

    Raises:
        InvalidConfig: a seed or a count outside its range.
    """
    for name, value, low, high in (("seed", seed, 0, MAX_SEED), ("cases", count, 1, MAX_TASK_CASES)):
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidConfig(f"{name} must be a whole number from {low} to {high}, got {value!r:.80}")


def draw(task: object, seed: int, count: int, make: Callable[[TextSource, str], Case]) -> list[Case]:
    """Cases from one source, each with an id of its own; every case has documents that no other has."""
    check_draw(seed, count)
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


_SIMILAR_ANSWER_TOKENS = 48
"""Two values in whole sentences."""


@dataclass(frozen=True, slots=True)
class Similar:
    """Values of one or two of k records of one kind: near-equal names and numbers. By default 3 to 6 short ones."""

    documents: int | None = None
    language: str = "en"
    is_long: bool = False
    is_among: bool = False
    """Whether three documents of other kinds are between any two records."""

    def __post_init__(self) -> None:
        if self.documents is not None:
            check_size(self._name, "documents", self.documents, 3, MAX_RECORDS)

    @property
    def _name(self) -> str:
        if self.is_among:
            return "similar-among"
        return "similar" + ("-long" if self.is_long else f"-{self.language}" if self.language != "en" else "")

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        check_draw(seed, count)
        chance = Random(f"{self._name} {seed}")  # noqa: S311 - a draw that can be repeated, and no secret
        cases = [self._case(chance, f"{self}:{seed}:{number}", number) for number in range(count)]
        if not self.is_among:
            return cases
        others = iter(OneHop(_NUM_BETWEEN).cases(seed, sum(len(case.documents) - 1 for case in cases)))
        return [_among(case, others) for case in cases]

    def _case(self, chance: Random, case_id: str, number: int) -> Case:
        count = self.documents or (3 if self.is_among else chance.randint(3, MAX_RECORDS if self.is_long else 6))
        num_more = chance.randint(3, 5) if self.is_long else chance.randint(0, 1)
        drawn = similar_records(chance, self.language, count, num_more, 2 if number % 4 == 3 else 1)
        documents = tuple(Document(record) for record in drawn.records)
        return Case(
            *(case_id, str(self), drawn.question, drawn.answers, documents, drawn.system, drawn.needs),
            metric="only",
            answer_tokens=_SIMILAR_ANSWER_TOKENS,
            others=drawn.others,
            companions=drawn.companions,
        )

    def __str__(self) -> str:
        return f"{self._name}({self.documents})" if self.documents else self._name


_NUM_BETWEEN = 3


def _among(case: Case, others: Iterator[Case]) -> Case:
    """A case with the documents of the next ones between its own, and without companions of one kind."""
    documents = [*case.documents[:1]]
    for record in case.documents[1:]:
        documents += [*next(others).documents, record]
    needs = tuple(number * (_NUM_BETWEEN + 1) for number in case.needs)
    return replace(case, documents=tuple(documents), needs=needs, companions=())


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A task whose cases are drawn one by one from one source of names."""

    size: int = 0
    """The number in brackets, for tasks that have one."""
    name: ClassVar[str]
    bounds: ClassVar[tuple[str, int, int] | None] = None
    """What the size counts, and its bounds."""

    def __post_init__(self) -> None:
        if self.bounds is not None:
            what, low, high = self.bounds
            check_size(self.name, what, self.size, low, high)

    def cases(self, seed: int, count: int) -> list[Case]:
        """See `Task.cases`."""
        return draw(self, seed, count, self._case)

    def _case(self, source: TextSource, case_id: str) -> Case:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name if self.size == type(self)().size else f"{self.name}({self.size})"


@dataclass(frozen=True, slots=True)
class OneHop(_Drawn):
    """One fact of one of k documents, most often about things of one kind."""

    size: int = 6
    name = "one-hop"
    bounds = ("documents", 1, 64)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = source.example(Recipe(documents=(self.size, self.size), sentences=(2, 4), questions=1))
        return case_of(self, case_id, example, example.questions[0])


@dataclass(frozen=True, slots=True)
class TwoHop(_Drawn):
    """Two or three such pairs in one prompt; one of them is asked for."""

    name = "two-hop"

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = chain_example(source, ChainRecipe(questions=1, one_hop=0))
        return case_of(self, case_id, example, example.questions[0])


_ALL_QUESTIONS = 64
"""More questions than a prompt of stories has."""


@dataclass(frozen=True, slots=True)
class Story(_Drawn):
    """One to three stories in two or three pieces; the answer is after the first piece."""

    name = "story"

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = story_example(source, StoryRecipe(questions=_ALL_QUESTIONS))
        question = next(question for question in example.questions if question.needs)
        return replace(case_of(self, case_id, example, question), is_ordered=True)


@dataclass(frozen=True, slots=True)
class Order(_Drawn):
    """Two to four documents about one thing."""

    name = "order"

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = order_example(source, OrderRecipe(questions=1))
        return replace(case_of(self, case_id, example, example.questions[0]), is_ordered=True)


@dataclass(frozen=True, slots=True)
class Needle(_Drawn):
    """One fact of one of k documents of one or two sentences."""

    size: int = 12
    name = "needle"
    bounds = ("documents", 2, 256)

    def _case(self, source: TextSource, case_id: str) -> Case:
        counts = (self.size, self.size)
        example = source.example(Recipe(documents=counts, sentences=(1, 2), questions=1, same_kind=0, fillers=0))
        return case_of(self, case_id, example, example.questions[0])


@dataclass(frozen=True, slots=True)
class Long(_Drawn):
    """Four to six paragraphs as one document, in pieces of so many tokens; the joined pieces are its tokens.

    text      Marla Denwick works as a baker. She lives in Tolbury. ¶ The Silver Heron carries tea. ...
    pieces    |Marla Denwick works as a| baker. She lives in Tolb|ury. ¶ The Silver Heron c|arries tea. ...
    """

    size: int = 48
    name = "long"
    bounds = ("tokens", 4, 4_096)

    def _case(self, source: TextSource, case_id: str) -> Case:
        example = source.example(Recipe(documents=(4, 6), sentences=(3, 5), questions=1))
        case = case_of(self, case_id, example, example.questions[0])
        text = "\n".join(document.text for document in example.documents)
        return replace(case, documents=(Document(text),), needs=(0,), piece_tokens=self.size)


TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "similar": Similar,
        "one-hop": OneHop,
        "two-hop": TwoHop,
        "story": Story,
        "order": Order,
        "needle": Needle,
        "long": Long,
    }
    | {f"similar-{language}": partial(Similar, language=language) for language in LANGUAGES[1:]}
    | {"similar-long": partial(Similar, is_long=True), "similar-among": partial(Similar, is_among=True)}
)
USUAL_TASKS = ("similar", "one-hop", "two-hop", "story", "order", "needle", "long")
"""The default."""
FORMS = (
    "similar(documents), one-hop(documents), two-hop, story, order, needle(documents), long(tokens), "
    f"similar-long(documents), similar-among(documents), similar-({'|'.join(LANGUAGES[1:])})(documents)"
)
_UNSIZED = (TwoHop, Story, Order)
_FORM = re.compile(r"([a-z-]+)(?:\(\s*([0-9]{1,9})\s*\))?")
_MAX_CHARACTERS = 100


def task(text: str) -> Task:
    """The task of a text: a name, and in brackets its size if it has one.

    Raises:
        InvalidConfig: no such task, or a size that it cannot have.
    """
    form = _FORM.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
    if form is None or form[1] not in TASKS:
        raise InvalidConfig(f"there is no task {text[:80]!r}; choose from {FORMS}")
    make = TASKS[form[1]]
    if form[2] is None:
        return make()
    if make in _UNSIZED:
        raise InvalidConfig(f"the task {form[1]} has one size only, got {text!r}; the forms are {FORMS}")
    return make(int(form[2]))
