r"""Documents that a request places in its messages, between other texts.

    message   [instructions, document, document, question]
    text      instructions \n\n  DOCUMENT \n\n  DOCUMENT \n\n  question
              glue               chunk          chunk          glue and question

The text of a document in a message is what it is elsewhere: its title, its text and an empty line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvmosaic.prompt.document import Document
from kvmosaic.prompt.found_documents import FoundDocument

ORIGIN = "placed"
_EMPTY_LINE = "\n\n"


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
            place = FoundDocument(start, start + len(text), ORIGIN, part.name, part.priority)
            places.append(place)
        texts += [gap, text]
        length, before = start + len(text), text
    content = "".join(texts)
    shift = len(content) - len(content.lstrip())
    return content, tuple(replace(each, start=each.start - shift, end=each.end - shift) for each in places)


def content_key(content: str) -> str:
    """The key of a content in `PlacedDocuments.places`."""
    return content.strip()
