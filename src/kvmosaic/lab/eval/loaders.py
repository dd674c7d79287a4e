"""Loaders of question files: HotpotQA, 2WikiMultihopQA, MuSiQue, SQuAD.

HotpotQA, 2WikiMultihopQA and MuSiQue have paragraphs of which two or more must be read for the answer. Official files
of HotpotQA have `context: [[title, [sentence, …]], …]` and `supporting_facts: [[title, number], …]`. Exports of the
Hugging Face hub have `{"title": […], "sentences": [[…], …]}`, a list of `{"title", "sentences"}`, or the official form
as a text of JSON.

Questions of SQuAD 1.1 and XQuAD are on one paragraph each, here among other paragraphs of the same file:

    {"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": [{"text": …}, …]}, …]}]}]}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvmosaic.errors import InvalidConfig, InvalidDocument, KVMosaicError, first_fault
from kvmosaic.lab.eval.case import MAX_CASE_DOCUMENTS, MAX_ID_CHARACTERS, USUAL_DOCUMENTS, Case, draw_documents
from kvmosaic.prompt import Document
from kvmosaic.prompt.separator import check_unicode

MAX_CASES = 100_000
MAX_ITEMS = 100_000
MAX_FILE_BYTES = 2**30
_ANSWER_TOKENS = 32
SHORT_ANSWER = "Answer the question from the documents, in a few words and nothing else."
"""The system text of questions that are answered in a few words."""


def _clean(text: str) -> str:
    """The text with line feeds only."""
    try:
        check_unicode(text, InvalidDocument)
    except InvalidDocument as error:
        raise ValueError(str(error)) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _filled(text: str) -> str:
    if not text.strip():
        raise ValueError("it is empty; leave the record out")
    return text


Text = Annotated[str, AfterValidator(_clean)]
Filled = Annotated[Text, AfterValidator(_filled)]
Label = Annotated[Filled, BeforeValidator(lambda value: str(value) if type(value) is int else value)]
"""A short text or a whole number, as ids are."""


class Record(BaseModel):
    """A JSON object of which the fields that are named here are read."""

    model_config = ConfigDict(strict=True, frozen=True)


Read = TypeVar("Read", bound=Record)
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS)]


def read_record(kind: type[Read], value: object) -> Read:
    """Checks the fields of a record.

    Raises:
        InvalidConfig: with the place in the record.
    """
    if not isinstance(value, dict):
        raise InvalidConfig(f"it must be an object, got {value!r:.80}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidConfig(first_fault(error.errors(include_url=False))) from None


def _rows(*names: str) -> BeforeValidator:
    """Reads rows of a table: objects, lists of their values, columns, or any of these as a text of JSON."""

    def rows(value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = parsed_json(value)
            except InvalidConfig as error:
                raise ValueError(str(error)) from None
        if isinstance(value, dict):
            columns = [value.get(name) or [] for name in names]
            if len({*map(len, columns)}) > 1:
                told = " and ".join(f"{len(column)} of {name!r}" for name, column in zip(names, columns, strict=True))
                raise ValueError(f"it has {told}; they belong together")
            value = list(zip(*columns, strict=True))
        if not isinstance(value, list):
            return value
        return [
            dict(zip(names, row, strict=True)) if isinstance(row, list | tuple) and len(row) == len(names) else row
            for row in value
        ]

    return BeforeValidator(rows)


class _Paragraph(Record):
    title: Text
    sentences: Items[Text]

    def document(self) -> Document:
        """The sentences as one text. One without sentences says its title."""
        text = " ".join(sentence.strip() for sentence in self.sentences).strip()
        return Document(text, self.title) if text else Document(self.title)


class _Fact(Record):
    title: Text


class _MultiHop(Record):
    """A record of HotpotQA (distractor or full wiki) or 2WikiMultihopQA."""

    id: Label | None = Field(None, validation_alias=AliasChoices("_id", "id"))
    question: Filled
    answer: Filled
    context: Annotated[Items[_Paragraph], _rows("title", "sentences")]
    supporting_facts: Annotated[Items[_Fact] | None, _rows("title", "sent_id")] = None

    def answers(self) -> tuple[str, ...]:
        return (self.answer,)

    def documents(self) -> tuple[Document, ...]:
        return tuple(paragraph.document() for paragraph in self.context)

    def needs(self) -> tuple[int, ...]:
        """The paragraphs with supporting facts; none where one is missing, as in the full wiki setting."""
        titles = [paragraph.title.strip() for paragraph in self.context]
        wanted = {fact.title.strip() for fact in self.supporting_facts or ()}
        return tuple(index for index, title in enumerate(titles) if title in wanted) if wanted <= set(titles) else ()


class _MusiqueParagraph(Record):
    title: Text
    paragraph_text: Filled
    is_supporting: bool | None = None


class _Musique(Record):
    """A record of MuSiQue-Answerable. Questions that cannot be answered have no accepted answer."""

    id: Label | None = None
    question: Filled
    answer: Filled
    answer_aliases: Items[Filled] | None = None
    answerable: bool | None = None
    paragraphs: Items[_MusiqueParagraph]

    def answers(self) -> tuple[str, ...]:
        if self.answerable is False:
            raise InvalidConfig("'answerable' is false, so no answer is right; take the files of MuSiQue-Answerable")
        return (self.answer, *(self.answer_aliases or ()))

    def documents(self) -> tuple[Document, ...]:
        return tuple(Document(paragraph.paragraph_text, paragraph.title) for paragraph in self.paragraphs)

    def needs(self) -> tuple[int, ...]:
        return tuple(index for index, paragraph in enumerate(self.paragraphs) if paragraph.is_supporting)


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of questions."""

    fields: tuple[str, ...]
    """What a record must have; a file is taken for the first format whose fields its first record has."""
    kind: type[_MultiHop | _Musique]


class _Answer(Record):
    text: Filled


class _Question(Record):
    id: Label
    question: Filled
    answers: Items[_Answer]


class _SquadParagraph(Record):
    context: Filled
    qas: Items[_Question]


class _Article(Record):
    paragraphs: Items[_SquadParagraph]


class _Squad(Record):
    data: Items[_Article]


def load_squad(path: Path, limit: int | None, documents: int, seed: int) -> list[Case]:
    """Questions of a file, in an order drawn from the seed, each with its paragraph among others.

    Args:
        path: a file of SQuAD 1.1 or XQuAD.
        limit: the maximum number of cases; None: all. A larger limit begins with the same ones.
        documents: paragraphs of a prompt.
        seed: of the order, of the other paragraphs and of their places.

    Raises:
        InvalidConfig: a file that cannot be read, or is not as its format says.
    """
    try:
        paragraphs = [
            paragraph
            for article in read_record(_Squad, parsed_json(read_text(path, MAX_FILE_BYTES))).data
            for paragraph in article.paragraphs
        ]
        asked = [(number, question) for number, paragraph in enumerate(paragraphs) for question in paragraph.qas]
        if not asked:
            raise InvalidConfig("there are no questions; give a file with at least one")
        Random(seed).shuffle(asked)  # noqa: S311 - an order that can be repeated, and no secret
        texts, cases = [paragraph.context for paragraph in paragraphs], dict[str, Case]()
        for number, question in asked if limit is None else asked[:limit]:
            if question.id in cases:
                raise InvalidConfig(f"its id {question.id!r:.80} is that of another question; remove one")
            cases[question.id] = _squad_case(number, question, texts, documents, seed, path.stem)
    except KVMosaicError as error:
        raise InvalidConfig(f"{path}, read as squad: {error}") from error
    return list(cases.values())


def _squad_case(number: int, asked: _Question, paragraphs: list[str], documents: int, seed: int, task: str) -> Case:
    if not asked.answers:
        raise InvalidConfig(
            f"the question {asked.id!r:.80} has no answer, as in SQuAD 2.0; take a file of SQuAD 1.1, or leave it out"
        )
    drawn = draw_documents([number], len(paragraphs), documents, seed, asked.id)
    return Case(
        id=asked.id,
        task=task[:MAX_ID_CHARACTERS],
        system=SHORT_ANSWER,
        documents=tuple(Document(paragraphs[each]) for each in drawn),
        question=asked.question.strip(),
        answers=tuple(dict.fromkeys(answer.text for answer in asked.answers)),
        needs=(drawn.index(number),),
        metric="f1",
        answer_tokens=_ANSWER_TOKENS,
    )


FORMATS: Final[dict[str, Format]] = {
    "musique": Format(("paragraphs", "question", "answer"), _Musique),
    "2wikimultihopqa": Format(("context", "question", "answer", "evidences"), _MultiHop),
    "hotpotqa": Format(("context", "question", "answer"), _MultiHop),
}
SQUAD: Final = ("squad", "xquad")
"""Two names of the one format whose files hold paragraphs with questions, and not records."""
_SQUAD_START = re.compile(r'\s*\{\s*(?:"version"\s*:\s*"[^"]{0,100}"\s*,\s*)?"data"\s*:\s*\[')


def load(
    path: str | Path,
    format: str | None = None,
    limit: int | None = None,
    *,
    documents: int = USUAL_DOCUMENTS,
    seed: int = 0,
) -> list[Case]:
    """Reads questions from a file of JSON lines, of one JSON list, or of SQuAD.

    Args:
        path: the file.
        format: one of `FORMATS` or `SQUAD`; None: found by the fields of the first record.
        limit: the maximum number of cases, the first ones of the file (of SQuAD, drawn ones); None: all of them, if
            they are at most `MAX_CASES`.
        documents: of a prompt, where the format does not say which ones belong to a question (SQuAD).
        seed: what is drawn, where something is.

    Raises:
        InvalidConfig: a file, record or field that is not as its format says, or an argument outside its bounds.
    """
    path = Path(path)
    _check_count("limit", limit, MAX_CASES)
    _check_count("documents", documents, MAX_CASE_DOCUMENTS)
    if format is not None and format not in (*FORMATS, *SQUAD):
        raise InvalidConfig(f"there is no format {format!r:.80}; there are {', '.join((*FORMATS, *SQUAD))}")
    text = read_text(path, MAX_FILE_BYTES)
    if format in SQUAD or (format is None and _SQUAD_START.match(text)):
        return load_squad(path, MAX_CASES if limit is None else limit, documents, seed)
    cases, places = list[Case](), dict[str, str]()
    for place, record in islice(_records(path, text), limit):
        try:
            if len(cases) == MAX_CASES:
                raise InvalidConfig(f"the file has more than {MAX_CASES} records; ask for its first ones with a limit")
            format = format or _found(record)
            case = _read(record, format, str(len(cases) + 1))
            if case.id in places:
                raise InvalidConfig(f"its id {case.id!r:.80} is that of {places[case.id]}; remove one")
        except KVMosaicError as error:
            raise InvalidConfig(f"{path}, {place}: {error}") from error
        places[case.id] = place
        cases.append(case)
    if not cases:
        raise InvalidConfig(f"{path} has no records; give a file with at least one")
    return cases


def read_text(path: Path, most: int) -> str:
    """The text of a file of questions, of at most so many bytes.

    Raises:
        InvalidConfig: it cannot be read.
    """
    if not path.is_file():
        raise InvalidConfig(f"{path} is not a file; give the path of a file of lines or of JSON")
    try:
        size = path.stat().st_size
        if size > most:
            raise InvalidConfig(f"{path} has {size} bytes; at most {most} are read: split it")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be read: {error.strerror or error}; check the path and its rights"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(
            f"{path} is not text in UTF-8 (byte {error.start}); unpack it if it is compressed, and write other formats "
            "as JSON lines (datasets: Dataset.to_json)"
        ) from None


def _records(path: Path, text: str) -> Iterator[tuple[str, object]]:
    """The places and values of records: of one list, or of lines, each of which is parsed when it is asked for."""
    place = ""
    try:
        if text.lstrip().startswith("["):
            for number, each in enumerate(parsed_json(text), start=1):
                yield f"record {number}", each
            return
        for number, line in enumerate(text.split("\n"), start=1):
            place = f", line {number}"
            if line.strip():
                yield place.removeprefix(", "), parsed_json(line)
    except KVMosaicError as error:
        raise InvalidConfig(f"{path}{place}: {error}") from None


def parsed_json(text: str) -> Any:
    """The value of a text of JSON.

    Raises:
        InvalidConfig: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"it is not JSON ({error!s:.100}); repair it, or load it again if it was cut off") from None


def _found(record: object) -> str:
    """The name of the first format that suits."""
    if not isinstance(record, dict):
        raise InvalidConfig(f"it must be an object, got {record!r:.80}")
    for name, format in FORMATS.items():
        if all(record.get(field) is not None for field in format.fields):
            return name
    named = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in FORMATS.items())
    has = ", ".join(record)[:200] or "none"
    raise InvalidConfig(f"its fields ({has}) are those of no format; convert it to one of them ({named})")


def _read(record: object, name: str, number: str) -> Case:
    try:
        read = read_record(FORMATS[name].kind, record)
        return Case(
            id=read.id or number,
            task=name,
            system=SHORT_ANSWER,
            documents=read.documents(),
            question=read.question,
            answers=read.answers(),
            needs=read.needs(),
            metric="f1",
            answer_tokens=_ANSWER_TOKENS,
        )
    except KVMosaicError as error:
        needed = ", ".join(FORMATS[name].fields)
        raise InvalidConfig(f"{error} (read as {name}, which has {needed}; another format can be named)") from error


def _check_count(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidConfig(f"{name} must be a whole number from 1 to {limit}, or None, got {value!r:.80}")
