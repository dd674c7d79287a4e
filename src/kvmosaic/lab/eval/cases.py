"""Cases of a run: from tasks, files and the user's own questions, interleaved.

A file of questions has one question in each line, or one JSON object in each line: {"question": …} and, where they are
known, "answer" (a text or a list of them), "documents" (a list of ids) and "id". Without document ids, documents are
sampled: the one that the question is most likely about, at a random position among random others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from math import log
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from kvmosaic.console.folder import read_folder
from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.lab.eval.case import MAX_ID_CHARACTERS, USUAL_DOCUMENTS, Case, draw_documents
from kvmosaic.lab.eval.loaders import Filled, Label, Record, load, parsed_json, read_record, read_text
from kvmosaic.lab.eval.tasks import USUAL_TASKS, task
from kvmosaic.prompt import Document, read_documents

MAX_FILE_BYTES = 2**26
MAX_LINE_CHARACTERS = 2**20
MAX_QUESTIONS = 100_000
DEFAULT_SYSTEM = "Answer the question from the documents."
_ANSWER_TOKENS = 32
_WORD = re.compile(r"\w+")


class Library:
    """The documents of a folder, and which of them a question is about."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)
        names = [(each.id or "").removesuffix(Path(each.id or "").suffix) for each in self.documents]
        told = Counter(names)
        self._numbers = {name: number for number, name in enumerate(names) if told[name] == 1}
        self._numbers |= {each.id or "": number for number, each in enumerate(self.documents)}
        self._words = [frozenset(_words(document.text)) for document in self.documents]
        self._counts = Counter(word for words in self._words for word in words)

    @classmethod
    def read(cls, folder: Path) -> Library:
        """The files of a folder.

        Raises:
            InvalidDocument: a folder or a file that cannot be read.
        """
        return cls(read_documents(read_folder(folder), MAX_QUESTIONS))

    def number_of(self, name: str) -> int | None:
        """The number of the document with an id, which is the name of its file, with or without its ending."""
        return self._numbers.get(name)

    def about(self, question: str) -> int | None:
        """The one document that shares the rarest words with a question; None if no other word than common ones."""
        asked = {word for word in _words(question) if 0 < self._counts[word] < len(self.documents)}
        total = len(self.documents)
        scores = [sum(log(total / self._counts[word]) for word in asked & words) for words in self._words]
        best = max(scores)
        return scores.index(best) if best > 0 and scores.count(best) == 1 else None


def own_cases(
    folder: Path,
    questions: Path,
    *,
    count: int | None = None,
    documents: int = USUAL_DOCUMENTS,
    seed: int = 0,
) -> list[Case]:
    """Cases of a file of questions over a folder of documents.

    Args:
        folder: of documents, one per file.
        questions: a file with one question, or one JSON object, in each line.
        count: the maximum number of cases, the first ones of the file; None: all.
        documents: of a prompt, where a question does not name its own.
        seed: of the drawn documents and their places.

    Raises:
        InvalidDocument: a folder or a document that cannot be read.
        InvalidConfig: a file of questions that cannot be read, or a line that is no question.
    """
    library = Library.read(folder)
    cases, seen = list[Case](), dict[str, int]()
    lines = islice(_lines(questions), MAX_QUESTIONS if count is None else count)
    for number, text in lines:
        try:
            case = _case(library, text, number, questions.stem, documents, seed)
        except KVMosaicError as error:
            raise InvalidConfig(f"{questions}, line {number}: {error}") from error
        if case.id in seen:
            raise InvalidConfig(f"{questions}, line {number}: its id {case.id!r:.80} is that of line {seen[case.id]}")
        seen[case.id] = number
        cases.append(case)
    if not cases:
        raise InvalidConfig(f"{questions} has no questions; write one into each line")
    return cases


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that say something, with their numbers."""
    lines = enumerate(read_text(path, MAX_FILE_BYTES).split("\n"), start=1)
    return ((number, line.strip()) for number, line in lines if line.strip())


class _Question(Record):
    question: Filled
    id: Label | None = None
    answer: Annotated[
        list[Filled] | None,
        Field(min_length=1),
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = None
    documents: Annotated[list[Label], Field(min_length=1)] | None = None


def _case(library: Library, text: str, number: int, task: str, documents: int, seed: int) -> Case:
    if len(text) > MAX_LINE_CHARACTERS:
        raise InvalidConfig(f"it has {len(text)} characters; at most {MAX_LINE_CHARACTERS} are allowed")
    asked = read_record(_Question, parsed_json(text) if text.startswith("{") else {"question": text})
    question, name = asked.question.strip(), asked.id or f"{task}:{number}"
    if asked.documents:
        drawn = needs = list(dict.fromkeys(_named(library, each) for each in asked.documents))
    else:
        about = library.about(question)
        needs = [] if about is None else [about]
        drawn = draw_documents(needs, len(library.documents), documents, seed, name)
    return Case(
        id=name,
        task=task[:MAX_ID_CHARACTERS],
        system=DEFAULT_SYSTEM,
        documents=tuple(library.documents[each] for each in drawn),
        question=question,
        answers=tuple(asked.answer or ()),
        needs=tuple(drawn.index(each) for each in needs),
        metric="contains_any",
        answer_tokens=_ANSWER_TOKENS,
    )


def _named(library: Library, name: str) -> int:
    number = library.number_of(name)
    if number is None:
        raise InvalidConfig(f"there is no document {name!r:.80}; an id is the name of a file without its ending")
    return number


def _words(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text))


USUAL_CASES = 16
"""Default number of cases per task."""
MAX_LIST_CHARACTERS = 10_000
MAX_TASKS, MAX_FILES = 64, 64


@dataclass(frozen=True, slots=True)
class OwnQuestions:
    """A folder of documents, and a file of questions about them."""

    folder: Path
    questions: Path


def own_questions(folder: Path | None, questions: Path | None) -> OwnQuestions | None:
    """The two options that belong together.

    Raises:
        InvalidConfig: one of them without the other.
    """
    if folder is None and questions is None:
        return None
    if folder is None or questions is None:
        given, missing = ("--questions", "--documents DIR") if folder is None else ("--documents", "--questions FILE")
        raise InvalidConfig(f"{given} goes with {missing}: questions are asked over the documents of a folder")
    return OwnQuestions(folder, questions)


def gather(
    tasks: Sequence[str] = USUAL_TASKS,
    data: Sequence[Path] = (),
    *,
    count: int | None = None,
    seed: int = 0,
    form: str | None = None,
    documents: int = USUAL_DOCUMENTS,
    own: OwnQuestions | None = None,
) -> list[Case]:
    """Returns cases of tasks and files, interleaved, so that a run that ends early covers all of them.

    Args:
        tasks: names such as "one-hop" or "one-hop(3)".
        data: files of questions; see `kvmosaic.lab.eval.loaders`.
        count: cases of each task and file; None: 16 of each task, and all of a file.
        seed: the same seed draws the same cases.
        form: the format of the files; None: found by their fields.
        documents: of a prompt, where nothing says which ones belong to a question.
        own: questions over a folder of documents.

    Raises:
        InvalidConfig: an unknown task, a number outside its range, or a file that cannot be read.
    """
    if len(tasks) > MAX_TASKS or len(data) > MAX_FILES:
        raise InvalidConfig(
            f"{len(tasks)} tasks and {len(data)} files are too many for one table; give at most {MAX_TASKS} tasks and "
            f"{MAX_FILES} files"
        )
    chosen = {str(each): each for each in map(task, tasks)}
    groups = [each.cases(seed, USUAL_CASES if count is None else count) for each in chosen.values()]
    if data:
        groups += [load(path, form, count, documents=documents, seed=seed) for path in data]
    if own is not None:
        groups.append(own_cases(own.folder, own.questions, count=count, documents=documents, seed=seed))
    turns = (case for turn in zip_longest(*groups) for case in turn if case is not None)
    return list(_with_own_ids(turns))


def parts_of(name: str, text: str) -> tuple[str, ...]:
    """The parts of a list such as "none,first(8)".

    Raises:
        InvalidConfig: an empty part, or a text that is too long.
    """
    if len(text) > MAX_LIST_CHARACTERS:
        raise InvalidConfig(f"{name} has {len(text)} characters; at most {MAX_LIST_CHARACTERS} are allowed")
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise InvalidConfig(f"{name} is {text[:80]!r}, and a part of it is empty; write for example one,two")
    return parts


def _with_own_ids(cases: Iterable[Case]) -> Iterable[Case]:
    """Returns the cases; adds a number to ids that an earlier file has used."""
    seen = set[str]()
    for case in cases:
        name, number = case.id, 1
        while name in seen:
            number += 1
            name = f"{case.id[: MAX_ID_CHARACTERS - 12]} ({number})"
        seen.add(name)
        yield case if name == case.id else replace(case, id=name)
