"""Uploads of many documents to /v1/documents:batch: lines of JSON or files, and a result for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.requests import Request

from kvmosaic.api.documents import DocumentContent, KeptTokens, NewDocument, NewTokens
from kvmosaic.api.errors import ApiError, ErrorDetail, read_body
from kvmosaic.api.fields import Reply
from kvmosaic.api.json_limits import check_json
from kvmosaic.api.served_documents import ServedDocuments
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.documents.stored import MAX_METADATA_VALUE
from kvmosaic.errors import InvalidDocument, KVMosaicError
from kvmosaic.extraction import FileText
from kvmosaic.prompt.document import MAX_ID_CHARACTERS
from kvmosaic.web.json_body import Warnings

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
_CLOSED = {"additionalProperties": False}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some programs write at the beginning of a UTF-8 file."""
UploadStatus = Literal["stored", "replaced", "refused"]


def form_body(required: list[str], *, is_open: bool = True, **properties: Any) -> dict[str, Any]:
    """The body of an operation that takes a form with these fields, as OpenAPI describes it."""
    schema = {"type": "object", "required": required, "properties": properties}
    return {"required": True, "content": {FORM: {"schema": schema | ({} if is_open else _CLOSED)}}}


class LineBuffer:
    """Cuts a body that comes in pieces into lines; a line that is too long is skipped to its end.

    Holds at most one line and the pieces not yet taken. Each byte is looked at once.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_line_bytes = max_line_bytes
        self._lines: list[tuple[int, bytes | None]] = []
        self._rest = bytearray()
        self._is_skipping = False
        self.num_lines = 0
        """Lines that have ended, blank ones among them."""
        self.num_bytes = 0
        """Bytes of the lines that can be taken."""

    def feed(self, piece: bytes) -> None:
        """Adds the next piece of the body."""
        first, *others = piece.split(b"\n")
        self._extend(first)
        for part in others:
            self._end_line()
            self._extend(part)

    def finish(self) -> None:
        """Ends the last line, which may have no line break."""
        self._end_line()

    @property
    def num_waiting(self) -> int:
        """Lines that can be taken."""
        return len(self._lines)

    def take(self) -> list[tuple[int, bytes | None]]:
        """Returns the whole lines so far that are not blank, with their numbers from 1; None: one that is too long."""
        lines, self._lines, self.num_bytes = self._lines, [], 0
        return lines

    def _extend(self, part: bytes) -> None:
        if self._is_skipping:
            return
        self._rest += part
        if len(self._rest) > self._max_line_bytes:
            self._is_skipping = True
            self._rest.clear()

    def _end_line(self) -> None:
        self.num_lines += 1
        line = bytes(self._rest).strip()
        if self.num_lines == 1:
            line = line.removeprefix(BYTE_ORDER_MARK).strip()
        if self._is_skipping or line:
            self._lines.append((self.num_lines, None if self._is_skipping else line))
            self.num_bytes += len(line)
        self._rest.clear()
        self._is_skipping = False


class UploadedDocument(Reply):
    """What became of one line or file."""

    line: Annotated[int | None, Field(description="Number of the line, from 1; null: it was a file.")]
    file: Annotated[str | None, Field(description="Name of the file; null: it was a line.")]
    id: str | None
    status: UploadStatus
    version: Annotated[int | None, Field(description="What is stored now; null: it was refused.")]
    error: Annotated[ErrorDetail | None, Field(description="Why it was refused.")]
    warnings: Annotated[list[str] | None, Field(description="What of its text was changed.")] = None
    tokens: NewTokens = None
    kept_tokens: KeptTokens = None


class UploadSummary(Reply):
    """What became of all lines and files, in their order."""

    object: Literal["documents.uploaded"] = "documents.uploaded"
    num_stored: int = 0
    num_replaced: int = 0
    num_refused: int = 0
    data: list[UploadedDocument] = Field(default_factory=list)

    @classmethod
    def empty(cls) -> UploadSummary:
        """The summary of no document, with every field set."""
        return cls(object="documents.uploaded", num_stored=0, num_replaced=0, num_refused=0, data=[])

    def add(self, uploaded: UploadedDocument) -> None:
        """Adds and counts one."""
        self.data.append(uploaded)
        self.num_stored += uploaded.status == "stored"
        self.num_replaced += uploaded.status == "replaced"
        self.num_refused += uploaded.status == "refused"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """One line or file that was read: a document to store, or why it is refused."""

    line: int | None
    file: str | None
    id: str | None = None
    draft: DocumentDraft | None = None
    error: ApiError | None = None
    warnings: Warnings = ()

    def refused(self, error: ApiError) -> UploadedDocument:
        """Describes it as refused."""
        return UploadedDocument(
            line=self.line, file=self.file, id=self.id, status="refused", version=None, error=error.body["error"]
        )

    def stored(self, document: StoredDocument, kept: Mapping[str, int]) -> UploadedDocument:
        """Describes it as stored, and what is kept of the text before it."""
        status = "replaced" if document.updated_at > document.created_at else "stored"
        return UploadedDocument.model_validate(
            {
                "line": self.line,
                "file": self.file,
                "id": document.id,
                "status": status,
                "version": document.version,
                "error": None,
                **({"warnings": list(self.warnings)} if self.warnings else {}),
                **kept,
            }
        )


async def upload(request: Request, served: ServedDocuments) -> bytes:
    """Stores the documents of a request without computing them; returns the summary as JSON.

    One that is refused does not stop the others. What was stored before the client disconnects stays.

    Raises:
        ApiError: 400, a body of another type, or without a file; 413, too many lines.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    run = Upload(served)
    if kind in JSON_LINES:
        await run.add_lines(request.stream())
    elif kind == FORM:
        async with request.form(max_files=MAX_FILES, max_fields=0) as form:
            files = [value for _, value in form.multi_items() if not isinstance(value, str)]
            await run.add_files(files, request.is_disconnected)
    else:
        told = f"the header says {kind[:100]!r}" if kind else "the header says nothing"
        raise ApiError(
            400,
            f"the body must be lines of JSON (Content-Type: {JSON_LINES[0]}) or files ({FORM}); {told}",
            code="invalid_content_type",
        )
    write = partial(run.summary.model_dump_json, exclude_unset=True)
    return (await served.in_thread(write)).encode()


class Upload:
    """One upload: reads its documents, stores them in batches, and collects what became of each."""

    def __init__(self, served: ServedDocuments) -> None:
        self.summary = UploadSummary.empty()
        self._served = served

    async def add_lines(self, pieces: AsyncIterator[bytes]) -> None:
        """Stores the lines of a body as they come."""
        async for lines in self._batches(pieces):
            await self.add(await self._served.in_thread(self._read_lines, lines))

    async def add_files(self, files: Sequence[UploadFile], is_gone: Callable[[], Awaitable[bool]]) -> None:
        """Stores the text of each file under its name, until the client is gone.

        Raises:
            ApiError: 400, no file.
        """
        if not files:
            raise ApiError(400, "the form has no file; send at least one, as in curl -F file=@notes.md", param="file")
        for file in files:
            if await is_gone():
                return
            await self.add([await self._read_file(file)])

    async def add(self, uploads: Sequence[Uploaded]) -> None:
        """Stores documents that were read, and updates the cache."""
        served = self._served
        named = [(each.id, each.draft) for each in uploads if each.draft is not None]
        results = iter(await served.in_thread(served.store.put_many, served.tenant, named) if named else ())
        ended = [(each, each.error if each.draft is None else next(results)) for each in uploads]
        changed = [
            (result, each.draft)
            for each, result in ended
            if isinstance(result, StoredDocument) and each.draft is not None
        ]
        kept = await asyncio.shield(served.update_cache(changed))
        for each, result in ended:
            if isinstance(result, StoredDocument):
                self.summary.add(each.stored(result, kept.get(result.id, {})))
            else:
                assert result is not None
                self.summary.add(each.refused(served.error_of(result)))

    async def _batches(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[Lines]:
        """Yields the lines of a body, so many at once as are read and stored together.

        Raises:
            ApiError: 413, too many lines.
        """
        buffer = LineBuffer(self._served.max_body_bytes)
        async for piece in pieces:
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
        document_id, served = None, self._served
        try:
            if line is None:
                limit = f"{served.max_body_bytes} bytes ({served.body_setting})"
                raise ApiError(413, f"the line is longer than {limit}; split the document")
            line, warnings = check_json(line)
            body = read_body(NewDocument, _json(line), "line")
            document_id = body.id
            return Uploaded(number, None, document_id, served.accepted(body, body.id), warnings=warnings)
        except (ApiError, KVMosaicError) as error:
            return Uploaded(number, None, document_id, error=served.error_of(error))

    async def _read_file(self, file: UploadFile) -> Uploaded:
        try:
            name, text = await file_text(self._served, file)
            draft = await file_draft(self._served, name, text)
        except (ApiError, KVMosaicError) as error:
            return Uploaded(None, file.filename, error=self._served.error_of(error))
        return Uploaded(None, name, name[-MAX_ID_CHARACTERS:], draft)


async def file_text(served: ServedDocuments, file: UploadFile) -> tuple[str, FileText]:
    """Returns the name and the text of an uploaded file.

    Raises:
        ApiError: 413, it is too large.
        InvalidDocument: it has no name, or cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    name, most = (file.filename or "").strip(), served.max_body_bytes
    if not 0 < len(name) <= MAX_METADATA_VALUE:
        raise InvalidDocument(
            f"the file's name has {len(name)} characters; send one of 1 to {MAX_METADATA_VALUE}, its end says how the "
            "file is read"
        )
    if (file.size or 0) > most:
        limit = f"{most} ({served.body_setting})"
        raise ApiError(413, f"{name!r:.300} has {file.size} bytes; a file may have {limit}, split it")
    return name, await served.extract(await file.read(), name)


async def file_draft(served: ServedDocuments, name: str, said: FileText, **fields: Any) -> DocumentDraft:
    """Returns the draft of a file's text, with the name as title if it says none.

    Args:
        served: where it will be stored.
        name: of the file.
        said: the text of the file.
        fields: of `DocumentContent`, in place of the usual ones.

    Raises:
        ApiError: a text or name that cannot be stored.
        InvalidPrompt, ChunkCacheFull: the text is too long.
    """
    title = said.title or PurePosixPath(name).name
    values = {"text": said.text, "title": title, "metadata": {"filename": name}, **fields}
    return await served.in_thread(lambda: served.accepted(read_body(DocumentContent, values, "file"), name))


def _parts(lines: Lines) -> Iterator[Lines]:
    return (lines[start : start + BATCH_LINES] for start in range(0, len(lines), BATCH_LINES))


def _json(line: bytes) -> Any:
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        raise ApiError(400, "the line is not JSON", code="invalid_json") from None
