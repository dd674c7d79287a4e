"""Loaders of question files: HotpotQA, 2WikiMultihopQA, MuSiQue, SAMSum, RULER, LongBench, SQuAD.

HotpotQA, 2WikiMultihopQA and MuSiQue have paragraphs of which two or more must be read for the answer. Official files
of HotpotQA have `context: [[title, [sentence, …]], …]` and `supporting_facts: [[title, number], …]`. Exports of the
Hugging Face hub have `{"title": […], "sentences": [[…], …]}`, a list of `{"title", "sentences"}`, or the official form
as a text of JSON.

Questions of SQuAD 1.1 and XQuAD are on one paragraph each, here among other paragraphs of the same file:

    {"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": [{"text": …}, …]}, …]}]}]}
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.eval.case import (
    MAX_CASE_DOCUMENTS,
    MAX_ID_CHARACTERS,
    MAX_PIECE_TOKENS,
    USUAL_DOCUMENTS,
    Case,
    draw_documents,
)
from kvmosaic.eval.loaders.long_context import read_longbench, read_ruler, read_samsum
from kvmosaic.eval.loaders.records import SHORT_ANSWER, JSONField, Record, RecordOrigin, read_records
from kvmosaic.prompt import Document

MAX_CASES = 100_000
MAX_SQUAD_BYTES = 2**26
_SQUAD_START_BYTES = 2**12
_SQUAD_START = re.compile(r'\s*\{\s*(?:"version"\s*:\s*"[^"]{0,100}"\s*,\s*)?"data"\s*:\s*\[')
_ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of questions."""

    fields: tuple[str, ...]
    """What a record must have; a file is taken for the first format whose fields its first record has."""
    read: Callable[[JSONField, RecordOrigin], Case]


def read_hotpotqa(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of HotpotQA (distractor or full wiki) as a case."""
    return _multi_hop_case(record, origin, "hotpotqa")


def read_2wikimultihopqa(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of 2WikiMultihopQA as a case."""
    return _multi_hop_case(record, origin, "2wikimultihopqa")


def _multi_hop_case(record: JSONField, origin: RecordOrigin, task: str) -> Case:
    paragraphs = _paragraphs(record.member("context").unpacked())
    documents = tuple(_document(title, sentences) for title, sentences in paragraphs)
    return Case(
        id=origin.id_of(record, "_id", "id"),
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


def read_musique(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of MuSiQue-Answerable as a case. Questions that cannot be answered have no accepted answer."""
    if record.has("answerable") and not record.member("answerable").is_true():
        raise record.wrong("'answerable' is false, so no answer is right; take the files of MuSiQue-Answerable")
    paragraphs = record.member("paragraphs").items()
    aliases = record.member("answer_aliases").items() if record.has("answer_aliases") else []
    return Case(
        id=origin.id_of(record, "id"),
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


def is_squad(path: Path) -> bool:
    """Whether a file begins as those of SQuAD do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_SQUAD_START_BYTES).removeprefix(codecs.BOM_UTF8)
    return _SQUAD_START.match(start.decode("utf-8", errors="ignore")) is not None


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
        paragraphs, asked = _squad_questions(JSONField("", _squad_content(path)))
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


def _squad_content(path: Path) -> object:
    try:
        size = path.stat().st_size
        if size > MAX_SQUAD_BYTES:
            raise InvalidConfig(f"it has {size} bytes; at most {MAX_SQUAD_BYTES} are read: split it")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidConfig(f"it cannot be read: {error.strerror or error}; check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"it is not text in UTF-8 (byte {error.start}); unpack it if it is compressed") from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"it is not JSON: {error!s:.200}; load it again") from None


def _squad_questions(content: JSONField) -> tuple[list[str], list[_SquadQuestion]]:
    """All paragraphs, and all questions."""
    paragraphs, asked = list[str](), list[_SquadQuestion]()
    for paragraph in _squad_paragraphs(content):
        asked += [_SquadQuestion(len(paragraphs), question) for question in paragraph.member("qas").items()]
        paragraphs.append(paragraph.member("context").filled_text())
    if not asked:
        raise content.wrong("there are no questions; give a file with at least one")
    return paragraphs, asked


def _squad_paragraphs(content: JSONField) -> Iterator[JSONField]:
    for article in content.member("data").items():
        yield from article.member("paragraphs").items()


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
    "musique": Format(("paragraphs", "question", "answer"), read_musique),
    "2wikimultihopqa": Format(("context", "question", "answer", "evidences"), read_2wikimultihopqa),
    "hotpotqa": Format(("context", "question", "answer"), read_hotpotqa),
    "longbench": Format(("context", "input", "answers", "dataset"), read_longbench),
    "samsum": Format(("dialogue", "summary"), read_samsum),
    "ruler": Format(("input", "outputs"), read_ruler),
}
SQUAD: Final = ("squad", "xquad")
"""Two names of the one format whose files hold paragraphs with questions, and not records."""


def load(
    path: str | Path,
    format: str | None = None,
    limit: int | None = None,
    piece_tokens: int | None = None,
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
        piece_tokens: the length of the pieces that long texts without passages are cut into; None: as each format does.
        documents: of a prompt, where the format does not say which ones belong to a question (SQuAD).
        seed: what is drawn, where something is.

    Raises:
        InvalidConfig: a file, record or field that is not as its format says, or an argument outside its bounds.
    """
    path = Path(path)
    _check_count("limit", limit, MAX_CASES)
    _check_count("piece_tokens", piece_tokens, MAX_PIECE_TOKENS)
    _check_count("documents", documents, MAX_CASE_DOCUMENTS)
    if format is not None and format not in (*FORMATS, *SQUAD):
        raise InvalidConfig(f"there is no format {format!r:.80}; there are {', '.join((*FORMATS, *SQUAD))}")
    if format in SQUAD or (format is None and is_squad(path)):
        return load_squad(path, MAX_CASES if limit is None else limit, documents, seed)
    cases: list[Case] = []
    places: dict[str, int] = {}
    with closing(read_records(path)) as records:
        for record in records:
            if len(cases) == MAX_CASES:
                raise InvalidConfig(f"{path} has more than {MAX_CASES} records; ask for its first ones with a limit")
            format = format or _found(path, record)
            case = _read(path, record, format, piece_tokens)
            if case.id in places:
                raise _wrong(path, record, f"its id {case.id!r:.80} is that of line {places[case.id]}; remove one")
            places[case.id] = record.line
            cases.append(case)
            if len(cases) == limit:
                break
    if not cases:
        raise InvalidConfig(f"{path} has no records; give a file with at least one")
    return cases


def _found(path: Path, record: Record) -> str:
    """The name of the first format that suits."""
    fields = JSONField("", record.value)
    for name, format in FORMATS.items():
        if fields.has(*format.fields):
            return name
    named = "; ".join(f"{name}: {', '.join(format.fields)}" for name, format in FORMATS.items())
    has = ", ".join(record.value)[:200] or "none"
    raise _wrong(path, record, f"its fields ({has}) are those of no format; convert it to one of them ({named})")


def _read(path: Path, record: Record, name: str, piece_tokens: int | None) -> Case:
    format = FORMATS[name]
    try:
        return format.read(JSONField("", record.value), RecordOrigin(path, record.number, piece_tokens))
    except KVMosaicError as error:
        needed = ", ".join(format.fields)
        what = f"{error} (read as {name}, which has {needed}; another format can be named)"
        raise _wrong(path, record, what) from error


def _wrong(path: Path, record: Record, what: str) -> InvalidConfig:
    return InvalidConfig(f"{path}, line {record.line}, record {record.number}: {what}")


def _check_count(name: str, value: int | None, limit: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidConfig(f"{name} must be a whole number from 1 to {limit}, or None, got {value!r:.80}")
