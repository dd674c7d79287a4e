"""Documents in a request body: texts, and handles of stored documents."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvmosaic.errors import InvalidDocument
from kvmosaic.prompt import Document
from kvmosaic.prompt.segment import MAX_SALT_CHARACTERS
from kvmosaic.server.openai.fields import INTEGRAL, MAX_DOCUMENTS, Body, Name, Plain, Text
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant


class DocumentPart(Body):
    """A document that the answer may read, or the id of a stored one.

    `id`, `title` and `text` are what chat templates, Cohere and vLLM use. `doc_id` is another name of `id`; `metadata`
    is the caller's and never shown to the model.
    """

    id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    doc_id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    title: Name | None = None
    text: Text | None = None
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


def read_documents(services: Services, tenant: Tenant, body: DocumentFields) -> tuple[Document, ...]:
    """The documents of a body, stored ones fetched.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: no text and no id, or a text that is empty.
    """
    return tuple(_read(services, tenant, part, index) for index, part in enumerate(body.documents or ()))


def _read(services: Services, tenant: Tenant, part: DocumentPart | str, index: int) -> Document:
    if isinstance(part, str):
        part = DocumentPart(text=part)
    name = part.id if part.id is not None else part.doc_id
    name = None if name is None else str(name)
    if part.text is not None:
        return Document(part.text, part.title, name)
    if name is None:
        raise InvalidDocument(f"document {index} has neither a text nor the id of a stored document; give one of them")
    return services.documents.resolve(tenant.name, name)
