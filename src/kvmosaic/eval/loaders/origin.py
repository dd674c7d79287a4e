"""Source of a record, and how its texts are cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvmosaic.eval.loaders.field import JSONField

SHORT_ANSWER = "Answer the question from the documents, in a few words and nothing else."
"""The system text of questions that are answered in a few words."""


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """The file of a record, its number, and the tokens of a piece."""

    path: Path
    number: int
    """Of the record, counted from 1."""
    piece_tokens: int | None = None
    """What long texts without passages are cut into; None: what the format thinks best."""

    def id_of(self, record: JSONField, *names: str) -> str:
        """The id that the record has under one of these names, or else its number."""
        return record.member(*names).label() if any(map(record.has, names)) else str(self.number)
