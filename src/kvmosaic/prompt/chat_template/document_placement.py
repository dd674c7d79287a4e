"""Document placement in a conversation: by the chat template, or between system text and question."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.chat_template.marks import Escape, MarkPlace, Marks
from kvmosaic.prompt.conversation import Conversation
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.text_pieces import TextPiece, foreign, joined, merged, template

Item = TextPiece | MarkPlace


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


_PLAIN_FORMATS: dict[tuple[str, ...], Format] = {
    ("text",): (WrapperField("text", str), "\n\n"),
    ("title", "text"): (WrapperField("title", str), "\n", WrapperField("text", str), "\n\n"),
}


def place_documents(conversation: Conversation) -> Placing:
    """Finds where documents go, independent of the documents themselves.

    A template that uses documents is rendered with marks as documents. If it shows each of them once, in order, before
    any user message, its own places and wrappers are used, with two changes. A number that counts documents is omitted:
    with it, a document's tokens would depend on its place. A title that the template does not show becomes the first
    line of the text. In later turns they stay at their place in the first turn. Otherwise documents go right after the
    system text (or before the first message, if there is none), as title, text and an empty line.

    With tools, which many templates write after the system text, they go before the content of the first message that
    is no system text, so that they see the tools.

    Raises:
        InvalidMessages: the template rejects the conversation, or shows none of its messages.
    """
    return _by_template(conversation) or _by_first_turn(conversation) or _behind_system(conversation)


def _by_first_turn(conversation: Conversation) -> Placing | None:
    """The template's document places of the first turn; None if they are gone in later turns.

    Some templates write documents into the last message, so that they would move with every turn.
    """
    first = conversation.first_turn()
    placing = None if first is None else _by_template(first)
    if placing is None:
        return None
    left, rest = joined(placing.head), list(conversation.pieces())
    while left and rest:
        piece = rest.pop(0)
        is_said = piece.message is not None and not is_system(conversation.messages[piece.message])
        if left.startswith(piece.text) and not is_said:
            left = left.removeprefix(piece.text)
        elif piece.trusted and piece.text.startswith(left):
            rest.insert(0, template(piece.text.removeprefix(left)))
            left = ""
        else:
            return None
    return None if left else replace(placing, tail=merged(rest))


def _behind_system(conversation: Conversation) -> Placing:
    pieces = conversation.pieces()
    shown = [index for index, piece in enumerate(pieces) if piece.message is not None]
    if not shown:
        raise InvalidMessages("the chat template shows none of the messages, so documents have no place; change either")
    cut, gap = shown[0], ""
    if conversation.has_tools:
        roles = [(index, conversation.messages[pieces[index].message or 0]) for index in shown]
        cut = next((index for index, message in roles if not is_system(message)), cut)
    elif pieces[cut].message == 0 and is_system(conversation.messages[0]):
        cut, gap = cut + 1, "\n\n"
    return Placing(merged((*pieces[:cut], template(gap))), merged(pieces[cut:]), _PLAIN_FORMATS, by_template=False)


def _by_template(conversation: Conversation) -> Placing | None:
    """The template's own placing, found by rendering all combinations of fields; None if they disagree."""
    kinds: list[tuple[str, ...]] = [("text",), ("title", "text")]
    if "doc_id" in conversation.template_source:
        kinds += [("doc_id", *fields) for fields in kinds]
    placings = []
    for fields in kinds:
        two = render_marks(conversation, fields, 2)
        three = render_marks(conversation, fields, 3) if two else None
        placing = _compare(fields, two, three) if two and three else None
        if placing is None:
            return None
        placings.append(placing)
    first = placings[0]
    if any((placing.head, placing.tail) != (first.head, first.tail) for placing in placings):
        return None
    formats = {fields: placing.formats[fields] for fields, placing in zip(kinds, placings, strict=True)}
    return Placing(first.head, first.tail, formats, by_template=True)


def _compare(fields: tuple[str, ...], two: Rendering, three: Rendering) -> Placing | None:
    """The common placing of renderings with two and three documents; None if they disagree."""
    if two.fields != three.fields:
        return None
    gap = unify([*two.gaps, *three.gaps])
    inner = [unify(list(column)) for column in zip(*two.inner, *three.inner, strict=True)]
    between = [atoms for atoms in inner if atoms is not None]
    if gap is None or len(between) != len(inner):
        return None
    placing = _cut_open(fields, two, gap, between)
    return placing if placing == _cut_open(fields, three, gap, between) else None


def _cut_open(fields: tuple[str, ...], rendering: Rendering, gap: Atoms, between: list[Atoms]) -> Placing:
    """Cuts the text around the documents into head, wrapper and tail."""
    head, tail = list(rendering.head), list(rendering.tail)
    before = head.pop().text if head and head[-1].trusted else ""
    after = tail.pop(0).text if tail and tail[0].trusted else ""
    cut = cut_gap(gap, before, after)
    shows_title = "title" in {field.name for field in rendering.fields}
    parts: list[str | WrapperField] = [written(gap[cut.place :])]
    for field, behind in zip(rendering.fields, [*between, gap[: cut.place]], strict=True):
        is_both = field.name == "text" and "title" in fields and not shows_title
        parts += [WrapperField("plain_text", field.escape) if is_both else field, written(behind)]
    return Placing(
        head=merged((*head, template(before[: cut.head_end]))),
        tail=merged((template(after[cut.tail_start :]), *tail)),
        formats={fields: tuple(part for part in parts if part)},
        by_template=True,
    )


NUMBER = None
"""Placeholder of a number that changes from document to document."""
Atoms = tuple[str | None, ...]
"""Text as single characters and `NUMBER`s."""


def unify(texts: Sequence[str]) -> Atoms | None:
    """The common text, if the texts differ in numbers only; otherwise None."""
    rows = [re.split(r"(\d+)", text) for text in texts]
    if len({len(row) for row in rows}) != 1:
        return None
    atoms: list[str | None] = []
    for index, column in enumerate(zip(*rows, strict=True)):
        if len(set(column)) == 1:
            atoms += column[0]
        elif index % 2:
            atoms.append(NUMBER)
        else:
            return None
    return tuple(atoms)


def written(atoms: Atoms) -> str:
    """The text without the changing numbers."""
    return "".join(atom for atom in atoms if atom is not NUMBER)


@dataclass(frozen=True, slots=True)
class GapCut:
    """Cuts of the text between two documents, and of the texts around all of them.

    head text | prefix  DOCUMENT  suffix | prefix  DOCUMENT  suffix | tail text
              ^head_end                  ^place                     ^tail_start
    """

    place: int
    """Number of atoms of the gap that belong to the document before it."""
    head_end: int
    tail_start: int


def cut_gap(gap: Atoms, before: str, after: str) -> GapCut:
    """Finds the wrapper of a single document from the gap between two and the text before and after all.

    The end of the gap that also ends `before` is written before a document, the beginning that also begins `after`
    after it. Often several cuts agree with both; then a cut right after a line break is taken, and never one inside a
    word or a tag. Text that agrees with neither is only between documents: it goes after every document, the last one
    included.
    """
    ends = _backward(gap, before)
    starts = _forward(gap, after)
    lowest, highest = len(gap) - (len(ends) - 1), len(starts) - 1
    place = _best(gap, range(lowest, (highest if lowest <= highest else len(gap)) + 1))
    return GapCut(place, ends[len(gap) - place], starts[min(place, highest)])


def _backward(gap: Atoms, text: str) -> list[int]:
    """For each number of last atoms that end the text: where in the text they begin."""
    positions = [len(text)]
    for atom in reversed(gap):
        end = positions[-1]
        if atom is NUMBER:
            start = len(text[:end].rstrip("0123456789"))
        else:
            start = end - 1 if text[:end].endswith(atom) else end
        if start == end:
            break
        positions.append(start)
    return positions


def _forward(gap: Atoms, text: str) -> list[int]:
    """For each number of first atoms that begin the text: where in the text they end."""
    positions = [0]
    for atom in gap:
        start = positions[-1]
        if atom is NUMBER:
            end = len(text) - len(text[start:].lstrip("0123456789"))
        else:
            end = start + 1 if text.startswith(atom, start) else start
        if start == end:
            break
        positions.append(end)
    return positions


def _best(gap: Atoms, places: range) -> int:
    """The most natural of several equally correct cuts."""
    text = "".join("0" if atom is NUMBER else atom for atom in gap)
    inside = {
        place
        for match in re.finditer(r"<[^<>\n]*>|\[[^\[\]\n]*\]|\w+", text)
        for place in range(match.start() + 1, match.end())
    }
    allowed = [place for place in places if place not in inside] or list(places)
    lines = [place for place in allowed if place and text[place - 1] == "\n"]
    if lines:
        return lines[-1]
    return next((place for place in allowed if place), allowed[0])
