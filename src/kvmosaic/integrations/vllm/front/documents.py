"""/v1/documents and /v1/files next to vLLM's own routes: stored texts that prompts name by id."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.api.documents import (
    MAX_LIST,
    DeletedDocument,
    DocumentChange,
    DocumentList,
    DocumentObject,
    DocumentVersion,
    NewDocument,
)
from kvmosaic.api.errors import ApiError, read_body
from kvmosaic.api.files import DeletedFile, FileObject
from kvmosaic.api.json_limits import check_json, check_json_type
from kvmosaic.api.stored_files import create_file, find_file, list_files, not_served
from kvmosaic.api.upload_batch import upload
from kvmosaic.api.upload_body import MAX_UPLOADS, PAUSE_SECONDS, UploadBody
from kvmosaic.documents import DocumentStore, Match, StoredDocument, StoreLimits, document_place
from kvmosaic.documents.store import MAX_SEARCH_CHARACTERS
from kvmosaic.integrations.vllm.front.internal_requests import ask, whole_body
from kvmosaic.integrations.vllm.front.pool_updates import PoolUpdates
from kvmosaic.integrations.vllm.front.replies import check_method, json_reply
from kvmosaic.integrations.vllm.front.settings import TENANT, FrontSettings
from kvmosaic.integrations.vllm.front.warming import WarmBody, Warming
from kvmosaic.integrations.vllm.front.writer import FrontWriter, error_of
from kvmosaic.prompt.document_id import MAX_ID_CHARACTERS, VERBS

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

ROUTE = "/v1/documents"
BATCH = f"{ROUTE}:batch"
FILES = "/v1/files"
_FILE_CONTENT = "/content"
VECTOR_STORES = "/v1/vector_stores"
_VERB = re.compile(rf"(.*):({'|'.join(VERBS)})", re.DOTALL)


class _ListQuery(BaseModel):
    """Which part of the list is read."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIST)] = 20
    after: Annotated[str | None, Field(max_length=MAX_ID_CHARACTERS)] = None
    order: Literal["asc", "desc"] = "desc"
    search: Annotated[str, Field(max_length=MAX_SEARCH_CHARACTERS)] = ""
    id: Annotated[list[str], Field(max_length=MAX_LIST)] | None = None
    include_chunks: bool = False


class _ReadQuery(BaseModel):
    """Which version of a document is read."""

    version: Annotated[int | None, Field(ge=1, le=2**31)] = None
    include_versions: bool = False


def open_documents(settings: FrontSettings, clock: Callable[[], float] | None = None) -> DocumentStore:
    """Opens the stored documents, which are those of our own server if the place is the same.

    Raises:
        InvalidConfig: a place that cannot be used.
    """
    return DocumentStore(
        document_place(settings.documents_dir, settings.documents_url),
        default_ttl_seconds=settings.document_ttl,
        version_seconds=settings.document_version_seconds,
        limits=StoreLimits(settings.max_documents, settings.max_documents_bytes),
        clock=clock,
    )


class DocumentRoutes:
    """Creates, replaces, reads, lists, uploads, deletes and warms documents, as our own server does.

    Requires the same API key as vLLM's /v1/models: vLLM itself checks it, before anything of a body is read.
    """

    def __init__(self, front: ComposedDocuments) -> None:
        self._front = front
        self._num_uploads = 0
        self._owned: dict[str, bool] = {}

    def answers(self, path: str, scope: Scope) -> bool:
        """Whether a path is one of these routes, and vLLM has none of its own there."""
        if path.startswith(ROUTE):
            return path.removeprefix(ROUTE)[:1] in ("", "/", ":")
        route = next((route for route in (FILES, VECTOR_STORES) if f"{path}/".startswith(f"{route}/")), None)
        return route is not None and not self._find_owned(route, scope)

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that is gone gets no reply."""
        try:
            reply = await self._reply(path, scope, receive)
        except ClientDisconnect:
            return
        except Exception as error:
            reply = error_of(error).reply()
        await reply(scope, receive, send)

    def _find_owned(self, route: str, scope: Scope) -> bool:
        """Returns whether vLLM has a route of its own, looked up once."""
        if route not in self._owned:
            routes: Iterable[Any] = getattr(scope.get("app"), "routes", ())
            self._owned[route] = any(str(getattr(each, "path", "")).startswith(route) for each in routes)
        return self._owned[route]

    async def _reply(self, path: str, scope: Scope, receive: Receive) -> Response:
        models = await ask(self._front.app, scope, "GET", "/v1/models")
        if models.status_code >= 400:
            return models
        request, writer = Request(scope, receive), FrontWriter(self._front, scope)
        if path.startswith(VECTOR_STORES):
            raise not_served(path)
        if path == BATCH:
            check_method(request.method, "POST")
            async with self._uploading(scope, receive) as body:
                return Response(await upload(body, writer), media_type="application/json")
        if path.startswith(FILES):
            name = path.removeprefix(FILES).removeprefix("/")
            was_pinned = request.method == "DELETE" and await writer.in_thread(_is_pinned, writer.store, name)
            async with self._uploading(scope, receive) as body:
                reply = await answer_file(body, name, writer)
            await self._update(request, None, was_pinned=was_pinned)
            return reply
        return await self._answer_document(request, path.removeprefix(ROUTE).removeprefix("/"), writer)

    async def _answer_document(self, request: Request, name: str, writer: FrontWriter) -> Response:
        if found := _VERB.fullmatch(name):
            return await self._answer_verb(request, found[1], found[2], writer)
        check_method(request.method, *(("GET", "PUT", "PATCH", "DELETE") if name else ("GET", "POST")))
        body = await self._body(request) if request.method in ("POST", "PUT", "PATCH") else {}
        was_pinned = request.method == "DELETE" and await writer.in_thread(_is_pinned, writer.store, name)
        reply, changed = await writer.in_thread(self._answered, request, name, body, writer)
        if request.method != "GET":
            await self._update(request, changed, was_pinned=was_pinned)
        return reply

    async def _update(self, request: Request, changed: StoredDocument | None, *, was_pinned: bool = False) -> None:
        """Sends what was changed to the engines, also if the client disconnects meanwhile."""
        updates = PoolUpdates(self._front, request.scope)
        await asyncio.shield(updates.send(() if changed is None else (changed,), was_pinned=was_pinned))

    async def _answer_verb(self, request: Request, name: str, verb: str, writer: FrontWriter) -> Response:
        if verb in ("sleep", "wake"):
            raise ApiError(404, f"inside vLLM there is no {verb!r} of documents; sleep as a whole, with vLLM's /sleep")
        check_method(request.method, "POST")
        if verb in ("pin", "unpin"):
            document = await writer.in_thread(writer.store.set_pinned, TENANT, name, verb == "pin")
            await self._update(request, document)
            return _described(document)
        body = await writer.in_thread(read_body, WarmBody, await self._body(request))
        return await _unless_gone(request.receive, Warming(self._front, body, request.scope).run(name))

    def _answered(
        self, request: Request, name: str, body: dict[str, Any], writer: FrontWriter
    ) -> tuple[Response, StoredDocument | None]:
        """The reply, and the document if its pin or priority was set."""
        method, store = request.method, writer.store
        if method == "POST":
            new = read_body(NewDocument, body)
            document = store.create(TENANT, writer.accepted(new, new.id), new.id)
            return _described(document, 201), document if _has_claim(new, document) else None
        if not name:
            return _listed(store, request), None
        header = request.headers.get("if-match")
        match = None if header is None else Match.from_header(header)
        if method == "PUT":
            new = read_body(NewDocument, body)
            new.check_id(name)
            document, is_new = store.put(TENANT, name, writer.accepted(new, name), match)
            return _described(document, 201 if is_new else 200), document if _has_claim(new, document) else None
        if method == "PATCH":
            change = read_body(DocumentChange, body).values
            document = store.change(TENANT, name, change, match)
            return _described(document), document if "priority" in change else None
        if method == "DELETE":
            store.delete(TENANT, name, match)
            return json_reply(DeletedDocument(id=name, object="document.deleted", deleted=True)), None
        return _read(store, request, name), None

    async def _body(self, request: Request) -> dict[str, Any]:
        content = await whole_body(request.receive, self._front.settings.max_body_bytes, "; send less at once")
        if content is None:
            raise ClientDisconnect
        if not content.strip():
            return {}
        check_json_type(request.headers.get("content-type", ""))
        return await self._front.in_thread(_parsed, content)

    @asynccontextmanager
    async def _uploading(self, scope: Scope, receive: Receive) -> AsyncIterator[Request]:
        """Counts a request whose body is read in pieces.

        Raises:
            ApiError: 429, there are too many.
        """
        if self._num_uploads >= MAX_UPLOADS:
            told = f"{MAX_UPLOADS} uploads are in progress; ask again later"
            raise ApiError(429, told, type="rate_limit_error", code="uploads_full", headers={"Retry-After": "1"})
        settings = self._front.settings
        most = max(settings.max_documents_bytes, settings.max_body_bytes)
        self._num_uploads += 1
        try:
            yield Request(scope, UploadBody(receive, most, "KVMOSAIC_MAX_DOCUMENTS_BYTES", PAUSE_SECONDS))
        finally:
            self._num_uploads -= 1


def _has_claim(new: NewDocument, document: StoredDocument) -> bool:
    return document.pinned or new.pinned is not None or new.priority is not None


def _is_pinned(store: DocumentStore, name: str) -> bool:
    return any(document.pinned for document in store.page(TENANT, limit=1, ids=[name]).documents)


def _parsed(content: bytes) -> dict[str, Any]:
    """Reads a body of JSON; in a thread, since a long one takes a second.

    Raises:
        ApiError: it is not an object, or harmful.
    """
    check_json(content)
    try:
        body = from_json(content, allow_inf_nan=False)
    except ValueError:
        raise ApiError(400, "the body is not JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {body!r:.80}; send an object")
    return body


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Response]) -> Response:
    """Returns the reply of a long request, which is cancelled when its client disconnects.

    Raises:
        ClientDisconnect: it has.
    """

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(until_gone())
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


def _listed(store: DocumentStore, request: Request) -> Response:
    ids = request.query_params.getlist("id")
    given = {**request.query_params, "id": ids or None}
    query = read_body(_ListQuery, given, "query")
    if query.include_chunks:
        told = "inside vLLM the cached chunks of documents are not listed; leave include_chunks out"
        raise ApiError(400, told, param="include_chunks")
    page = store.page(
        TENANT, limit=query.limit, after=query.after, order=query.order, search=query.search, ids=query.id
    )
    return json_reply(DocumentList.of(page, [DocumentObject.of(document) for document in page.documents]))


def _read(store: DocumentStore, request: Request, name: str) -> Response:
    query = read_body(_ReadQuery, dict(request.query_params), "query")
    document = store.get(TENANT, name, query.version)
    details: dict[str, Any] = {"text": document.content.text}
    if query.include_versions:
        details["versions"] = [DocumentVersion.of(each) for each in store.versions(TENANT, name)]
    return _described(document, **details)


def _described(document: StoredDocument, status: int = 200, **details: Any) -> Response:
    return json_reply(DocumentObject.of(document, **details), status, {"etag": f'"{document.version}"'})


class _FileQuery(BaseModel):
    """Which part of the list is read."""

    limit: Annotated[int, Field(ge=1, le=10_000)] = 1_000
    after: Annotated[str | None, Field(max_length=MAX_ID_CHARACTERS)] = None
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str | None, Field(max_length=64)] = None


async def answer_file(request: Request, name: str, writer: DocumentWriter) -> Response:
    """Answers a request for the list of files ("" as name), or for one of them."""
    if not name:
        check_method(request.method, "GET", "POST")
        if request.method == "POST":
            return json_reply(await create_file(request, writer), has_defaults=True)
    return await writer.in_thread(_file_reply, request, name, writer)


def _file_reply(request: Request, name: str, writer: DocumentWriter) -> Response:
    store, tenant = writer.store, writer.tenant
    if not name:
        query = read_body(_FileQuery, dict(request.query_params), "query")
        return json_reply(
            list_files(store, tenant, query.limit, query.after, query.order, query.purpose), has_defaults=True
        )
    if name.endswith(_FILE_CONTENT):
        check_method(request.method, "GET")
        return PlainTextResponse(find_file(store, tenant, name.removesuffix(_FILE_CONTENT)).content.text)
    check_method(request.method, "GET", "DELETE")
    file = find_file(store, tenant, name)
    if request.method == "GET":
        return json_reply(FileObject.of(file), has_defaults=True)
    store.delete(tenant, name)
    return json_reply(DeletedFile(id=name), has_defaults=True)
