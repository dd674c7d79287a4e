"""Placing documents in a conversation: where the chat template puts them, or between system text and question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.marks import Escape, Marks, Place
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.pieces import Piece, foreign, merged, template
from kvmosaic.prompt.wrapping import Atoms, cut_gap, unify, written


@dataclass(frozen=True, slots=True)
class Field:
    """The place of a document's text, title or id in its wrapper."""

    name: str
    escape: Escape

    def piece(self, document: Document) -> Piece:
        """The document's own text, as the template writes it."""
        return foreign(self.escape(_value(document, self.name) or ""))


Format = tuple[str | Field, ...]
"""How one document is written: the template's text and the document's fields."""


@dataclass(frozen=True, slots=True)
class Placing:
    """A conversation cut open where its documents go."""

    head: tuple[Piece, ...]
    """Everything before the documents: the system segment."""
    tail: tuple[Piece, ...]
    """Everything after them: the question segment."""
    formats: dict[tuple[str, ...], Format]
    """By the fields that a document has."""
    by_template: bool
    """Whether the template places documents, or this module does."""

    def chunk(self, document: Document) -> tuple[Piece, ...]:
        """One document as it is written at every place of every prompt."""
        fields = tuple(name for name in _FIELDS if name in self._known and _value(document, name))
        return merged(
            template(part) if isinstance(part, str) else part.piece(document) for part in self.formats[fields]
        )

    @property
    def _known(self) -> set[str]:
        return {name for fields in self.formats for name in fields}


_FIELDS = ("doc_id", "title", "text")


def place_documents(conversation: Conversation) -> Placing:
    """Finds where documents go; the answer does not depend on the documents themselves.

    A template that uses documents is rendered with marks as documents. If it shows each of them once, in order, before
    anything that a user said, its own places and wrappers are used, with two changes. A number that counts documents is
    left out: with it, a document's tokens would depend on its place. A title that the template does not show becomes
    the first line of the text. Otherwise documents go right behind the system text (or before the first message, if
    there is none), as title, text and an empty line.

    Raises:
        InvalidMessages: the template refuses the conversation, or shows none of its messages.
    """
    return _by_template(conversation) or _behind_system(conversation)


def _behind_system(conversation: Conversation) -> Placing:
    pieces = conversation.pieces()
    shown = [index for index, piece in enumerate(pieces) if piece.message is not None]
    if not shown:
        raise InvalidMessages("the chat template shows none of the messages, so documents have no place; change either")
    first = shown[0]
    cut, gap = first, template("")
    if pieces[first].message == 0 and is_system(conversation.messages[0]):
        cut, gap = first + 1, template("\n\n")
    formats: dict[tuple[str, ...], Format] = {
        ("text",): (Field("text", str), "\n\n"),
        ("title", "text"): (Field("title", str), "\n", Field("text", str), "\n\n"),
    }
    return Placing(merged((*pieces[:cut], gap)), merged(pieces[cut:]), formats, by_template=False)


def _by_template(conversation: Conversation) -> Placing | None:
    names = ("doc_id", "title", "text") if "doc_id" in conversation.template_source else ("title", "text")
    kinds = [names[start:] for start in range(len(names))]
    if "doc_id" in names:
        kinds.append(("doc_id", "text"))
    placings = []
    for fields in kinds:
        renderings = [_render_marks(conversation, fields, number) for number in (2, 3)]
        placing = _compare(fields, [rendering for rendering in renderings if rendering])
        if placing is None:
            return None
        placings.append(placing)
    first = placings[0]
    if any((placing.head, placing.tail) != (first.head, first.tail) for placing in placings):
        return None
    formats = {fields: placing.formats[fields] for fields, placing in zip(kinds, placings, strict=True)}
    return Placing(first.head, first.tail, formats, by_template=True)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A conversation rendered with marks as documents."""

    head: tuple[Piece, ...]
    tail: tuple[Piece, ...]
    fields: tuple[Field, ...]
    """In the order of the template."""
    inner: list[list[str]]
    """For each document, the template's text between its fields."""
    gaps: list[str]
    """The template's text between neighbouring documents."""


def _render_marks(conversation: Conversation, fields: tuple[str, ...], number: int) -> _Rendering | None:
    """Renders with `number` marked documents; None if their places cannot be used."""
    marks = Marks()
    items: list[Piece | Place] = []
    for piece in conversation.pieces([{name: marks.mark() for name in fields} for _ in range(number)]):
        parts = marks.split(piece.text) if piece.trusted else [piece.text]
        items += [Piece(part, piece.trusted, piece.message) if isinstance(part, str) else part for part in parts]
    places = [(index, item) for index, item in enumerate(items) if isinstance(item, Place)]
    shown = [divmod(place.index, len(fields)) for _, place in places]
    width = len(places) // number
    if not places or [document for document, _ in shown] != [i for i in range(number) for _ in range(width)]:
        return None
    found = [
        Field(fields[field], place.escape) for (_, field), (_, place) in zip(shown, places, strict=True) if place.escape
    ]
    if len({field.name for field in found[:width]} | {"text"}) != width:
        return None
    head, tail = items[: places[0][0]], items[places[-1][0] + 1 :]
    between = [items[left + 1 : right] for (left, _), (right, _) in pairwise(places)]
    if len(found) != len(places) or found != found[:width] * number or not _is_usable(conversation, head, between):
        return None
    texts = ["".join(piece.text for piece in run if isinstance(piece, Piece)) for run in between]
    if any(marks.is_in(item.text) for item in items if isinstance(item, Piece)):
        return None
    inner = [texts[start : start + width - 1] for start in range(0, len(texts) + 1, width)]
    return _Rendering(_only(head), _only(tail), tuple(found[:width]), inner, texts[width - 1 :: width])


def _is_usable(
    conversation: Conversation, head: Sequence[Piece | Place], between: Sequence[Sequence[Piece | Place]]
) -> bool:
    """Whether nothing that a user said stands before or between the documents."""
    said = [piece.message for piece in _only(head) if piece.message is not None]
    return all(is_system(conversation.messages[number]) for number in said) and all(
        piece.trusted for run in between for piece in _only(run)
    )


def _compare(fields: tuple[str, ...], renderings: list[_Rendering]) -> Placing | None:
    """What two renderings with different numbers of documents have in common; None if that is not enough."""
    if len(renderings) < 2 or renderings[0].fields != renderings[1].fields:
        return None
    gap = unify([text for rendering in renderings for text in rendering.gaps])
    rows = [row for rendering in renderings for row in rendering.inner]
    inner = [unify(list(column)) for column in zip(*rows, strict=True)]
    if gap is None or any(atoms is None for atoms in inner):
        return None
    placings = [
        _cut_open(fields, rendering, gap, [atoms for atoms in inner if atoms is not None]) for rendering in renderings
    ]
    return placings[0] if placings[0] == placings[1] else None


def _cut_open(fields: tuple[str, ...], rendering: _Rendering, gap: Atoms, inner: list[Atoms]) -> Placing:
    """Cuts the text around the documents into head, wrapper and tail."""
    before = rendering.head[-1].text if rendering.head and rendering.head[-1].trusted else ""
    after = rendering.tail[0].text if rendering.tail and rendering.tail[0].trusted else ""
    cut = cut_gap(gap, before, after)
    parts: list[str | Field] = [written(gap[cut.place :])]
    for index, field in enumerate(rendering.fields):
        if field.name == "text" and "title" in fields and "title" not in {shown.name for shown in rendering.fields}:
            field = Field("plain_text", field.escape)
        parts += [field] if index == 0 else [written(inner[index - 1]), field]
    parts.append(written(gap[: cut.place]))
    head = (*rendering.head[:-1], template(before[: cut.head_end])) if before else rendering.head
    tail = (template(after[cut.tail_start :]), *rendering.tail[1:]) if after else rendering.tail
    return Placing(merged(head), merged(tail), {fields: tuple(part for part in parts if part)}, by_template=True)


def _only(items: Sequence[Piece | Place]) -> tuple[Piece, ...]:
    return tuple(item for item in items if isinstance(item, Piece))


def _value(document: Document, name: str) -> str | None:
    return document.id if name == "doc_id" else getattr(document, name)
