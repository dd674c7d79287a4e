"""LongBench and LongBench-E: a context, an input and the accepted answers, told apart by `dataset`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmosaic.eval.case import Case, Metric
from kvmosaic.eval.loaders.field import JSONField
from kvmosaic.eval.loaders.origin import SHORT_ANSWER, RecordOrigin
from kvmosaic.eval.loaders.passages import labelled_passages, numbered_passages, titled
from kvmosaic.prompt import Document

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
