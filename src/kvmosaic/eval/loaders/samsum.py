"""SAMSum: short dialogues and their summaries."""

from __future__ import annotations

from kvmosaic.eval.case import Case
from kvmosaic.eval.loaders.field import JSONField
from kvmosaic.eval.loaders.origin import RecordOrigin
from kvmosaic.prompt import Document

_PIECE_TOKENS = 64
"""A dialogue has about 30 to 500 tokens; uncut it would be one chunk, which loses nothing."""
_ANSWER_TOKENS = 128
_QUESTION = "Summarize the dialogue in one to three sentences."


def read_samsum(record: JSONField, origin: RecordOrigin) -> Case:
    """A dialogue, cut into pieces, as a case."""
    return Case(
        id=origin.id_of(record, "id"),
        task="samsum",
        documents=(Document(record.member("dialogue").filled_text()),),
        question=_QUESTION,
        answers=(record.member("summary").filled_text(),),
        metric="rouge_l",
        answer_tokens=_ANSWER_TOKENS,
        piece_tokens=origin.piece_tokens or _PIECE_TOKENS,
    )
