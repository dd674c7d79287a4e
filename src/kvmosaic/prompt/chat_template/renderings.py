"""Renderings of a conversation with marks as documents: their places, and the text around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.chat_template.marks import MarkPlace, Marks
from kvmosaic.prompt.chat_template.placements import WrapperField
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.text_pieces import TextPiece

Item = TextPiece | MarkPlace


@dataclass(frozen=True, slots=True)
class Rendering:
    """A template's text around documents whose fields are marks.

    head  field inner field  gap  field inner field  gap  ...  field inner field  tail
    """

    head: tuple[TextPiece, ...]
    tail: tuple[TextPiece, ...]
    fields: tuple[WrapperField, ...]
    """The fields that the template shows, in its order."""
    inner: list[list[str]]
    """For each document, the text between its fields."""
    gaps: list[str]
    """The text between neighbouring documents."""


def render_marks(conversation: Conversation, fields: tuple[str, ...], number: int) -> Rendering | None:
    """Renders with `number` documents that have these fields.

    None if their places cannot be used: if the template rejects such documents, if one is missing, repeated or out of
    order, if its text is not shown or changed in an unknown way, or if a user message comes before or between them.
    """
    marks = Marks()
    documents = [{name: marks.mark() for name in fields} for _ in range(number)]
    try:
        pieces = conversation.pieces(documents)
    except InvalidMessages:  # for example a template that cannot do without titles
        return None
    items: list[Item] = []
    for piece in pieces:
        parts = marks.split(piece.text) if piece.trusted else [piece.text]
        items += [TextPiece(part, piece.trusted, piece.message) if isinstance(part, str) else part for part in parts]
    places = [index for index, item in enumerate(items) if isinstance(item, MarkPlace)]
    if not places:
        return None
    shown = _shown_fields(items, fields, number)
    head, tail = _pieces(items[: places[0]]), _pieces(items[places[-1] + 1 :])
    between = [_pieces(items[left + 1 : right]) for left, right in pairwise(places)]
    said = [piece.message for piece in head if piece.message is not None]
    if (
        shown is None
        or not all(is_system(conversation.messages[message]) for message in said)
        or not all(piece.trusted for run in between for piece in run)
    ):
        return None
    texts, width = ["".join(piece.text for piece in run) for run in between], len(shown)
    inner = [texts[start : start + width - 1] for start in range(0, len(places), width)]
    return Rendering(head, tail, shown, inner, texts[width - 1 :: width])


def _shown_fields(items: Sequence[Item], fields: tuple[str, ...], number: int) -> tuple[WrapperField, ...] | None:
    """The common fields shown of every document, or None if they differ, repeat, or do not include the text."""
    places = [item for item in items if isinstance(item, MarkPlace)]
    found = [(*divmod(place.index, len(fields)), place.escape) for place in places if place.escape]
    shown = tuple(WrapperField(fields[field], escape) for document, field, escape in found if document == 0)
    alike = [(document, *place[1:]) for document in range(number) for place in found[: len(shown)]]
    names = [field.name for field in shown]
    if found != alike or len(found) != len(places) or len(set(names)) != len(names) or "text" not in names:
        return None
    return shown


def _pieces(items: Sequence[Item]) -> tuple[TextPiece, ...]:
    return tuple(item for item in items if isinstance(item, TextPiece))
