"""SQuAD 1.1 and XQuAD: questions on one paragraph each, here among other paragraphs of the same file.

{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": [{"text": …}, …]}, …]}]}]}
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvmosaic.errors import InvalidConfig, KVMosaicError
from kvmosaic.eval.case import MAX_ID_CHARACTERS, Case, draw_documents
from kvmosaic.eval.loaders.records import SHORT_ANSWER, JSONField
from kvmosaic.prompt import Document

MAX_FILE_BYTES = 2**26
_ANSWER_TOKENS = 32
_START_BYTES = 2**12
_START = re.compile(r'\s*\{\s*(?:"version"\s*:\s*"[^"]{0,100}"\s*,\s*)?"data"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question of a file."""

    paragraph: int
    field: JSONField


def is_squad(path: Path) -> bool:
    """Whether a file begins as those of SQuAD do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_START_BYTES).removeprefix(codecs.BOM_UTF8)
    return _START.match(start.decode("utf-8", errors="ignore")) is not None


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
        paragraphs, asked = _read(JSONField("", _content(path)))
        Random(seed).shuffle(asked)  # noqa: S311 - an order that can be repeated, and no secret
        cases, seen = [], set[str]()
        for question in asked if limit is None else asked[:limit]:
            case = _case(question, paragraphs, documents, seed, path.stem)
            if case.id in seen:
                raise question.field.wrong(f"its id {case.id!r:.80} is that of another question; remove one")
            seen.add(case.id)
            cases.append(case)
    except KVMosaicError as error:
        raise InvalidConfig(f"{path}, read as squad: {error}") from error
    return cases


def _content(path: Path) -> object:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidConfig(f"it has {size} bytes; at most {MAX_FILE_BYTES} are read: split it")
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidConfig(f"it cannot be read: {error.strerror or error}; check the path and its rights") from None
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"it is not text in UTF-8 (byte {error.start}); unpack it if it is compressed") from None
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(f"it is not JSON: {error!s:.200}; load it again") from None


def _read(content: JSONField) -> tuple[list[str], list[_Asked]]:
    """All paragraphs, and all questions."""
    paragraphs, asked = list[str](), list[_Asked]()
    for paragraph in _paragraphs(content):
        asked += [_Asked(len(paragraphs), question) for question in paragraph.member("qas").items()]
        paragraphs.append(paragraph.member("context").filled_text())
    if not asked:
        raise content.wrong("there are no questions; give a file with at least one")
    return paragraphs, asked


def _paragraphs(content: JSONField) -> Iterator[JSONField]:
    for article in content.member("data").items():
        yield from article.member("paragraphs").items()


def _case(asked: _Asked, paragraphs: list[str], documents: int, seed: int, task: str) -> Case:
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
