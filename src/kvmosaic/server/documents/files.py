"""Routes of /v1/files: OpenAI's way to upload a file, which becomes a stored document; and its routes not served."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import PlainTextResponse
from starlette.datastructures import FormData, UploadFile

from kvmosaic.api.documents import MAX_LIST
from kvmosaic.api.files import FILE_PREFIX, DeletedFile, FileList, FileObject, Purpose, is_file
from kvmosaic.documents import DocumentStore, StoredDocument
from kvmosaic.documents.store import Order
from kvmosaic.errors import UnknownDocument
from kvmosaic.prompt.document_id import ID_PATTERN, MAX_ID_CHARACTERS
from kvmosaic.server.documents.cached import drop_superseded
from kvmosaic.server.documents.uploads import FORM, file_draft, file_text
from kvmosaic.server.errors import ApiError
from kvmosaic.server.openai.replies import error_replies
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

ROUTE = "/v1/files"
MAX_EXPIRY_FIELDS = 8
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_SECONDS, MAX_SECONDS = 3_600, 2_592_000
"""Of `expires_after`, as in OpenAI's API."""
Asker = Annotated[Tenant, Depends(current_tenant)]
FileId = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARACTERS, pattern=ID_PATTERN)]
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"enum": list(get_args(Purpose))},
                        SECONDS: {"type": "integer", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
                        ANCHOR: {"enum": ["created_at"]},
                    },
                    "additionalProperties": False,
                }
            }
        },
    }
}
_NOT_SERVED = {
    "/v1/vector_stores": "vector stores are not served here: search in your application, and name what it found in "
    "`documents`",
    "/v1/embeddings": "this server computes no embeddings: run an embedding model beside it",
    "/v1/rerank": "this server does not rerank: run a reranker beside it, and send `documents` in its order",
}
"""Addresses of the OpenAI API, and of Cohere's, that applications with documents may look for."""


def router(services: Services) -> APIRouter:
    """Returns the routes of files."""
    routes = APIRouter(tags=["files"], responses=error_replies())
    store = services.documents

    @routes.post(ROUTE, openapi_extra=_FORM)
    async def create_file(request: Request, tenant: Asker) -> FileObject:
        """Stores the text of a file as a document, whose id is that of the file."""
        async with request.form(max_files=1, max_fields=MAX_EXPIRY_FIELDS, max_part_size=1_024) as form:
            file, purpose, ttl_seconds = _fields_of(form)
            name, text = await file_text(services, tenant, file)
            metadata = {"filename": name, "purpose": purpose, "bytes": str(file.size or 0)}
            fields: dict[str, Any] = {"metadata": metadata} | (
                {} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}
            )
            draft = await file_draft(services, tenant, name, text, **fields)
        file_id = FILE_PREFIX + secrets.token_hex(12)
        return FileObject.of(await services.in_thread(tenant.name, store.create, tenant.name, draft, file_id))

    @routes.get(ROUTE)
    async def list_files(
        tenant: Asker,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
        after: Annotated[str | None, Query(max_length=MAX_ID_CHARACTERS)] = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> FileList:
        """Lists files in the order of creation, newest first."""
        found = await services.in_thread(tenant.name, _files, store, tenant.name, limit + 1, after, order, purpose)
        return FileList.of(found[:limit], len(found) > limit)

    @routes.get(ROUTE + "/{file_id}")
    async def get_file(file_id: FileId, tenant: Asker) -> FileObject:
        """A file, without its text."""
        return FileObject.of(await services.in_thread(tenant.name, _file, store, tenant.name, file_id))

    @routes.get(
        ROUTE + "/{file_id}/content",
        response_model=None,
        responses={200: {"content": {"text/plain": {}}, "description": "The text of the file, as models read it."}},
    )
    async def get_file_content(file_id: FileId, tenant: Asker) -> PlainTextResponse:
        """The text that was read from a file; the file itself is not kept."""
        document = await services.in_thread(tenant.name, _file, store, tenant.name, file_id)
        return PlainTextResponse(document.content.text)

    @routes.delete(ROUTE + "/{file_id}")
    async def delete_file(file_id: FileId, tenant: Asker) -> DeletedFile:
        """Deletes a file, its document and the KV computed from it."""
        await services.in_thread(tenant.name, _file, store, tenant.name, file_id)
        await services.in_thread(tenant.name, store.delete, tenant.name, file_id)
        await drop_superseded(services)
        return DeletedFile(id=file_id)

    @routes.api_route("/v1/vector_stores", methods=["GET", "POST"], include_in_schema=False)
    @routes.api_route("/v1/vector_stores/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @routes.post("/v1/embeddings", include_in_schema=False)
    @routes.post("/v1/rerank", include_in_schema=False)
    async def refuse(request: Request) -> None:
        """Refuses what other servers do for applications with documents, and says what to do."""
        path = request.url.path
        told = next(told for address, told in _NOT_SERVED.items() if address in path)
        raise ApiError(501, f"{told}; see examples/rag", code="not_served")

    return routes


def _fields_of(form: FormData) -> tuple[UploadFile, str, int | None]:
    """Returns the fields of an upload: file, purpose, seconds until it expires.

    Raises:
        ApiError: 400, a field that is missing, unknown or out of its range.
    """
    file, purpose, seconds = form.get("file"), form.get("purpose"), form.get(SECONDS)
    unknown = sorted(form.keys() - {"file", "purpose", ANCHOR, SECONDS})
    if unknown:
        raise ApiError(400, f"the field {unknown[0]!r:.100} is not known; leave it out", param=unknown[0])
    if not isinstance(file, UploadFile):
        raise ApiError(400, "the form has no file in its field 'file'; send one", param="file")
    if purpose not in get_args(Purpose):
        purposes = " or ".join(get_args(Purpose))
        told = f"purpose is {purpose!r:.100}; this server takes {purposes}, for documents in prompts"
        raise ApiError(400, told, param="purpose")
    if form.get(ANCHOR) not in (None, "created_at"):
        raise ApiError(400, f"{ANCHOR} must be 'created_at'", param=ANCHOR)
    if seconds is None:
        return file, str(purpose), None
    is_number = isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) <= 9
    if not is_number or not MIN_SECONDS <= int(str(seconds)) <= MAX_SECONDS:
        raise ApiError(
            400,
            f"{SECONDS} must be a whole number from {MIN_SECONDS} to {MAX_SECONDS}, got {seconds!r:.100}",
            param=SECONDS,
        )
    return file, str(purpose), int(str(seconds))


def _file(store: DocumentStore, tenant: str, file_id: str) -> StoredDocument:
    """The stored document of a file.

    Raises:
        UnknownDocument: there is none with this id, or it did not come as a file.
    """
    document = store.get(tenant, file_id)
    if not is_file(document):
        raise UnknownDocument(f"there is no file {file_id!r:.300}; the stored document is at /v1/documents")
    return document


def _files(
    store: DocumentStore, tenant: str, limit: int, after: str | None, order: Order, purpose: str | None
) -> list[StoredDocument]:
    """The next files of a list, at most `limit`.

    Raises:
        UnknownDocument: `after` is not in the list.
    """
    found = list[StoredDocument]()
    while True:
        page = store.page(tenant, limit=MAX_LIST, after=after, order=order, search=FILE_PREFIX)
        found += (each for each in page.documents if is_file(each) and purpose in (None, each.metadata["purpose"]))
        after = page.next_after
        if after is None or len(found) >= limit:
            return found[:limit]
