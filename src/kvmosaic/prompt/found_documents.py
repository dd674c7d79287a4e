r"""Documents found in text: where a message holds documents that the application pasted into it.

    message   Context:\n<source id="1">  DOCUMENT  </source>\n<source id="2">  DOCUMENT  </source>\nHow high is it?
              glue                       chunk     glue                        chunk     glue and question

What is found becomes a chunk. Everything between is glue: computed with the request, and seeing everything before it.
Numbers, names and tags around a document change with its place, so they are never part of the chunk.

In the history of an agent, the result of a tool is a document, and so is a long block that a user has pasted. What the
user and the model said is text between them, which sees everything before it: when a turn is dropped or moved, only
this text is computed again.

And documents that a request places in its messages, between other texts:

    message   [instructions, document, document, question]
    text      instructions \n\n  DOCUMENT \n\n  DOCUMENT \n\n  question
              glue               chunk          chunk          glue and question

The text of a document in a message is what it is elsewhere: its title, its text and an empty line.

All of them are drafts of segments, pieces of text with their origin, until they are tokenized.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvmosaic.container import check_cpu
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import is_system, is_tool_result
from kvmosaic.prompt.segment import PLACED, Prompt, Segment, SegmentKind
from kvmosaic.prompt.text_pieces import TextPiece, foreign, joined, template
from kvmosaic.prompt.tokenizer import Encoded

_EMPTY_LINE = "\n\n"
MAX_ASKING_TOKENS = 512


@dataclass(frozen=True, slots=True)
class PlacedDocuments:
    """Where documents are in the contents of messages; finds them in what a chat template writes.

    A template may strip a content. If it edits one in another way, its documents are read as text.
    """

    places: Mapping[str, tuple[FoundDocument, ...]] = field(default_factory=dict)
    """By the content without white space at its ends."""

    def find(self, text: str) -> list[FoundDocument]:
        """The documents in the content of a message, in order."""
        if not self.places or not (found := self.places.get(text.strip())):
            return []
        start = len(text) - len(text.lstrip())
        moved = (replace(each, start=start + each.start, end=min(start + each.end, len(text))) for each in found)
        return list(moved)


def placed_content(parts: Iterable[str | Document]) -> tuple[str, tuple[FoundDocument, ...]]:
    """Joins texts and documents of a message.

    Returns:
        The content, and where its documents are in it. Texts are joined by line breaks, as elsewhere.
    """
    texts, places, length, before = list[str](), list[FoundDocument](), 0, ""
    for part in parts:
        is_document = isinstance(part, Document)
        text = part.plain_text + _EMPTY_LINE if isinstance(part, Document) else part
        if not text:
            continue
        gap = ""
        if before and not before.endswith(_EMPTY_LINE):
            gap = _EMPTY_LINE if is_document else "\n"
        start = length + len(gap)
        if isinstance(part, Document):
            place = FoundDocument(start, start + len(text), PLACED, part.name, part.priority)
            places.append(place)
        texts += [gap, text]
        length, before = start + len(text), text
    content = "".join(texts)
    shift = len(content) - len(content.lstrip())
    return content, tuple(replace(each, start=each.start - shift, end=each.end - shift) for each in places)


def content_key(content: str) -> str:
    """The key of a content in `PlacedDocuments.places`."""
    return content.strip()


MIN_FOUND_CHARACTERS = 32
"""Minimum length of a found document: a shorter one stays glue, since its tokens would hardly fill a block."""
MAX_FOUND_DOCUMENTS = 256
"""Maximum documents found in one prompt; later ones stay glue. Arranging them takes quadratic time: 50 ms for 256."""
MAX_SEARCHED_CHARACTERS = 2**22
"""Longer texts are not searched: each of a dozen expressions would keep all other threads waiting, 0.2 s for 15 MB."""
MIN_RESULT_CHARACTERS = 256
"""Minimum length of a tool's result that is a document."""
MIN_PASTED_CHARACTERS = 1_000
"""Minimum length of a block in a user's message that is a document, if no pattern finds it."""
TOOL_RESULT, PASTED = "tool result", "pasted block"
"""Origins of documents in the history of an agent."""


def is_of_agent(document: Segment | FoundDocument) -> bool:
    """Whether it is a document in an agent's history: a long one is divided, so that an edit costs a part."""
    return document.origin in (TOOL_RESULT, PASTED)


def is_first_question(prompt: Prompt) -> bool:
    """Whether a prompt ends in a question of at most 512 tokens, without tools, earlier turns or results of tools."""
    said = (part.history_tokens or is_of_agent(part) for part in prompt.segments)
    return prompt.segments[-1].num_tokens <= MAX_ASKING_TOKENS and not (prompt.has_tools or any(said))


@dataclass(frozen=True, slots=True)
class FoundDocument:
    """A document in a text."""

    start: int
    end: int
    origin: str
    """How it was found, for reports: "pattern open-webui", "stored"."""
    name: str | None = None
    """Its name for users: a stored document's label, or a name that the text itself says."""
    priority: float | None = None
    """Eviction priority of a stored document."""

    def stripped(self, text: str) -> FoundDocument:
        """The same document without white space at its ends."""
        said = text[self.start : self.end]
        start = self.start + len(said) - len(said.lstrip())
        return replace(self, start=start, end=start + len(said.strip()))

    def segment(self, text: str) -> Segment:
        """The chunk with this text."""
        return Segment(SegmentKind.CHUNK, text=text, name=self.name, priority=self.priority, origin=self.origin)


class TextSearch(Protocol):
    """A way of finding documents in a text, in time linear in its length."""

    def find(self, text: str) -> Iterable[FoundDocument]:
        """The documents in a text, in order, without overlap."""


@dataclass(frozen=True, slots=True)
class DocumentFinder:
    """Several ways of finding documents; where two overlap, the earlier way wins."""

    searches: tuple[TextSearch, ...]
    placed: TextSearch | None = None
    """Finds what the request placed there, which counts first, whatever its length."""
    is_for_chats: bool = False
    """Whether it searches conversations only."""
    pasted: TextSearch | None = None
    """Finds blocks that a user has pasted. With it, results of tools are documents, too."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that it could find."""
        return not self.searches and self.placed is None and self.pasted is None

    def only_placed(self) -> DocumentFinder:
        """The finder of what the request placed in its messages."""
        return replace(self, searches=(), pasted=None)

    def find(self, text: str, message: Mapping[str, Any] | None = None) -> list[FoundDocument]:
        """The documents in a text, in order and without overlap; found ones without white space at their ends.

        Args:
            text: the text.
            message: the message that it belongs to, if any.
        """
        kept = [] if self.placed is None else list(self.placed.find(text))
        if len(text) > MAX_SEARCHED_CHARACTERS:
            return kept
        for search in self.searches:
            kept = _merged(kept, _long_enough(search, text, MIN_FOUND_CHARACTERS))
        if self.pasted is None or message is None:
            return kept
        if is_tool_result(message):
            whole = FoundDocument(0, len(text), TOOL_RESULT).stripped(text)
            return kept or [whole] * (whole.end - whole.start >= MIN_RESULT_CHARACTERS)
        if message["role"] == "user":
            kept = _merged(kept, _long_enough(self.pasted, text, MIN_PASTED_CHARACTERS))
        return kept


def _long_enough(search: TextSearch, text: str, min_characters: int) -> list[FoundDocument]:
    found = (each.stripped(text) for each in search.find(text))
    return [each for each in found if each.end - each.start >= min_characters]


def _merged(first: Sequence[FoundDocument], second: Sequence[FoundDocument]) -> list[FoundDocument]:
    """Both in order; what overlaps one of the first is left out."""
    result, left, end = list[FoundDocument](), list(reversed(first)), 0
    for each in second:
        while left and left[-1].start < each.end:
            result.append(left.pop())
            end = result[-1].end
        if each.start >= end:
            result.append(each)
    return result + left[::-1]


@dataclass(frozen=True, slots=True)
class Part:
    """A run of a rendered prompt: the pieces of a document, or (`found` is None) those of the text around it."""

    pieces: tuple[TextPiece, ...]
    found: FoundDocument | None = None


def split_at_documents(
    pieces: Sequence[TextPiece],
    finder: DocumentFinder,
    max_documents: int,
    messages: Sequence[Mapping[str, Any]] = (),
) -> list[Part]:
    """Splits a rendered prompt at the documents in its messages.

    Args:
        pieces: the rendered prompt; only contents of messages are searched, or, if it has no messages, all of it.
        finder: finds documents in a text.
        max_documents: further ones stay glue.
        messages: the conversation that was rendered.

    Returns:
        Parts in order; a single one if nothing was found. The last part is never a document: a prompt ends with text.
    """
    has_messages = any(piece.message is not None for piece in pieces)
    parts, glue, left = list[Part](), list[TextPiece](), min(max_documents, MAX_FOUND_DOCUMENTS)
    for piece in pieces:
        check_cpu()
        place = 0
        owner = None if piece.message is None or not messages else messages[piece.message]
        found = finder.find(piece.text, owner) if left and (piece.message is not None or not has_messages) else []
        for document in found[:left]:
            glue += _cut(piece, place, document.start)
            parts += [Part(tuple(glue))] if glue else []
            parts.append(Part(tuple(_cut(replace(piece, trusted=False), document.start, document.end)), document))
            glue, place = [], document.end
        left -= min(len(found), left)
        glue += _cut(piece, place, len(piece.text))
    if any(piece.text for piece in glue):
        return [*parts, Part(tuple(glue))]
    return [*parts[:-2], Part(sum((part.pieces for part in parts[-2:]), ()))]


def with_texts(parts: Sequence[Part], numbers: Container[int]) -> list[Part]:
    """The same parts, with the documents of these numbers, counted from 0, as text."""
    count, result = 0, list[Part]()
    for part in parts:
        is_text = part.found is None or count in numbers
        count += part.found is not None
        if is_text and result and result[-1].found is None:
            result[-1] = Part(result[-1].pieces + part.pieces)
        else:
            result.append(replace(part, found=None) if is_text else part)
    return result


def found_parts(pieces: Sequence[TextPiece], documents: Iterable[Document]) -> list[Part]:
    """The parts of a rendered prompt as if these documents were found at the beginning of its last message."""
    last = max(piece.message for piece in pieces if piece.message is not None)
    place = next(index for index, piece in enumerate(pieces) if piece.message == last)
    found = [
        Part((foreign(each.text),), FoundDocument(0, len(each.text), "warmed", each.name, each.priority))
        for each in documents
    ]
    return [Part(tuple(pieces[:place])), *found, Part(tuple(pieces[place:]))]


def said_before(conversation: Conversation, head: Sequence[TextPiece]) -> int:
    """Where the first message that is no system text begins in the joined text before the first document."""
    place = 0
    for piece in head:
        if piece.message is not None and not is_system(conversation.messages[piece.message]):
            return place
        place += len(piece.text)
    return place


def _cut(piece: TextPiece, start: int, end: int) -> Iterator[TextPiece]:
    if start < end or (not piece.text and piece.message is not None):
        yield replace(piece, text=piece.text[start:end])


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
