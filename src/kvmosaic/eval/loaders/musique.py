"""MuSiQue: twenty paragraphs, of which two to four must be read for the answer."""

from __future__ import annotations

from kvmosaic.eval.case import Case
from kvmosaic.eval.loaders.field import JSONField
from kvmosaic.eval.loaders.origin import SHORT_ANSWER, RecordOrigin
from kvmosaic.prompt import Document

_ANSWER_TOKENS = 32


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
