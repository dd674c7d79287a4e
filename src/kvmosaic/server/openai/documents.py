"""Documents in a request body: texts, and references to stored documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from kvmosaic.errors import InvalidDocument, InvalidPrompt, UnknownDocument
from kvmosaic.prompt import Document, Prompt
from kvmosaic.prompt.segment import MAX_SALT_CHARACTERS
from kvmosaic.server.documents.store import DocumentStore
from kvmosaic.server.errors import as_api_error
from kvmosaic.server.openai.fields import INTEGRAL, MAX_DOCUMENTS, MAX_NAME, Body, Name, Plain, Text
from kvmosaic.server.tenants import Tenant

DocumentPriority = Annotated[
    float,
    Field(ge=0, le=1, description="How much it should stay in a full cache: 0 leaves first, 1 last. Default: 0.5."),
]


class DocumentPart(Body):
    """A document that the answer may read, or the id of a stored one.

    `id`, `title` and `text` are what chat templates, Cohere and vLLM use. `doc_id` is another name of `id`; `metadata`
    is the caller's and never shown to the model.
    """

    id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    doc_id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    title: Name | None = None
    text: Text | None = None
    priority: DocumentPriority | None = None
    metadata: Plain | None = None


class DocumentFields(Body):
    """Documents and who may share them."""

    documents: Annotated[
        list[DocumentPart | Text] | None,
        Field(
            max_length=MAX_DOCUMENTS,
            description="Documents to answer from: texts, {id?, title?, text}, or {id} of a stored document.",
            examples=[[{"id": "ferry", "text": "The ferry goes to Oak Island."}]],
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(max_length=MAX_SALT_CHARACTERS, description="Requests with different salts share nothing in the cache."),
    ] = None


def read_documents(store: DocumentStore, tenant: Tenant, body: DocumentFields) -> tuple[Document, ...]:
    """Returns the documents of a body, with the texts of stored ones.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: no text and no id, or a text that is empty.
    """
    return tuple(_read(store, tenant, part, index) for index, part in enumerate(body.documents or ()))


def _read(store: DocumentStore, tenant: Tenant, part: DocumentPart | str, index: int) -> Document:
    if isinstance(part, str):
        part = DocumentPart(text=part)
    name = part.id if part.id is not None else part.doc_id
    name = None if name is None else str(name)
    if part.text is not None:
        try:
            return Document(part.text, part.title, name, part.priority)
        except InvalidDocument as error:
            raise InvalidDocument(f"document number {index + 1}: {error}", document=index) from None
    if name is None:
        raise InvalidDocument(
            f"document number {index + 1} has neither a text nor the id of a stored document; give one of them",
            document=index,
        )
    stored = store.resolve(tenant.name, name)
    return stored if part.priority is None else replace(stored, priority=part.priority)


@contextmanager
def told_by_place(body: DocumentFields) -> Iterator[None]:
    """Makes an error about a document of the body name its position there; those documents come before all others.

    Raises:
        ApiError: instead of such an error, with the position as `param`.
    """
    try:
        yield
    except InvalidPrompt as error:
        if error.document is None or error.document >= len(body.documents or ()):
            raise
        told = as_api_error(error)
        told.param = f"documents.{error.document}"
        raise told from error


def notes_of(store: DocumentStore, tenant: Tenant, documents: Sequence[Document], prompt: Prompt) -> dict[int, str]:
    """Returns notes on segments of a prompt, by number: texts that were probably meant as ids."""
    meant = {
        index: f'this is a text; to use the stored document write {{"id": "{document.text}"}}'
        for index, document in enumerate(documents)
        if document.name is None and _is_stored(store, tenant, document.text)
    }
    places = enumerate(segment.document for segment in prompt.segments)
    return {place: meant[index] for place, index in places if index in meant} if meant else {}


def _is_stored(store: DocumentStore, tenant: Tenant, text: str) -> bool:
    if len(text) > MAX_NAME:
        return False
    try:
        store.get(tenant.name, text)
    except UnknownDocument:
        return False
    return True
