"""Placings: a conversation split where its documents go, and the format of each document there."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.prompt.chat_template.marks import Escape
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.text_pieces import TextPiece, foreign, merged, template


@dataclass(frozen=True, slots=True)
class WrapperField:
    """The place of a document's text, title or id in its wrapper."""

    name: str
    """text, title, doc_id, or plain_text: title and text together."""
    escape: Escape

    def piece(self, document: Document) -> TextPiece:
        """The document's own text, as the template writes it."""
        return foreign(self.escape(_value(document, self.name) or ""))


Format = tuple[str | WrapperField, ...]
"""Format of one document: the template's text and the document's fields."""


@dataclass(frozen=True, slots=True)
class Placing:
    """A conversation split where its documents go."""

    head: tuple[TextPiece, ...]
    """Everything before the documents: the system segment."""
    tail: tuple[TextPiece, ...]
    """Everything after them: the question segment."""
    formats: dict[tuple[str, ...], Format]
    """Format by the fields that a document has; a field that is in none of them is not shown."""
    by_template: bool
    """Whether the template places documents, or this package does."""

    def chunk(self, document: Document) -> tuple[TextPiece, ...]:
        """One document in its format, the same at every place of every prompt."""
        known = max(self.formats, key=len)
        parts = self.formats[tuple(name for name in known if _value(document, name))]
        return merged(template(part) if isinstance(part, str) else part.piece(document) for part in parts)


def _value(document: Document, name: str) -> str | None:
    value = document.id if name == "doc_id" else getattr(document, name)
    assert value is None or isinstance(value, str)
    return value
