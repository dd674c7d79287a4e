"""/v1/documents next to vLLM's own routes: stored texts that prompts name by id, and warming through vLLM itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvmosaic.api.documents import MAX_LIST, DeletedDocument, DocumentList, DocumentObject, NewDocument
from kvmosaic.api.errors import ApiError, read_body
from kvmosaic.api.fields import Name, Reply
from kvmosaic.api.warming import WarmedDocument, WarmRequest, WarmSummary
from kvmosaic.documents import DocumentStore, Match, StoredDocument, StoreLimits, document_place
from kvmosaic.errors import InvalidDocument, KVMosaicError
from kvmosaic.integrations.vllm.contract import FIELD, EncodedRequest, composed
from kvmosaic.integrations.vllm.front.internal_requests import api_error, ask, whole_body
from kvmosaic.integrations.vllm.front.settings import TENANT, FrontSettings
from kvmosaic.prompt import Document
from kvmosaic.prompt.document_id import VERBS

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

ROUTE = "/v1/documents"
MAX_WARM = 10_000
AT_ONCE = 4
_VERB = re.compile(rf"(.*):({'|'.join(VERBS)})", re.DOTALL)


class _ListQuery(BaseModel):
    """Which part of the list is read."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIST)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


class _WarmBody(WarmRequest):
    """What to warm, and for which of vLLM's models."""

    model: Name | None = None


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
        has_labels=False,
    )


class DocumentRoutes:
    """Creates, replaces, reads, lists, deletes and warms documents, as our own server does.

    Requires the same API key as vLLM's /v1/models: vLLM itself checks it.
    """

    def __init__(self, front: ComposedDocuments) -> None:
        self._front = front

    async def __call__(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        try:
            reply = await self._reply(path, scope, receive)
        except (ApiError, KVMosaicError) as error:
            reply = api_error(error).reply()
        await reply(scope, receive, send)

    async def _reply(self, path: str, scope: Scope, receive: Receive) -> Response:
        models = await ask(self._front.app, scope, "GET", "/v1/models")
        if models.status_code >= 400:
            return models
        request, name, verb = Request(scope), path.removeprefix(ROUTE).removeprefix("/"), None
        if found := _VERB.fullmatch(name):
            name, verb = found[1], found[2]
        body = await self._body(receive) if request.method in ("POST", "PUT") else {}
        if verb is None:
            return await self._front.in_thread(self._changed, request, name, body)  # type: ignore[no-any-return]
        if verb != "warm":
            raise ApiError(404, f"inside vLLM there is no {verb!r} of documents; vLLM's cache decides what stays")
        _check_method(request.method, "POST")
        return await self._warmed(name, read_body(_WarmBody, body), scope)

    def _changed(self, request: Request, name: str, body: dict[str, Any]) -> Response:
        method, store = request.method, self._front.documents
        _check_method(method, *(("GET", "PUT", "DELETE") if name else ("GET", "POST")))
        if method == "POST":
            new = new_document(body)
            return _described(store.create(TENANT, new.draft(store), new.id), 201)
        if not name:
            query = read_body(_ListQuery, dict(request.query_params), "query")
            page = store.page(TENANT, limit=query.limit, after=query.after, order=query.order)
            return _json(DocumentList.of(page, [DocumentObject.of(document) for document in page.documents]))
        header = request.headers.get("if-match")
        match = None if header is None else Match.from_header(header)
        if method == "PUT":
            new = new_document(body)
            new.check_id(name)
            document, is_new = store.put(TENANT, name, new.draft(store), match)
            return _described(document, 201 if is_new else 200)
        if method == "DELETE":
            store.delete(TENANT, name, match)
            return _json(DeletedDocument(id=name, object="document.deleted", deleted=True))
        document = store.get(TENANT, name)
        return _described(document, text=document.content.text)

    async def _body(self, receive: Receive) -> dict[str, Any]:
        content = await whole_body(receive, self._front.settings.max_body_bytes, "; send less at once")
        if content is None:
            raise ApiError(400, "the client went away before the end of the body")
        try:
            body = json.loads(content) if content.strip() else {}
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is not JSON", code="invalid_json") from None
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is {body!r:.80}; send an object")
        return body

    async def _warmed(self, name: str, body: _WarmBody, scope: Scope) -> Response:
        """Prefills documents separately, a few concurrently. A failed one does not stop others."""
        if body.stream:
            raise ApiError(400, "inside vLLM warming sends no events; leave stream out", param="stream")
        store = self._front.documents
        if name:
            chosen: tuple[Document | str, ...] = (name,)
        else:
            chosen = await self._front.in_thread(body.chosen, lambda: [each.id for each in store.documents(TENANT)])
        if len(chosen) > MAX_WARM:
            raise ApiError(400, f"{len(chosen)} documents at once; at most {MAX_WARM} can be warmed: send fewer")
        begun, running = time.monotonic(), asyncio.Semaphore(AT_ONCE)

        async def one(index: int, document: Document | str) -> WarmedDocument:
            async with running:
                try:
                    return await self._warm_one(index, document, body, scope)
                except ApiError as error:
                    return WarmedDocument(index, _id_of(document), error=error)

        warmed = await asyncio.gather(*(one(index, document) for index, document in enumerate(chosen)))
        return _json(WarmSummary.of(warmed, time.monotonic() - begun))

    async def _warm_one(self, index: int, document: Document | str, body: _WarmBody, scope: Scope) -> WarmedDocument:
        """Computes one document by a request of one token."""
        begun = time.monotonic()
        ready = await self._front.in_thread(self._prompt_of, document, body, scope)
        composition = ready.composition
        request = {
            "prompt": list(ready.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": composition.to_params(),
            **body.model_dump(include={"model", "cache_salt"}, exclude_none=True),
        }
        reply = await ask(self._front.app, scope, "POST", "/v1/completions", request)
        try:
            answer = json.loads(bytes(reply.body))
        except ValueError:
            answer = {}
        if reply.status_code != 200:
            error = answer.get("error") if isinstance(answer, dict) else None
            told = error.get("message") if isinstance(error, dict) else error
            raise ApiError(reply.status_code, f"vLLM refuses it: {told!s:.1000}")
        report = (answer.get("kv_transfer_params") or {}).get(FIELD) or {}
        actions = [each.get("action") for each in report.get("documents", ())]
        return WarmedDocument(
            index,
            _id_of(document),
            num_tokens=sum(composition.chunks),
            num_chunks=len(composition.chunks),
            was_cached=bool(actions) and all(action in ("reused", "moved") for action in actions),
            milliseconds=(time.monotonic() - begun) * 1e3,
        )

    def _prompt_of(self, document: Document | str, body: _WarmBody, scope: Scope) -> EncodedRequest:
        """The prompt of a request with this document alone."""
        store, renderer = self._front.documents, self._front.renderer(scope)
        try:
            if isinstance(document, str):
                document = store.get(TENANT, document).content
            prompt = renderer.warming([document], body).without_texts()
            how = self._front.settings.how.updated({"chunk_context": body.chunk_context})
            return composed(prompt, how, renderer.model.trained_positions)
        except KVMosaicError as error:
            raise api_error(error) from error


def _id_of(document: Document | str) -> str | None:
    return document if isinstance(document, str) else document.id


def new_document(body: dict[str, Any]) -> NewDocument:
    """Reads the body of a document.

    Raises:
        InvalidDocument: a field that is not supported inside vLLM. ApiError: anything else that is wrong.
    """
    if body.get("pinned") or body.get("priority") is not None:
        name = "pinned" if body.get("pinned") else "priority"
        raise InvalidDocument(
            f"{name} is {body[name]!r:.80}; vLLM's cache alone decides what stays in it: leave {name} out"
        )
    return read_body(NewDocument, body)


def _described(document: StoredDocument, status: int = 200, **details: Any) -> Response:
    return _json(DocumentObject.of(document, **details), status, {"etag": f'"{document.version}"'})


def _json(reply: Reply, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse(reply.model_dump(exclude_unset=True), status, headers=headers)


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise ApiError(405, f"this address takes {', '.join(allowed)} only", code="method_not_allowed")
