"""Routes of /v1/files: OpenAI's way to upload a file, which becomes a stored document; and its routes not served."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field
from starlette.datastructures import FormData, UploadFile

from kvmosaic.api.documents import MAX_LIST
from kvmosaic.api.errors import ApiError
from kvmosaic.api.fields import Reply
from kvmosaic.api.served_documents import ServedDocuments
from kvmosaic.documents import DocumentStore, StoredDocument
from kvmosaic.documents.store import Order
from kvmosaic.errors import UnknownDocument
from kvmosaic.prompt.document import ID_PATTERN, MAX_ID_CHARACTERS
from kvmosaic.web.documents import Served
from kvmosaic.web.errors import error_replies
from kvmosaic.web.uploads import file_draft, file_text, form_body

ROUTE = "/v1/files"
FileId = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARACTERS, pattern=ID_PATTERN)]
FILE_PREFIX = "file-"
"""Beginning of the ids of files."""
Purpose = Literal["assistants", "user_data"]
MAX_EXPIRY_FIELDS = 8
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_SECONDS, MAX_SECONDS = 3_600, 2_592_000
"""Of `expires_after`, as in OpenAI's API."""
NOT_SERVED = {
    "/v1/vector_stores": "vector stores are not served here: search in your application, and name what it found in "
    "`documents`",
    "/v1/embeddings": "this server computes no embeddings: run an embedding model beside it",
    "/v1/rerank": "this server does not rerank: run a reranker beside it, and send `documents` in its order",
}
"""Addresses of the OpenAI API, and of Cohere's, that applications with documents may look for."""
_FORM = form_body(
    ["file", "purpose"],
    **{
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": list(get_args(Purpose))},
        SECONDS: {"type": "integer", "minimum": MIN_SECONDS, "maximum": MAX_SECONDS},
        ANCHOR: {"enum": ["created_at"]},
    },
    is_open=False,
)


class FileObject(Reply):
    """A file, as OpenAI's clients read it; its id is that of a stored document with its text."""

    id: str
    object: Literal["file"] = "file"
    bytes: Annotated[int, Field(description="Of the file that was sent.")]
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, document: StoredDocument) -> FileObject:
        """Describes a stored document that came as a file."""
        metadata = document.metadata
        return cls(
            id=document.id,
            bytes=int(metadata["bytes"]),
            created_at=int(document.created_at),
            expires_at=None if document.expires_at is None else int(document.expires_at),
            filename=metadata["filename"],
            purpose=metadata["purpose"],
        )


def is_file(document: StoredDocument) -> bool:
    """Whether a stored document came through /v1/files, and still has its metadata."""
    size = document.metadata.get("bytes", "")
    is_size = size.isascii() and size.isdigit() and len(size) <= 18
    return is_size and document.id.startswith(FILE_PREFIX) and {"filename", "purpose"} <= document.metadata.keys()


class FileList(Reply):
    """Some files in the order of creation."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, files: Sequence[StoredDocument], has_more: bool) -> FileList:
        """Describes one page of files."""
        data = [FileObject.of(file) for file in files]
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=has_more)


class DeletedFile(Reply):
    """What is left of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def router() -> APIRouter:
    """Returns the routes of files."""
    routes = APIRouter(tags=["files"], responses=error_replies())

    @routes.post(ROUTE, openapi_extra={"requestBody": _FORM})
    async def create_file(request: Request, served: Served) -> FileObject:
        """Stores the text of a file as a document, whose id is that of the file."""
        return await store_file(request, served)

    @routes.get(ROUTE)
    async def list_files(
        served: Served,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
        after: Annotated[str | None, Query(max_length=MAX_ID_CHARACTERS)] = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> FileList:
        """Lists files in the order of creation, newest first."""
        return await served.in_thread(listed_files, served.store, served.tenant, limit, after, order, purpose)

    @routes.get(ROUTE + "/{file_id}")
    async def get_file(file_id: FileId, served: Served) -> FileObject:
        """A file, without its text."""
        return FileObject.of(await served.in_thread(find_file, served.store, served.tenant, file_id))

    @routes.get(
        ROUTE + "/{file_id}/content",
        response_model=None,
        responses={200: {"content": {"text/plain": {}}, "description": "The text of the file, as models read it."}},
    )
    async def get_file_content(file_id: FileId, served: Served) -> PlainTextResponse:
        """The text that was read from a file; the file itself is not kept."""
        document = await served.in_thread(find_file, served.store, served.tenant, file_id)
        return PlainTextResponse(document.content.text)

    @routes.delete(ROUTE + "/{file_id}")
    async def delete_file(file_id: FileId, served: Served) -> DeletedFile:
        """Deletes a file, its document and the KV computed from it."""
        await served.in_thread(find_file, served.store, served.tenant, file_id)
        await served.delete(file_id)
        return DeletedFile(id=file_id)

    @routes.api_route("/v1/vector_stores", methods=["GET", "POST"], include_in_schema=False)
    @routes.api_route("/v1/vector_stores/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @routes.post("/v1/embeddings", include_in_schema=False)
    @routes.post("/v1/rerank", include_in_schema=False)
    async def refuse(request: Request) -> None:
        """Refuses what other servers do for applications with documents, and says what to do."""
        raise not_served(request.url.path)

    return routes


def not_served(path: str) -> ApiError:
    """Returns the error of an address of `NOT_SERVED`, which says what to do."""
    told = next(told for address, told in NOT_SERVED.items() if address in path)
    return ApiError(501, f"{told}; see examples/rag", code="not_served")


async def store_file(request: Request, served: ServedDocuments) -> FileObject:
    """Stores the text of a file as a document, whose id is that of the file.

    Raises:
        ApiError: 400, a field that is missing, unknown or out of its range; 413, a file that is too large.
        KVMosaicError: its text cannot be read or stored.
    """
    async with request.form(max_files=1, max_fields=MAX_EXPIRY_FIELDS, max_part_size=1_024) as form:
        file, purpose, ttl_seconds = _fields_of(form)
        name, text = await file_text(served, file)
        fields: dict[str, Any] = {
            "metadata": {"filename": name, "purpose": purpose, "bytes": str(file.size or 0)},
            **({} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}),
        }
        draft = await file_draft(served, name, text, **fields)
    file_id = FILE_PREFIX + secrets.token_hex(12)
    return FileObject.of(await served.in_thread(served.store.create, served.tenant, draft, file_id))


def find_file(store: DocumentStore, tenant: str, file_id: str) -> StoredDocument:
    """Returns the stored document of a file.

    Raises:
        UnknownDocument: there is none with this id, or it did not come as a file.
    """
    document = store.get(tenant, file_id)
    if not is_file(document):
        raise UnknownDocument(f"there is no file {file_id!r:.300}; the stored document is at /v1/documents")
    return document


def listed_files(
    store: DocumentStore, tenant: str, limit: int, after: str | None, order: Order, purpose: str | None
) -> FileList:
    """Returns the next files in the order of creation, at most `limit`.

    Raises:
        UnknownDocument: `after` is not in the list.
    """
    found = list[StoredDocument]()
    while True:
        page = store.page(tenant, limit=MAX_LIST, after=after, order=order, search=FILE_PREFIX)
        found += (each for each in page.documents if is_file(each) and purpose in (None, each.metadata["purpose"]))
        after = page.next_after
        if after is None or len(found) > limit:
            return FileList.of(found[:limit], len(found) > limit)


def _fields_of(form: FormData) -> tuple[UploadFile, str, int | None]:
    """Returns the fields of an upload: file, purpose, seconds until it expires.

    Raises:
        ApiError: 400, a field that is missing, unknown or out of its range.
    """
    file, purpose, seconds = form.get("file"), form.get("purpose"), form.get(SECONDS)
    unknown = sorted(form.keys() - {"file", "purpose", ANCHOR, SECONDS})
    if unknown:
        raise ApiError(400, f"the field {unknown[0]!r:.100} is not known; leave it out", param=unknown[0])
    if file is None or isinstance(file, str):
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
