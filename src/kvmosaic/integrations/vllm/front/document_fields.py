"""Documents in request bodies: texts, objects, and handles of stored documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvmosaic.errors import InvalidDocument
from kvmosaic.prompt import Document

KEYS = ("id", "doc_id", "title", "text", "priority", "metadata")
Resolve = Callable[[str], Document]
"""Returns the stored document of an id; raises UnknownDocument."""


def read_documents(value: Any, resolve: Resolve, most: int) -> tuple[Document, ...]:
    """Reads the documents of a body, and fetches stored ones.

    Raises:
        InvalidDocument: not a list, more than `most`, or an entry that is not a document.
        UnknownDocument: an id that is not stored.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InvalidDocument(f"documents must be a list, got {value!r:.80}; send texts or objects in a list")
    if len(value) > most:
        raise InvalidDocument(f"{len(value)} documents in one request; at most {most} are allowed: send fewer")
    return tuple(_read(entry, index, resolve) for index, entry in enumerate(value))


def _read(entry: Any, index: int, resolve: Resolve) -> Document:
    try:
        if isinstance(entry, str):
            return Document(entry)
        if not isinstance(entry, Mapping):
            raise InvalidDocument(f'it is {entry!r:.80}; send a text, {{"id", "title", "text"}} or {{"id"}}')
        if unknown := next((key for key in entry if key not in KEYS), None):
            raise InvalidDocument(f"it has no field {unknown!r:.80}; its fields are {', '.join(KEYS)}")
        name: Any = entry.get("id") if entry.get("id") is not None else entry.get("doc_id")
        name = str(name) if type(name) is int else name
        if entry.get("text") is not None:
            return Document(entry["text"], entry.get("title"), name, entry.get("priority"))
        if not isinstance(name, str):
            raise InvalidDocument("it has neither a text nor the id of a stored document; give one of them")
    except InvalidDocument as error:
        raise InvalidDocument(f"document number {index + 1}: {error}", document=index) from None
    return resolve(name)
