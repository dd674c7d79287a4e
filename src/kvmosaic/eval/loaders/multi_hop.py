"""HotpotQA, 2WikiMultihopQA and MuSiQue: paragraphs of which two or more must be read for the answer.

Official files of HotpotQA have `context: [[title, [sentence, …]], …]` and `supporting_facts: [[title, number], …]`.
Exports of the Hugging Face hub have `{"title": […], "sentences": [[…], …]}`, a list of `{"title", "sentences"}`, or the
official form as a text of JSON.
"""

from __future__ import annotations

from kvmosaic.eval.case import Case
from kvmosaic.eval.loaders.records import SHORT_ANSWER, JSONField, RecordOrigin
from kvmosaic.prompt import Document

_ANSWER_TOKENS = 32


def read_hotpotqa(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of HotpotQA (distractor or full wiki) as a case."""
    return _read(record, origin, "hotpotqa")


def read_2wikimultihopqa(record: JSONField, origin: RecordOrigin) -> Case:
    """A record of 2WikiMultihopQA as a case."""
    return _read(record, origin, "2wikimultihopqa")


def _read(record: JSONField, origin: RecordOrigin, task: str) -> Case:
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


_MUSIQUE_ANSWER_TOKENS = 32


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
        answer_tokens=_MUSIQUE_ANSWER_TOKENS,
    )
