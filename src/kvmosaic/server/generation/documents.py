"""Documents in a request body: texts, and references to stored documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvmosaic.api.documents import DocumentFields, document_texts
from kvmosaic.api.errors import known_error
from kvmosaic.documents import DocumentStore
from kvmosaic.errors import DocumentStoreUnavailable, InvalidPrompt
from kvmosaic.prompt import Document, Prompt
from kvmosaic.prompt.document_id import MAX_ID_CHARACTERS
from kvmosaic.server.tenants import Tenant


def read_documents(store: DocumentStore, tenant: Tenant, body: DocumentFields) -> tuple[Document, ...]:
    """Returns the documents of a body, with the texts of stored ones.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: no text and no id, or a text that is empty.
    """
    return document_texts(body.documents or (), partial(store.resolve, tenant.name))


@contextmanager
def told_by_place(body: DocumentFields) -> Iterator[None]:
    """Makes an error about a document of the body name its position there; those documents come before all others.

    Raises:
        ApiError: instead of such an error, with the position as `param`.
    """
    try:
        yield
    except InvalidPrompt as error:
        told = known_error(error, body.documents)
        if told is None or told.param is None:
            raise
        raise told from error


def notes_of(store: DocumentStore, tenant: Tenant, documents: Sequence[Document], prompt: Prompt) -> dict[int, str]:
    """Returns notes on segments of a prompt, by number: texts that were probably meant as ids."""
    short = {
        index: document.text
        for index, document in enumerate(documents)
        if document.name is None and len(document.text) <= MAX_ID_CHARACTERS
    }
    stored = _stored(store, tenant, list(short.values()))
    meant = {
        index: f'this is a text; to use the stored document write {{"id": "{text}"}}'
        for index, text in short.items()
        if text in stored
    }
    places = enumerate(segment.document for segment in prompt.segments)
    return {place: meant[index] for place, index in places if index in meant} if meant else {}


def _stored(store: DocumentStore, tenant: Tenant, texts: Sequence[str]) -> set[str]:
    """Those of the texts that are ids of stored documents; none where the database does not answer."""
    try:
        return store.stored_ids(tenant.name, texts) if texts else set()
    except DocumentStoreUnavailable:  # the texts are there, so the request needs no stored document
        return set()
