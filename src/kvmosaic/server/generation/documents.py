"""Documents in a request body: texts, and references to stored documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kvmosaic.api.documents import DocumentFields, document_texts
from kvmosaic.api.errors import known_error
from kvmosaic.api.fields import MAX_NAME
from kvmosaic.documents import DocumentStore
from kvmosaic.errors import InvalidPrompt, UnknownDocument
from kvmosaic.prompt import Document, Prompt
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
