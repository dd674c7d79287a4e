"""Documents in a request body: texts, and handles of stored documents."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvmosaic.prompt import Document
from kvmosaic.prompt.segment import MAX_SALT_CHARACTERS
from kvmosaic.server.openai.fields import MAX_DOCUMENTS, Body, Name, Plain, Text
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant


class DocumentPart(Body):
    """A document that the answer may read, or the id of a stored one.

    `id`, `title` and `text` are what chat templates, Cohere and vLLM use. `doc_id` is another name of `id`; `metadata`
    is the caller's and never shown to the model.
    """

    id: Name | Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    doc_id: Name | Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
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
    return tuple(_read(services, tenant, part) for part in body.documents or ())


def _read(services: Services, tenant: Tenant, part: DocumentPart | str) -> Document:
    if isinstance(part, str):
        return Document(part)
    name = part.id if part.id is not None else part.doc_id
    if part.text is None and name is not None:
        return services.documents.resolve(tenant.name, str(name))
    fields: dict[str, Any] = {"id": name, "title": part.title}
    if part.text is not None:
        fields["text"] = part.text
    return Document.read(fields)
