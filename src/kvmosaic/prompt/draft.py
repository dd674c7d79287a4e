"""Drafts: segments of a prompt before they are tokenized, as pieces of text with their origin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmosaic.prompt.document import Document
from kvmosaic.prompt.found_documents import Part
from kvmosaic.prompt.segment import Segment, SegmentKind
from kvmosaic.prompt.text_pieces import TextPiece, joined
from kvmosaic.prompt.tokenizer import Encoded


@dataclass(frozen=True, slots=True)
class Draft:
    """A segment to tokenize."""

    kind: SegmentKind
    pieces: Sequence[TextPiece]
    name: str | None = None
    priority: float | None = None
    origin: str = ""

    def segment(self) -> Segment:
        """The segment, with its text and without tokens."""
        return Segment(self.kind, None, joined(self.pieces), self.name, priority=self.priority, origin=self.origin)


def document_draft(document: Document, pieces: Sequence[TextPiece]) -> Draft:
    """The draft of a document in its format."""
    return Draft(SegmentKind.CHUNK, pieces, document.name, document.priority)


def drafts_of(parts: Sequence[Part]) -> Iterator[Draft]:
    """Drafts of documents found in text and the texts around them, the last of which is the question."""
    for number, part in enumerate(parts, start=1):
        if found := part.found:
            yield Draft(SegmentKind.CHUNK, part.pieces, found.name, found.priority, found.origin)
        elif number == len(parts):
            yield Draft(SegmentKind.QUESTION, part.pieces)
        elif joined(part.pieces):
            yield Draft(SegmentKind.TEXT, part.pieces)


def tokens_up_to(pieces: Sequence[TextPiece], message: int | None, encoded: Encoded) -> int:
    """Number of tokens of rendered pieces that begin before the end of a message; 0 if absent or unknown."""
    places = [index for index, piece in enumerate(pieces) if message is not None and piece.message == message]
    if not places or encoded.starts is None:
        return 0
    return bisect_left(encoded.starts, len(joined(pieces[: places[-1] + 1])))
