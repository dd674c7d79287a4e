"""Routes of /v1/documents:batch: store many documents, from lines of JSON or from files, with a result for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic_core import from_json
from starlette.datastructures import FormData, UploadFile

from kvmosaic.api.documents import DocumentContent, NewDocument
from kvmosaic.api.errors import read_body
from kvmosaic.api.uploading import LineBuffer, UploadedDocument, UploadSummary
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.documents.stored import MAX_METADATA_VALUE
from kvmosaic.errors import InvalidDocument, KVMosaicError
from kvmosaic.extraction import extract_text
from kvmosaic.prompt.document_id import MAX_ID_CHARACTERS
from kvmosaic.server.documents.cached import apply_draft, drop_superseded
from kvmosaic.server.documents.length_check import accepted
from kvmosaic.server.documents.routes import ROUTE
from kvmosaic.server.errors import ApiError, as_api_error, request_id_of
from kvmosaic.server.json_body import check_json
from kvmosaic.server.openai.replies import error_replies
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

MAX_LINES = 100_000
"""Maximum number of lines of one upload."""
MAX_FILES = 1_000
Lines = Sequence[tuple[int, bytes | None]]
BATCH_BYTES = 2**20
"""Bytes of lines that are read, checked and stored together."""
BATCH_LINES = 2_000
"""Lines that are, so that many short ones do not hold up the event loop."""
JSON_LINES = ("application/jsonl", "application/x-ndjson", "application/json-lines", "application/x-jsonlines")
FORM = "multipart/form-data"
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {
                        "file": {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
                    },
                }
            },
        },
        "description": "Files, whose names become ids; or (application/jsonl) one document per line, as for POST "
        "/v1/documents: " + '{"id": "ferry", "text": "The ferry goes to Oak Island."}',
    }
}


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One line or file that was read: a document to store, or why it is refused."""

    line: int | None
    file: str | None
    id: str | None = None
    draft: DocumentDraft | None = None
    error: ApiError | None = None

    def refused(self, error: ApiError) -> UploadedDocument:
        """Describes it as refused."""
        return UploadedDocument(
            line=self.line, file=self.file, id=self.id, status="refused", version=None, error=error.body["error"]
        )

    def stored(self, document: StoredDocument) -> UploadedDocument:
        """Describes it as stored."""
        status = "replaced" if document.updated_at > document.created_at else "stored"
        return UploadedDocument.model_validate(
            {
                "line": self.line,
                "file": self.file,
                "id": document.id,
                "status": status,
                "version": document.version,
                "error": None,
            }
        )


def router(services: Services) -> APIRouter:
    """Returns the route that stores many documents."""
    routes = APIRouter(tags=["documents"], responses=error_replies())

    @routes.post(ROUTE + ":batch", response_model=UploadSummary, openapi_extra=_BODY)
    async def upload_documents(request: Request, tenant: Annotated[Tenant, Depends(current_tenant)]) -> Response:
        """Stores many documents without computing them; one that is refused does not stop the others.

        A document whose id is taken is replaced. What was stored before the client disconnects stays.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        upload = Upload(services, tenant, request_id_of(request))
        if kind in JSON_LINES:
            await upload.add_lines(request)
        elif kind == FORM:
            async with request.form(max_files=MAX_FILES, max_fields=0) as form:
                await upload.add_files(request, form)
        else:
            told = f"the header says {kind[:100]!r}" if kind else "the header says nothing"
            raise ApiError(
                400,
                f"the body must be lines of JSON (Content-Type: {JSON_LINES[0]}) or files ({FORM}); {told}",
                code="invalid_content_type",
            )
        content = await services.in_thread(tenant.name, upload.summary.model_dump_json)
        return Response(content, media_type="application/json")

    return routes


class Upload:
    """One upload: reads its documents, stores them in batches, and collects what became of each."""

    def __init__(self, services: Services, tenant: Tenant, request_id: str) -> None:
        self.summary = UploadSummary()
        self._services = services
        self._tenant = tenant
        self._request_id = request_id

    async def add_lines(self, request: Request) -> None:
        """Stores the lines of a body as they come."""
        async for lines in self._batches(request):
            await self.add(await self._services.in_thread(self._tenant.name, self._read_lines, lines))

    async def add_files(self, request: Request, form: FormData) -> None:
        """Stores the text of each file under its name.

        Raises:
            ApiError: 400, no file.
        """
        files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
        if not files:
            raise ApiError(400, "the form has no file; send at least one, as in curl -F file=@notes.md", param="file")
        for file in files:
            if await request.is_disconnected():
                return
            await self.add([await self._read_file(file)])

    async def add(self, uploads: Sequence[Uploaded]) -> None:
        """Stores documents that were read, and updates the cache."""
        tenant, store = self._tenant.name, self._services.documents
        named = [(each.id, each.draft) for each in uploads if each.draft is not None]
        results = iter(await self._services.in_thread(tenant, store.put_many, tenant, named) if named else ())
        changed = list[tuple[StoredDocument, DocumentDraft]]()
        for each in uploads:
            result = each.error if each.draft is None else next(results)
            if isinstance(result, StoredDocument):
                self.summary.add(each.stored(result))
                if each.draft is not None:
                    changed.append((result, each.draft))
            else:
                assert result is not None
                self.summary.add(each.refused(as_api_error(result, self._request_id)))
        await asyncio.shield(self._update_cache(changed))

    async def _update_cache(self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]) -> None:
        for document, draft in changed:
            await apply_draft(self._services, self._tenant.name, document, draft)
        await drop_superseded(self._services)

    async def _batches(self, request: Request) -> AsyncIterator[Lines]:
        """Yields the lines of a body, so many at once as are read and stored together.

        Raises:
            ApiError: 413, too many lines.
        """
        buffer = LineBuffer(self._services.settings.max_body_bytes)
        async for piece in request.stream():
            buffer.feed(piece)
            if buffer.num_lines > MAX_LINES:
                raise ApiError(
                    413,
                    f"the body has more than {MAX_LINES} lines; send it in parts. What was read before is stored",
                    code="body_too_large",
                    headers={"Connection": "close"},
                )
            if buffer.num_bytes >= BATCH_BYTES or buffer.num_waiting >= BATCH_LINES:
                for lines in _parts(buffer.take()):
                    yield lines
        buffer.finish()
        for lines in _parts(buffer.take()):
            yield lines

    def _read_lines(self, lines: Lines) -> list[Uploaded]:
        return [self._read_line(number, line) for number, line in lines]

    def _read_line(self, number: int, line: bytes | None) -> Uploaded:
        """Reads one line; in a thread."""
        document_id = None
        try:
            if line is None:
                most = self._services.settings.max_body_bytes
                raise ApiError(413, f"the line is longer than {most} bytes (--max-body-bytes); split the document")
            check_json(line)
            body = read_body(NewDocument, _json(line), "line")
            document_id = body.id
            return Uploaded(number, None, document_id, accepted(self._services, body, body.id))
        except (ApiError, KVMosaicError) as error:
            return Uploaded(number, None, document_id, error=as_api_error(error, self._request_id))

    async def _read_file(self, file: UploadFile) -> Uploaded:
        try:
            name, text = await file_text(self._services, self._tenant, file)
            draft = await file_draft(self._services, self._tenant, name, text)
        except (ApiError, KVMosaicError) as error:
            return Uploaded(None, file.filename, error=as_api_error(error, self._request_id))
        return Uploaded(None, name, name[-MAX_ID_CHARACTERS:], draft)


async def file_text(services: Services, tenant: Tenant, file: UploadFile) -> tuple[str, str]:
    """Returns the name and the text of an uploaded file.

    Raises:
        ApiError: 413, it is too large.
        InvalidDocument: it has no name, or cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    name, most = (file.filename or "").strip(), services.settings.max_body_bytes
    if not 0 < len(name) <= MAX_METADATA_VALUE:
        raise InvalidDocument(
            f"the file's name has {len(name)} characters; send one of 1 to {MAX_METADATA_VALUE}, its end says how the "
            "file is read"
        )
    if (file.size or 0) > most:
        raise ApiError(413, f"{name!r:.300} has {file.size} bytes; a file may have {most} (--max-body-bytes), split it")
    content = await file.read()
    future = services.file_threads.submit(tenant.name, extract_text, content, name)
    return name, await asyncio.wrap_future(future)


async def file_draft(services: Services, tenant: Tenant, name: str, text: str, **fields: Any) -> DocumentDraft:
    """Returns the draft of a file's text, with the name as title.

    Args:
        services: services of the server.
        tenant: whose file it is.
        name: of the file.
        text: of the file.
        fields: of `DocumentContent`, in place of the usual ones.

    Raises:
        ApiError: a text or name that cannot be stored.
        InvalidPrompt, ChunkCacheFull: the text is too long, see `check_length`.
    """
    values = {"text": text, "title": PurePosixPath(name).name, "metadata": {"filename": name}, **fields}
    return await services.in_thread(
        tenant.name, lambda: accepted(services, read_body(DocumentContent, values, "file"), name)
    )


def _parts(lines: Lines) -> Iterator[Lines]:
    return (lines[start : start + BATCH_LINES] for start in range(0, len(lines), BATCH_LINES))


def _json(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        raise ApiError(400, "the line is not JSON", code="invalid_json") from None
