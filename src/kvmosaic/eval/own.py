"""The user's own questions over a folder of documents, labelled or not.

A file of questions has one question in each line, or one JSON object in each line: {"question": …} and, where they are
known, "answer" (a text or a list of them), "documents" (a list of ids) and "id". Without document ids, documents are
sampled: the one that the question is most likely about, at a random position among random others.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from math import log
from pathlib import Path

from kvmosaic.console.folder import read_folder
from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.eval.case import MAX_ID_CHARACTERS, Case
from kvmosaic.eval.distractors import USUAL_DOCUMENTS, draw_documents
from kvmosaic.eval.loaders.field import JSONField
from kvmosaic.prompt import Document

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
        self._numbers = {document.id: number for number, document in enumerate(self.documents)}
        self._words = [frozenset(_words(document.text)) for document in self.documents]
        self._counts = Counter(word for words in self._words for word in words)

    @classmethod
    def read(cls, folder: Path) -> Library:
        """The .txt and .md files of a folder.

        Raises:
            InvalidDocument: a folder or a file that cannot be read.
        """
        return cls([Document(document["text"], id=document["id"]) for document in read_folder(folder)])

    def number_of(self, name: str) -> int | None:
        """The number of the document with an id, which is the name of its file without its ending."""
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
    system: str = DEFAULT_SYSTEM,
) -> list[Case]:
    """Cases of a file of questions over a folder of documents.

    Args:
        folder: of .txt and .md files.
        questions: a file with one question, or one JSON object, in each line.
        count: the maximum number of cases, the first ones of the file; None: all.
        documents: of a prompt, where a question does not name its own.
        seed: of the drawn documents and their places.
        system: the system text of every prompt.

    Raises:
        InvalidDocument: a folder or a document that cannot be read.
        InvalidConfig: a file of questions that cannot be read, or a line that is no question.
    """
    library = Library.read(folder)
    cases, seen = list[Case](), dict[str, int]()
    lines = islice(_lines(questions), MAX_QUESTIONS if count is None else count)
    for number, text in lines:
        try:
            case = _case(library, text, number, questions.stem, documents, seed, system)
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
    try:
        if not path.is_file():
            raise InvalidConfig(f"{path} is not a file; give a file with one question in each line")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read: split it")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}; check its rights") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} is not text in UTF-8 (byte {error.start}); convert it") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _case(library: Library, text: str, number: int, task: str, documents: int, seed: int, system: str) -> Case:
    field = _field(text)
    question = field.member("question").filled_text().strip()
    name = field.member("id").label() if field.has("id") else f"{task}:{number}"
    answers = _answers(field)
    if field.has("documents"):
        drawn = needs = list(dict.fromkeys(_named(library, each) for each in field.member("documents").items()))
        if not drawn:
            raise field.wrong("its list of documents is empty; name one, or leave the field out")
    else:
        about = library.about(question)
        needs = [] if about is None else [about]
        drawn = draw_documents(needs, len(library.documents), documents, seed, name)
    return Case(
        id=name,
        task=task[:MAX_ID_CHARACTERS],
        system=system,
        documents=tuple(library.documents[each] for each in drawn),
        question=question,
        answers=answers,
        needs=tuple(drawn.index(each) for each in needs),
        metric="contains_any",
        answer_tokens=_ANSWER_TOKENS,
    )


def _field(text: str) -> JSONField:
    """The fields of a line; a line that is no JSON object is a question."""
    if len(text) > MAX_LINE_CHARACTERS:
        raise InvalidConfig(f"it has {len(text)} characters; at most {MAX_LINE_CHARACTERS} are allowed")
    if not text.startswith("{"):
        return JSONField("", {"question": text})
    try:
        return JSONField("", json.loads(text))
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"it begins as JSON and is not ({error!s:.100}); repair the line") from None


def _answers(field: JSONField) -> tuple[str, ...]:
    if not field.has("answer"):
        return ()
    answer = field.member("answer")
    return answer.texts() if isinstance(answer.value, list) else (answer.filled_text(),)


def _named(library: Library, field: JSONField) -> int:
    number = library.number_of(field.label())
    if number is None:
        raise field.wrong(f"there is no document {field.value!r:.80}; an id is the name of a file without its ending")
    return number


def _words(text: str) -> Iterator[str]:
    return (word.lower() for word in _WORD.findall(text))
