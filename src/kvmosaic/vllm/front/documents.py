"""/v1/documents and /v1/files next to vLLM's own routes: stored texts that prompts name by id, and warming by vLLM."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kvmosaic.api.errors import RETRY_SECONDS, ApiError
from kvmosaic.api.served_documents import ServedDocuments, check_length, most_chunk_tokens
from kvmosaic.api.warming import WarmedDocument, WarmJob
from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.config import StoreConfig
from kvmosaic.documents import DocumentDraft, DocumentStore, StoredDocument, StoreLimits, document_place
from kvmosaic.errors import KVMosaicError, PromptTooLong
from kvmosaic.extraction import FileText, extract_text
from kvmosaic.layout import context_with
from kvmosaic.prompt import Document
from kvmosaic.vllm.contract import FIELD, Composition, EncodedRequest, composed
from kvmosaic.vllm.front.pool_updates import PoolUpdates, api_error, ask
from kvmosaic.web import documents, files
from kvmosaic.web.errors import NO_TELEMETRY, add_error_replies, as_api_error
from kvmosaic.web.request_body import BodyRules, RequestBodyMiddleware

if TYPE_CHECKING:
    from kvmosaic.vllm.front.middleware import ComposedDocuments


_OUTER = "kvmosaic.outer"
"""Key in an ASGI scope of the scope in vLLM's own app."""


def open_documents(settings: StoreConfig, clock: Callable[[], float] | None = None) -> DocumentStore:
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
    """The routes of our own server, over the documents of the front.

    Requires the same API key as vLLM's /v1/models: vLLM itself checks it, before anything of a body is read.
    """

    def __init__(self, front: ComposedDocuments) -> None:
        self._front = front
        self._app: FastAPI | None = None
        self._lock = asyncio.Lock()
        self._owned: dict[str, bool] = {}

    def answers(self, path: str, scope: Scope) -> bool:
        """Whether a path is one of these routes, and vLLM has none of its own there."""
        if path.startswith(documents.ROUTE):
            return path.removeprefix(documents.ROUTE)[:1] in ("", "/", ":")
        found = [route for route in (files.ROUTE, "/v1/vector_stores") if f"{path}/".startswith(f"{route}/")]
        return any(not self._find_owned(route, scope) for route in found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that is gone gets no reply."""
        models = await ask(self._front.app, scope, "GET", "/v1/models")
        if models.status_code >= 400:
            return await models(scope, receive, send)
        async with self._lock:  # on first use, since not every vLLM has documents; it takes a tenth of a second
            if self._app is None:
                self._app = await self._front.in_thread(document_app, self._front)
        return await self._app({**scope, "state": {}, _OUTER: scope}, receive, send)

    def _find_owned(self, route: str, scope: Scope) -> bool:
        """Returns whether vLLM has a route of its own, looked up once."""
        if route not in self._owned:
            routes: Iterable[Any] = getattr(scope.get("app"), "routes", ())
            self._owned[route] = any(str(getattr(each, "path", "")).startswith(route) for each in routes)
        return self._owned[route]


def document_app(front: ComposedDocuments) -> FastAPI:
    """Builds the app of these routes; the scope of a request has that of vLLM's own app in it."""
    settings = front.settings.store
    app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry=NO_TELEMETRY)
    app.state.serve_documents = lambda request: FrontDocuments(front, request.scope[_OUTER])
    add_error_replies(app)
    for path in (documents.ROUTE, documents.ONE):
        for verb in ("sleep", "wake"):
            app.add_api_route(f"{path}:{verb}", _refuse_sleep, methods=["POST"])
    app.include_router(documents.router())
    app.include_router(files.router())
    rules = BodyRules(
        max_bytes=settings.max_body_bytes,
        setting="KVMOSAIC_MAX_BODY_BYTES",
        max_upload_bytes=max(settings.max_documents_bytes, settings.max_body_bytes),
        upload_setting="KVMOSAIC_MAX_DOCUMENTS_BYTES",
        full=_full,
        in_thread=lambda tenant, work, *args: front.in_thread(work, *args),
        tenant_of=lambda scope: DEFAULT_TENANT,
        has_tenants=False,
    )
    app.add_middleware(RequestBodyMiddleware, rules=rules)
    return app


async def _refuse_sleep() -> None:
    raise ApiError(404, "inside vLLM documents do not sleep or wake by themselves; use vLLM's /sleep for all of it")


def _full(reason: str, code: str) -> ApiError:
    told = f"{reason}; try again in {RETRY_SECONDS} s"
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(429, told, type="rate_limit_error", code=code, headers=headers)


P = ParamSpec("P")
T = TypeVar("T")


class FrontDocuments(ServedDocuments):
    """The documents of all clients of one vLLM, during one request."""

    num_warmed_at_once = 4

    def __init__(self, front: ComposedDocuments, scope: Scope) -> None:
        super().__init__(
            front.documents, DEFAULT_TENANT, front.settings.store.max_body_bytes, "KVMOSAIC_MAX_BODY_BYTES"
        )
        self._front = front
        self._scope = scope
        self._updates = PoolUpdates(front, scope)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work in one of the front's threads."""
        return await self._front.in_thread(function, *args, **kwargs)

    async def extract(self, content: bytes, filename: str) -> FileText:
        """Returns the text of a file; prompts do not wait for it."""
        return await self._front.in_file_thread(extract_text, content, filename)

    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a prompt of the served model can hold a document, all of its parts together.

        Raises:
            InvalidPrompt: it is too long.
        """
        try:
            encoder = self._front.renderer(self._scope).encoder
        except ApiError:  # documents are stored for other servers, too
            return
        prompt = check_length(encoder, draft, document_id, most_chunk_tokens(encoder))
        if prompt is None or encoder.max_positions is None:
            return
        num_tokens = sum(segment.num_tokens for segment in prompt.segments)
        if num_tokens >= encoder.max_positions:  # one is left for the answer
            raise PromptTooLong(
                f"a prompt with this document alone has {num_tokens} tokens, and vLLM takes {encoder.max_positions} "
                "with the answer (--max-model-len); store it in parts"
            )

    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees."""
        return as_api_error(error)

    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Sends pins and priorities to vLLM's engines; what they have cached of a text is unknown in this process."""
        claimed = [
            document
            for document, draft in changed
            if document.pinned or draft.pinned is not None or draft.priority is not None
        ]
        await self._updates.send(claimed)
        return {}

    async def update_pin(self, document: StoredDocument) -> None:
        """Sends the pin to vLLM's engines."""
        await self._updates.send([document])

    async def update_priority(self, document: StoredDocument) -> None:
        """Sends the priority to vLLM's engines."""
        await self._updates.send([document])

    async def drop_deleted(self, document: StoredDocument) -> None:
        """Releases the pin; the keys and values stay until vLLM evicts them."""
        await self._updates.send((), was_pinned=document.pinned)

    async def find_chunks(self, documents: Sequence[StoredDocument]) -> None:
        """None: this process does not see which blocks vLLM caches."""

    def check_warmable(self, model: str | None) -> None:
        """Nothing: vLLM itself answers for its models and its queue, document by document."""

    async def num_evictions(self) -> None:
        """None: this process does not see what vLLM evicts."""

    async def warm_one(self, job: WarmJob, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document by a request of one token."""
        return await Warming(self._front, job, self._scope).run(index, document)


class Warming:
    """Prefill of one document for later requests."""

    def __init__(self, front: ComposedDocuments, job: WarmJob, scope: Scope) -> None:
        self._front = front
        self._body = job.options
        self._salt = job.salt
        self._scope = scope

    async def run(self, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document, a text or the id of a stored one; a failure is part of the result."""
        try:
            return await self._warm_one(index, document)
        except Exception as error:
            return WarmedDocument(index, _id_of(document), error=as_api_error(error))

    async def _warm_one(self, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document by a request of one token for each place that changes its companions."""
        begun, compositions, actions = time.monotonic(), list[Composition](), list[str]()
        for ready in await self._front.in_thread(self._prompts_of, document):
            assert ready.composition is not None  # it has a document
            compositions.append(ready.composition)
            actions += await self._compute(ready, ready.composition)
        return WarmedDocument(
            index,
            _id_of(document),
            num_tokens=sum(map(sum, (each.chunks for each in compositions))),
            num_chunks=sum(len(each.chunks) for each in compositions),
            was_cached=bool(actions) and all(action in ("reused", "moved") for action in actions),
            milliseconds=(time.monotonic() - begun) * 1e3,
        )

    async def _compute(self, ready: EncodedRequest, composition: Composition) -> list[str]:
        """Answers a prompt; returns what was done for its documents."""
        request = {
            "prompt": list(ready.token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": composition.to_params(),
            **{name: value for name, value in (("model", self._body.model), ("cache_salt", self._salt)) if value},
        }
        reply = await ask(self._front.app, self._scope, "POST", "/v1/completions", request)
        try:
            answer = json.loads(bytes(reply.body))
        except ValueError:
            answer = {}
        if reply.status_code != 200:
            error = answer.get("error") if isinstance(answer, dict) else None
            told = error.get("message") if isinstance(error, dict) else error
            raise ApiError(reply.status_code, f"vLLM refuses it: {told!s:.1000}")
        report = (answer.get("kv_transfer_params") or {}).get(FIELD) or {}
        if report.get("bypass"):
            raise ApiError(400, f"vLLM computed it without keeping it for other prompts: {report['bypass']!s:.1000}")
        return [each.get("action") for each in report.get("documents", ())]

    def _prompts_of(self, document: Document | str) -> list[EncodedRequest]:
        """Prompts with this document alone, as the first one and as later ones."""
        store, renderer = self._front.documents, self._front.renderer(self._scope)
        try:
            if isinstance(document, str):
                document = store.get(DEFAULT_TENANT, document).content
            prompt = renderer.warming([document], self._body).without_texts()
            context = context_with(self._body.companions, self._body.chunk_context)
            how = self._front.settings.how.updated({"chunk_context": context, "repair": "none"})
            unlike: dict[object, EncodedRequest] = {}
            for each in prompt.at_places():
                ready = composed(each, how, renderer.model.facts)
                assert ready.composition is not None  # it has a document
                stored = renderer.with_stored_documents(ready.composition)
                unlike.setdefault(stored.companions, replace(ready, composition=stored))
            return list(unlike.values())
        except KVMosaicError as error:
            raise api_error(error) from error


def _id_of(document: Document | str) -> str | None:
    return document if isinstance(document, str) else document.id
