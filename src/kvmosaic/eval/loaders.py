"""Loaders of question files: HotpotQA, 2WikiMultihopQA, MuSiQue, SQuAD; and JSON fields that check what they are.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from kvmosaic.errors import InvalidConfig, InvalidDocument, KVMosaicError
from kvmosaic.eval.case import MAX_CASE_DOCUMENTS, MAX_ID_CHARACTERS, USUAL_DOCUMENTS, Case, draw_documents
from kvmosaic.prompt import Document
from kvmosaic.prompt.separator import check_unicode

MAX_CASES = 100_000
MAX_ITEMS = 100_000
MAX_FILE_BYTES = 2**30
_ANSWER_TOKENS = 32
SHORT_ANSWER = "Answer the question from the documents, in a few words and nothing else."
"""The system text of questions that are answered in a few words."""


@dataclass(frozen=True, slots=True)
class JSONField:
    """A value inside a record. Everything it is asked for is checked.

    Raises:
        InvalidConfig: from every method, where the value is not what is asked for; the message begins with its name.
    """

    name: str
    """Its path: `context[3].title`; empty for the record itself."""
    value: object

    def member(self, *names: str) -> JSONField:
        """The first of these members of an object that is there."""
        members = self.members()
        for name in names:
            if members.get(name) is not None:
                return JSONField(f"{self.name}.{name}" if self.name else name, members[name])
        raise self.wrong(f"there is no {' or '.join(map(repr, names))}")

    def has(self, *names: str) -> bool:
        """Whether all of these members are there, with a value."""
        return all(self.members().get(name) is not None for name in names)

    def items(self) -> list[JSONField]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.wrong(f"it must be a list, got {self.value!r:.80}")
        if len(self.value) > MAX_ITEMS:
            raise self.wrong(f"it has {len(self.value)} items; at most {MAX_ITEMS} are allowed")
        return [JSONField(f"{self.name}[{index}]", item) for index, item in enumerate(self.value)]

    def pair(self) -> tuple[JSONField, JSONField]:
        """The items of a list of two."""
        items = self.items()
        if len(items) != 2:
            raise self.wrong(f"it must have 2 items, got {len(items)}")
        return items[0], items[1]

    def text(self) -> str:
        """A text; it may be empty. Lines end with a line feed only."""
        if not isinstance(self.value, str):
            raise self.wrong(f"it must be a text, got {self.value!r:.80}")
        try:
            check_unicode(self.value, InvalidDocument)
        except InvalidDocument as error:
            raise self.wrong(str(error)) from None
        return self.value.replace("\r\n", "\n").replace("\r", "\n")

    def filled_text(self) -> str:
        """A text that says something."""
        text = self.text()
        if not text.strip():
            raise self.wrong("it is empty; leave the record out")
        return text

    def texts(self) -> tuple[str, ...]:
        """A list of texts that say something, at least one of them."""
        texts = tuple(item.filled_text() for item in self.items())
        if not texts:
            raise self.wrong("it is empty; leave the record out")
        return texts

    def label(self) -> str:
        """A short text or a whole number, as ids are."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.filled_text()

    def is_true(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong(f"it must be true or false, got {self.value!r:.80}")
        return self.value

    def unpacked(self) -> JSONField:
        """The value that a text holds as JSON, as in tables whose cells cannot hold lists; any other value itself."""
        if not isinstance(self.value, str):
            return self
        try:
            return JSONField(self.name, parsed_json(self.value))
        except InvalidConfig as error:
            raise self.wrong(str(error)) from None

    def wrong(self, what: str) -> InvalidConfig:
        """An error about this value."""
        return InvalidConfig(f"{self.name}: {what}" if self.name else what)

    def members(self) -> dict[str, object]:
        """The members of an object."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"it must be an object, got {self.value!r:.80}")
        return self.value


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of questions."""

    fields: tuple[str, ...]
    """What a record must have; a file is taken for the first format whose fields its first record has."""
    read: Callable[[JSONField, str], Case]


def _read_multi_hop(record: JSONField, name: str, *, task: str) -> Case:
    """A record of HotpotQA (distractor or full wiki) or 2WikiMultihopQA as a case."""
    paragraphs = _paragraphs(record.member("context").unpacked())
    documents = tuple(_document(title, sentences) for title, sentences in paragraphs)
    return Case(
        id=record.member("_id", "id").label() if record.has("_id") or record.has("id") else name,
        task=task,
        system=SHORT_ANSWER,
        documents=documents,
        question=record.member("question").filled_text(),
        answers=(record.member("answer").filled_text(),),
        needs=_needs(record, [title.text().strip() for title, _ in paragraphs]),
        metric="f1",
        answer_tokens=_ANSWER_TOKENS,
    )


def _paragraphs(context: JSONField) -> list[tuple[JSONField, JSONField]]:
    """Title and sentences of each paragraph."""
    if isinstance(context.value, dict):
        return _zipped(context, "title", "sentences")
    return [
        (item.member("title"), item.member("sentences")) if isinstance(item.value, dict) else item.pair()
        for item in context.items()
    ]


def _zipped(columns: JSONField, one: str, other: str) -> list[tuple[JSONField, JSONField]]:
    left, right = columns.member(one).items(), columns.member(other).items()
    if len(left) != len(right):
        raise columns.wrong(f"it has {len(left)} of {one!r} and {len(right)} of {other!r}; they belong together")
    return list(zip(left, right, strict=True))


def _document(title: JSONField, sentences: JSONField) -> Document:
    """The sentences of a paragraph as one text. One without sentences says its title."""
    text = " ".join(sentence.text().strip() for sentence in sentences.items()).strip()
    return Document(text, title.text()) if text else Document(title.filled_text())


def _needs(record: JSONField, titles: list[str]) -> tuple[int, ...]:
    """The paragraphs with supporting facts; none where one is missing, as in the full wiki setting."""
    if not record.has("supporting_facts"):
        return ()
    facts = record.member("supporting_facts").unpacked()
    pairs = _zipped(facts, "title", "sent_id") if isinstance(facts.value, dict) else [f.pair() for f in facts.items()]
    wanted = {title.text().strip() for title, _ in pairs}
    if not wanted <= set(titles):
        return ()
    return tuple(index for index, title in enumerate(titles) if title in wanted)


def _read_musique(record: JSONField, name: str) -> Case:
    """A record of MuSiQue-Answerable as a case. Questions that cannot be answered have no accepted answer."""
    if record.has("answerable") and not record.member("answerable").is_true():
        raise record.wrong("'answerable' is false, so no answer is right; take the files of MuSiQue-Answerable")
    paragraphs = record.member("paragraphs").items()
    aliases = record.member("answer_aliases").items() if record.has("answer_aliases") else []
    return Case(
        id=record.member("id").label() if record.has("id") else name,
        task="musique",
        system=SHORT_ANSWER,
        documents=tuple(
            Document(paragraph.member("paragraph_text").filled_text(), paragraph.member("title").text())
            for paragraph in paragraphs
        ),
        question=record.member("question").filled_text(),
        answers=(record.member("answer").filled_text(), *(alias.filled_text() for alias in aliases)),
        needs=tuple(
            index
            for index, paragraph in enumerate(paragraphs)
            if paragraph.has("is_supporting") and paragraph.member("is_supporting").is_true()
        ),
        metric="f1",
        answer_tokens=_ANSWER_TOKENS,
    )


@dataclass(frozen=True, slots=True)
class _SquadQuestion:
    """One question of a file."""

    paragraph: int
    field: JSONField


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
        paragraphs, asked = _squad_questions(JSONField("", parsed_json(_text(path))))
        Random(seed).shuffle(asked)  # noqa: S311 - an order that can be repeated, and no secret
        cases, seen = [], set[str]()
        for question in asked if limit is None else asked[:limit]:
            case = _squad_case(question, paragraphs, documents, seed, path.stem)
            if case.id in seen:
                raise question.field.wrong(f"its id {case.id!r:.80} is that of another question; remove one")
            seen.add(case.id)
            cases.append(case)
    except KVMosaicError as error:
        raise InvalidConfig(f"{path}, read as squad: {error}") from error
    return cases


def _squad_questions(content: JSONField) -> tuple[list[str], list[_SquadQuestion]]:
    """All paragraphs, and all questions."""
    paragraphs, asked = list[str](), list[_SquadQuestion]()
    for paragraph in (
        each for article in content.member("data").items() for each in article.member("paragraphs").items()
    ):
        asked += [_SquadQuestion(len(paragraphs), question) for question in paragraph.member("qas").items()]
        paragraphs.append(paragraph.member("context").filled_text())
    if not asked:
        raise content.wrong("there are no questions; give a file with at least one")
    return paragraphs, asked


def _squad_case(asked: _SquadQuestion, paragraphs: list[str], documents: int, seed: int, task: str) -> Case:
    field = asked.field
    answers = [answer.member("text").filled_text() for answer in field.member("answers").items()]
    if not answers:
        raise field.wrong("it has no answer, as in SQuAD 2.0; take a file of SQuAD 1.1, or leave the question out")
    name = field.member("id").label()
    drawn = draw_documents([asked.paragraph], len(paragraphs), documents, seed, name)
    return Case(
        id=name,
        task=task[:MAX_ID_CHARACTERS],
        system=SHORT_ANSWER,
        documents=tuple(Document(paragraphs[number]) for number in drawn),
        question=field.member("question").filled_text().strip(),
        answers=tuple(dict.fromkeys(answers)),
        needs=(drawn.index(asked.paragraph),),
        metric="f1",
        answer_tokens=_ANSWER_TOKENS,
    )


FORMATS: Final[dict[str, Format]] = {
    "musique": Format(("paragraphs", "question", "answer"), _read_musique),
    "2wikimultihopqa": Format(
        ("context", "question", "answer", "evidences"), partial(_read_multi_hop, task="2wikimultihopqa")
    ),
    "hotpotqa": Format(("context", "question", "answer"), partial(_read_multi_hop, task="hotpotqa")),
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
    text = _text(path)
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


def _text(path: Path) -> str:
    if not path.is_file():
        raise InvalidConfig(f"{path} is not a file; give the path of a .jsonl or .json file")
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read: split it")
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


def _records(path: Path, text: str) -> Iterator[tuple[str, JSONField]]:
    """The places and values of records: of one list, or of lines, each of which is parsed when it is asked for."""
    place = ""
    try:
        if text.lstrip().startswith("["):
            for number, each in enumerate(JSONField("", parsed_json(text)).items(), start=1):
                yield f"record {number}", JSONField("", each.value)
            return
        for number, line in enumerate(text.split("\n"), start=1):
            place = f", line {number}"
            if line.strip():
                yield place.removeprefix(", "), JSONField("", parsed_json(line))
    except KVMosaicError as error:
        raise InvalidConfig(f"{path}{place}: {error}") from None


def parsed_json(text: str) -> object:
    """The value of a text of JSON.

    Raises:
        InvalidConfig: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"it is not JSON ({error!s:.100}); repair it, or load it again if it was cut off") from None


def _found(record: JSONField) -> str:
    """The name of the first format that suits."""
    for name, format in FORMATS.items():
        if record.has(*format.fields):
            return name
    named = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in FORMATS.items())
    has = ", ".join(record.members())[:200] or "none"
    raise InvalidConfig(f"its fields ({has}) are those of no format; convert it to one of them ({named})")


def _read(record: JSONField, name: str, number: str) -> Case:
    try:
        return FORMATS[name].read(record, number)
    except KVMosaicError as error:
        needed = ", ".join(FORMATS[name].fields)
        raise InvalidConfig(f"{error} (read as {name}, which has {needed}; another format can be named)") from error


def _check_count(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidConfig(f"{name} must be a whole number from 1 to {limit}, or None, got {value!r:.80}")
