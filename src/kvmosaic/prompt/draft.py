"""Drafts: segments of a prompt before they are tokenized, as pieces of text with their origin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvmosaic.prompt.document import Document
from kvmosaic.prompt.found_documents import Part
from kvmosaic.prompt.segment import Segment, SegmentKind, document_segment
from kvmosaic.prompt.text_pieces import TextPiece, joined
from kvmosaic.prompt.tokenizer import Encoded


@dataclass(frozen=True, slots=True)
class Draft:
    """A segment to tokenize."""

    kind: SegmentKind
    pieces: Sequence[TextPiece]
    chunk: Segment | None = None
    """Of a document: its segment, but for its text in its format."""

    def segment(self) -> Segment:
        """The segment, with its text and without tokens."""
        text = joined(self.pieces)
        return replace(self.chunk, text=text) if self.chunk else Segment(self.kind, text=text)


def document_draft(document: Document, sees: tuple[int | str, ...], pieces: Sequence[TextPiece]) -> Draft:
    """The draft of a document in its format, which sees these documents."""
    return Draft(SegmentKind.CHUNK, pieces, document_segment(document, sees))


def drafts_of(parts: Sequence[Part]) -> Iterator[Draft]:
    """Drafts of documents found in text and the texts around them, the last of which is the question."""
    for number, part in enumerate(parts, start=1):
        if found := part.found:
            yield Draft(SegmentKind.CHUNK, part.pieces, found.segment(joined(part.pieces)))
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
