"""What is learned from: documents, questions about them, and the lessons that are drawn of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.adapt.distillation import Lesson
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.case_measurement import prompt_of
from kvmosaic.llm import LLM
from kvmosaic.prompt import Document
from kvmosaic.sampling import SamplingParams

MIN_DOCUMENTS = 4
"""Fewest documents of a corpus: some are held out, and a lesson has several."""
_ASK = "Write one question that this text answers. Write the question only."
_QUESTION_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the numbers of the documents it is about; none: unknown."""

    text: str
    needs: tuple[int, ...] = ()
    case: Case | None = None
    """The case that it is from, if its documents belong together: they are read in their order, and no other ones."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents and questions about them.

    Raises:
        InvalidConfig: too few documents, or no question.
    """

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    system: str | None = None

    def __post_init__(self) -> None:
        if len(self.documents) < MIN_DOCUMENTS:
            raise InvalidConfig(
                f"{len(self.documents)} documents are too few to learn from; give at least {MIN_DOCUMENTS}"
            )
        if not self.questions:
            raise InvalidConfig("there is no question to learn from; give --questions, or documents with sentences")

    @classmethod
    def of_cases(cls, cases: Iterable[Case], keeps: Callable[[Case], bool] = lambda _: False) -> Corpus:
        """The documents and questions of evaluation cases, each document once. Accepted answers are not used.

        Args:
            cases: the cases.
            keeps: whether the documents of a case belong together, as those of our tasks do. Otherwise the documents
                that a question needs are read among any others.
        """
        numbers: dict[str, int] = {}
        documents: list[Document] = []
        questions: list[Question] = []
        system = None
        for case in cases:
            own = []
            for document in case.documents:
                if document.text not in numbers:
                    numbers[document.text] = len(documents)
                    documents.append(document)
                own.append(numbers[document.text])
            if keeps(case) or case.piece_tokens is not None:
                questions.append(Question(case.question, tuple(own), case))
            else:
                questions.append(Question(case.question, tuple(own[each] for each in case.needs)))
            system = case.system
        return cls(tuple(documents), tuple(questions), system)

    @property
    def keeps_documents(self) -> bool:
        """Whether questions keep the documents of their cases."""
        return any(each.case is not None for each in self.questions)

    def split(self, share: float, seed: int) -> tuple[Corpus, Corpus]:
        """Two corpora without a document or a question in common: to learn from, and held out (`share` of it).

        Documents of one question are on one side, unless so few would be left on the other. A question without known
        documents goes where chance puts it.
        """
        chance = Random(f"{seed}:split")  # noqa: S311 - a draw that can be repeated, and no secret
        count = len(self.documents)
        num_held = min(max(MIN_DOCUMENTS, round(share * count)), count - MIN_DOCUMENTS)
        if num_held < MIN_DOCUMENTS:
            raise InvalidConfig(
                f"{count} documents are too few: {MIN_DOCUMENTS} are held out, and at least {MIN_DOCUMENTS} are needed "
                "to learn from"
            )
        groups = _connected(count, [each.needs for each in self.questions])
        chance.shuffle(groups)
        taken: list[int] = []
        for group in groups:
            if len(taken) < num_held and len(taken) + len(group) <= count - MIN_DOCUMENTS:
                taken += group
        held = frozenset(taken if len(taken) >= MIN_DOCUMENTS else chance.sample(range(count), num_held))
        learned, asked = list[Question](), list[Question]()
        for question in self.questions:
            inside = {each in held for each in question.needs}
            if len(inside) <= 1:  # otherwise it needs documents of both
                is_held = inside == {True} or (not inside and chance.random() < share)
                (asked if is_held else learned).append(question)
        return self._part([each for each in range(count) if each not in held], learned), self._part(sorted(held), asked)

    def _part(self, numbers: Sequence[int], questions: Sequence[Question]) -> Corpus:
        places = {number: place for place, number in enumerate(numbers)}
        kept = tuple(replace(each, needs=tuple(places[need] for need in each.needs)) for each in questions)
        return Corpus(tuple(self.documents[number] for number in numbers), kept, self.system)

    def draw(self, chance: Random, num_documents: int, num_questions: int) -> list[Case]:
        """Questions over the same documents, of which the first is about one of them, if that is known.

        The others are about these documents where such are known, else about anything. A question that keeps its
        documents is alone.
        """
        first = chance.choice(self.questions)
        if first.case is not None:
            return [first.case]
        num_documents = min(num_documents, len(self.documents))
        numbers = list(first.needs[:num_documents])
        others = [number for number in range(len(self.documents)) if number not in numbers]
        numbers += chance.sample(others, num_documents - len(numbers))
        chance.shuffle(numbers)
        free = [each for each in self.questions if each is not first and each.case is None]
        near = [each for each in free if each.needs and set(each.needs) <= set(numbers)] or free
        more = chance.sample(near, min(num_questions - 1, len(near)))
        documents = tuple(self.documents[number] for number in numbers)
        return [Case("lesson", "adapt", each.text, (), documents, self.system) for each in (first, *more)]


def _connected(count: int, parts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Groups of the numbers 0 to `count` - 1, such that each part lies in one of them."""
    leaders = list(range(count))

    def leader(number: int) -> int:
        while leaders[number] != number:
            leaders[number] = leaders[leaders[number]]
            number = leaders[number]
        return number

    for part in parts:
        for each in part[1:]:
            leaders[leader(each)] = leader(part[0])
    groups: dict[int, list[int]] = {}
    for number in range(count):
        groups.setdefault(leader(number), []).append(number)
    return list(groups.values())


def lessons_of(llm: LLM, groups: Sequence[Sequence[Case]], max_tokens: int, seeds: Sequence[int] = ()) -> list[Lesson]:
    """A lesson for each group of questions over the same documents, answered by the model's own full attention.

    Args:
        llm: the model.
        groups: questions over the same documents each.
        max_tokens: of an answer.
        seeds: each question is answered greedily, and once for each of these seeds by sampling. What the model would
            rarely say is learned by sampled answers only.
    """
    prompts = [[prompt_of(llm, case) for case in cases] for cases in groups]
    params = [SamplingParams(temperature=0, max_tokens=max_tokens)]
    params += [SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens) for seed in seeds]
    joined = [prompt.joined() for group in prompts for prompt in group]
    outputs = iter(llm.generate([each for each in joined for _ in params], params * len(joined)))
    return [
        Lesson(
            group[0],
            tuple(prompt.segments[-1].token_ids or () for prompt in group for _ in params),
            tuple(tuple(next(outputs).outputs[0].token_ids) for _ in group for _ in params),
        )
        for group in prompts
    ]


def invented_questions(llm: LLM, documents: Sequence[Document], each: int, seed: int) -> list[Question]:
    """Questions that the model itself asks about each document; what does not end as a question is left out."""
    found: list[Question] = []
    has_template = bool(getattr(llm.model.tokenizer, "chat_template", None))
    params = [
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=_QUESTION_TOKENS, seed=seed + trial)
        for trial in range(each)
    ]
    for number, document in enumerate(documents):
        text = f"{document.plain_text}\n\n{_ASK}"
        if has_template:
            outputs = llm.chat([[{"role": "user", "content": text}]] * each, params)
        else:
            outputs = llm.generate([f"{text}\n"] * each, params)
        lines = {output.outputs[0].text.strip().split("\n")[0].strip() for output in outputs}
        found += [Question(line, (number,)) for line in sorted(lines) if line.endswith("?")]
    return found
