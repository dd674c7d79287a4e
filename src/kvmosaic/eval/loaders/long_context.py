"""LongBench, RULER and SAMSum: one text per question, cut into its passages or into pieces of equal length.

RULER says its parts in one text:

question answering                        every other task
------------------                        ----------------
instruction           system              instruction           system (the first line)
Document 1: …         document            text …                one document, cut into pieces
Document 2: …         document            text …
instruction           question            question              question (the last line)
Question: …           question
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvmosaic.eval.case import MAX_ID_CHARACTERS, Case, Metric
from kvmosaic.eval.loaders.records import SHORT_ANSWER, JSONField, RecordOrigin
from kvmosaic.prompt import Document

_MAX_TITLE_CHARACTERS = 200


def numbered_passages(text: str, word: str) -> tuple[str, list[str]]:
    """Returns the text before "WORD 1:" at the start of a line, and the text after each "WORD n:", n = 1, 2, ….

    A number that is not the next one belongs to the text. Empty passages are left out.
    """
    ends: list[tuple[int, int]] = []
    for match in re.finditer(rf"^{re.escape(word)} (\d{{1,9}}):", text, re.MULTILINE):
        if int(match[1]) == len(ends) + 1:
            ends.append(match.span())
    if not ends:
        return text, []
    starts = [start for start, _ in ends[1:]] + [len(text)]
    passages = [text[end:start].strip() for (_, end), start in zip(ends, starts, strict=True)]
    return text[: ends[0][0]].strip(), [passage for passage in passages if passage]


def labelled_passages(text: str, label: str) -> list[str]:
    """The text cut before each label at the start of a line; the labels stay. Empty passages are left out."""
    passages = re.split(rf"^(?={re.escape(label)})", text, flags=re.MULTILINE)
    return [passage.strip() for passage in passages if passage.strip()]


def titled(passage: str) -> tuple[str | None, str]:
    """The first line as the title, and the rest.

    There is no title if that line is long, or if nothing or an empty line follows it.
    """
    title, _, text = passage.partition("\n")
    is_title = len(title) <= _MAX_TITLE_CHARACTERS and bool(text.partition("\n")[0].strip())
    return (title.strip(), text.strip()) if is_title else (None, passage)


_PIECE_TOKENS = 512
_EXAMPLES = "The documents are examples. Continue the last text as they do."


@dataclass(frozen=True, slots=True)
class _Set:
    """How the records of one dataset are read."""

    cut: Literal["titled", "passages", "examples", "pieces"]
    metric: Metric = "f1"
    answer_tokens: int = 32
    question: str = ""
    """Asked where the record has no input."""
    label: str = ""
    """What each example begins with."""


_SETS = {
    "hotpotqa": _Set("titled"),
    "2wikimqa": _Set("titled"),
    "musique": _Set("titled"),
    "multi_news": _Set("passages", "rouge_l", 512, "Write a summary of all the news in the documents, of one page."),
    "triviaqa": _Set("examples", label="Passage:"),
    "samsum": _Set("examples", "rouge_l", 128, label="Dialogue:"),
    "narrativeqa": _Set("pieces", answer_tokens=128),
    "qasper": _Set("pieces", answer_tokens=128),
    "multifieldqa_en": _Set("pieces", answer_tokens=64),
    "gov_report": _Set("pieces", "rouge_l", 512, "Write a summary of the report, of one page."),
    "qmsum": _Set("pieces", "rouge_l", 512),
}


def read_longbench(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of an English dataset that is scored by F1 or ROUGE-L, as a case."""
    name = record.member("dataset").filled_text()
    kind = _SETS.get(name.removesuffix("_e"))
    if kind is None:
        raise record.member("dataset").wrong(
            f"{name!r:.80} is scored in a way that is not offered here; there are {', '.join(_SETS)}"
        )
    documents = _documents(record.member("context").filled_text(), kind)
    asked = record.member("input").text() if record.has("input") else ""
    if not asked.strip() and not kind.question:
        raise record.wrong("'input' is empty; leave the record out")
    return Case(
        id=origin.id_of(record, "_id"),
        task=f"longbench-{name}",
        system=_system(kind),
        documents=documents,
        question=asked.strip() or kind.question,
        answers=record.member("answers").texts(),
        metric=kind.metric,
        answer_tokens=kind.answer_tokens,
        piece_tokens=(origin.piece_tokens or _PIECE_TOKENS) if len(documents) == 1 else None,
    )


def _documents(context: str, kind: _Set) -> tuple[Document, ...]:
    """Its passages or examples; the whole context where there are none."""
    if kind.cut == "examples":
        return tuple(map(Document, labelled_passages(context, kind.label)))
    if kind.cut == "pieces":
        return (Document(context),)
    head, passages = numbered_passages(context, "Passage")
    texts = ([head] if head else []) + passages
    if kind.cut == "titled":
        return tuple(Document(body, title) for title, body in map(titled, texts))
    return tuple(map(Document, texts))


def _system(kind: _Set) -> str | None:
    if kind.cut == "examples":
        return _EXAMPLES
    return SHORT_ANSWER if kind.metric == "f1" else None


_ANSWER_TOKENS = 128
_SHORT_ANSWER_TOKENS = 32
_SPLITS = ("validation", "test")


def read_ruler(record: JSONField, origin: RecordOrigin) -> Case:
    """A prompt of RULER as a case. What the answer is to begin with (`answer_prefix`) ends the question."""
    text = record.member("input").filled_text().strip()
    system, passages = numbered_passages(text, "Document")
    is_answering = bool(passages)
    if is_answering:
        passages[-1], question = _last_paragraphs(record, passages[-1])
        documents = tuple(Document(body, title) for title, body in map(titled, passages))
    else:
        body, question = _parted(record, *_at_last(text, "\n"))
        system, _, rest = body.partition("\n")
        system, body = (system, rest) if rest.strip() else ("", body)
        documents = (Document(body),)
    task = _task_of(origin)
    return Case(
        id=f"{task}-{origin.number}",
        task=task,
        system=system or None,
        documents=documents,
        question=question + _prefix_of(record),
        answers=record.member("outputs").texts(),
        metric="contains_any" if is_answering else "contains_all",
        answer_tokens=_SHORT_ANSWER_TOKENS if is_answering else _ANSWER_TOKENS,
        piece_tokens=None if is_answering else origin.piece_tokens or _PIECE_TOKENS,
    )


def _prefix_of(record: JSONField) -> str:
    for name in ("answer_prefix", "gen_prefix"):
        if record.has(name):
            return record.member(name).text().rstrip()
    return ""


def _task_of(origin: RecordOrigin) -> str:
    """RULER writes TASK/validation.jsonl; any other file is called by its own name."""
    path = origin.path.absolute()
    name = path.parent.name if path.stem in _SPLITS else path.stem
    name = name if name.lower().startswith("ruler") else f"ruler-{name}"
    return name[: MAX_ID_CHARACTERS // 2]


def _last_paragraphs(record: JSONField, text: str) -> tuple[str, str]:
    """Returns the last document, and the instruction and question after it."""
    before, question = _at_last(text, "\n\n")
    document, instruction = _at_last(before, "\n\n")
    return _parted(record, document, f"{instruction}\n\n{question}") if document else _parted(record, before, question)


def _at_last(text: str, border: str) -> tuple[str, str]:
    before, _, after = text.strip().rpartition(border)
    return before.strip(), after.strip()


def _parted(record: JSONField, text: str, question: str) -> tuple[str, str]:
    if not text or not question:
        raise record.member("input").wrong(
            "the question cannot be separated from the text: it must be the last line; "
            "make the file without --remove_newline_tab"
        )
    return text, question


_SAMSUM_PIECE_TOKENS = 64
"""A dialogue has about 30 to 500 tokens; uncut it would be one chunk, which loses nothing."""
_SAMSUM_ANSWER_TOKENS = 128
_SAMSUM_QUESTION = "Summarize the dialogue in one to three sentences."


def read_samsum(record: JSONField, origin: RecordOrigin) -> Case:
    """A dialogue, cut into pieces, as a case."""
    return Case(
        id=origin.id_of(record, "id"),
        task="samsum",
        documents=(Document(record.member("dialogue").filled_text()),),
        question=_SAMSUM_QUESTION,
        answers=(record.member("summary").filled_text(),),
        metric="rouge_l",
        answer_tokens=_SAMSUM_ANSWER_TOKENS,
        piece_tokens=origin.piece_tokens or _SAMSUM_PIECE_TOKENS,
    )
