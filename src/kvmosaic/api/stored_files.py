"""Files as OpenAI's clients store them: the form of an upload, and the stored documents that came as files."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, get_args

from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.api.documents import MAX_LIST
from kvmosaic.api.errors import ApiError
from kvmosaic.api.files import FILE_PREFIX, FileList, FileObject, Purpose, is_file
from kvmosaic.api.upload_batch import file_draft, file_text
from kvmosaic.documents import DocumentStore, StoredDocument
from kvmosaic.documents.store import Order
from kvmosaic.errors import UnknownDocument

if TYPE_CHECKING:
    from starlette.datastructures import FormData, UploadFile
    from starlette.requests import Request

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


def not_served(path: str) -> ApiError:
    """Returns the error of an address of `NOT_SERVED`, which says what to do."""
    told = next(told for address, told in NOT_SERVED.items() if address in path)
    return ApiError(501, f"{told}; see examples/rag", code="not_served")


async def create_file(request: Request, writer: DocumentWriter) -> FileObject:
    """Stores the text of a file as a document, whose id is that of the file.

    Raises:
        ApiError: 400, a field that is missing, unknown or out of its range; 413, a file that is too large.
        KVMosaicError: its text cannot be read or stored.
    """
    async with request.form(max_files=1, max_fields=MAX_EXPIRY_FIELDS, max_part_size=1_024) as form:
        file, purpose, ttl_seconds = _fields_of(form)
        name, text = await file_text(writer, file)
        fields: dict[str, Any] = {
            "metadata": {"filename": name, "purpose": purpose, "bytes": str(file.size or 0)},
            **({} if ttl_seconds is None else {"ttl_seconds": ttl_seconds}),
        }
        draft = await file_draft(writer, name, text, **fields)
    file_id = FILE_PREFIX + secrets.token_hex(12)
    return FileObject.of(await writer.in_thread(writer.store.create, writer.tenant, draft, file_id))


def find_file(store: DocumentStore, tenant: str, file_id: str) -> StoredDocument:
    """Returns the stored document of a file.

    Raises:
        UnknownDocument: there is none with this id, or it did not come as a file.
    """
    document = store.get(tenant, file_id)
    if not is_file(document):
        raise UnknownDocument(f"there is no file {file_id!r:.300}; the stored document is at /v1/documents")
    return document


def list_files(
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
