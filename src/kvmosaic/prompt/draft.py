"""Drafts: segments of a prompt before they are tokenized, as pieces of text with their origin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvmosaic.prompt.document import Document
from kvmosaic.prompt.found_documents import DocumentFinder, Part, split_at_documents
from kvmosaic.prompt.segment import Prompt, Segment, SegmentKind, document_segment
from kvmosaic.prompt.text_pieces import TextPiece, joined, template
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


def with_documents(prompt: Prompt, finder: DocumentFinder, max_documents: int) -> Prompt:
    """An ordinary prompt of text, split at the documents in it; the same prompt if there are none."""
    (plain,) = prompt.segments
    parts = split_at_documents([template(plain.text or "")], finder, max_documents)
    if len(parts) == 1:
        return prompt
    first, *others = (draft.segment() for draft in drafts_of(parts))
    if first.kind is SegmentKind.TEXT:
        first = replace(first, kind=SegmentKind.SYSTEM)
    return replace(prompt, segments=(first, *others))


def tokens_up_to(pieces: Sequence[TextPiece], message: int | None, encoded: Encoded) -> int:
    """Number of tokens of rendered pieces that begin before the end of a message; 0 if absent or unknown."""
    places = [index for index, piece in enumerate(pieces) if message is not None and piece.message == message]
    if not places or encoded.starts is None:
        return 0
    return bisect_left(encoded.starts, len(joined(pieces[: places[-1] + 1])))
