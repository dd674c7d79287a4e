"""Routes of /v1/documents: create, list, replace, pin, delete and compute stored documents, one or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from kvmosaic.api.documents import (
    MAX_LIST,
    ChunkObject,
    DeletedDocument,
    DocumentChange,
    DocumentList,
    DocumentObject,
    DocumentVersion,
    NewDocument,
)
from kvmosaic.api.errors import ApiError
from kvmosaic.api.served_documents import ServedDocuments
from kvmosaic.api.warming import WarmedObject, WarmJob, WarmOneRequest, WarmRequest, WarmSummary
from kvmosaic.documents import DocumentDraft, Match, StoredDocument
from kvmosaic.documents.store import MAX_SEARCH_CHARACTERS
from kvmosaic.prompt import Document
from kvmosaic.prompt.document import ID_PATTERN, MAX_ID_CHARACTERS
from kvmosaic.web.errors import ErrorReply, error_replies, not_allowed, streamed
from kvmosaic.web.json_body import ParsedRoute, warn, warnings_of
from kvmosaic.web.sse import EventStream, event, open_stream
from kvmosaic.web.uploads import UploadSummary, form_body, upload

ROUTE = "/v1/documents"
ONE = ROUTE + "/{document_id:path}"
Serve = Callable[[Request], ServedDocuments]


async def served_documents(request: Request) -> ServedDocuments:
    """The documents that a request may use: a FastAPI dependency. The app has a `Serve` in its state."""
    serve: Serve = request.app.state.serve_documents
    return serve(request)


Served = Annotated[ServedDocuments, Depends(served_documents)]
IdInPath = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARACTERS, pattern=ID_PATTERN)]
IdInQuery = Annotated[str, Query(min_length=1, max_length=MAX_ID_CHARACTERS)]
IfMatch = Annotated[
    str | None, Header(alias="If-Match", max_length=4_096, description="The ETag that the change is meant for, or *.")
]


async def _refuse_verb(request: Request) -> None:
    """Refuses other methods than POST for addresses that end in a verb; they name no document."""
    if str(request.path_params["document_id"]).endswith((":warm", ":pin", ":unpin")):
        raise not_allowed("POST")


NO_VERB = (Depends(_refuse_verb),)
CHANGED: dict[int | str, dict[str, Any]] = {
    412: {"model": ErrorReply, "description": "What is stored is not the version that If-Match names."}
}
_BATCH_BODY = {
    "requestBody": {
        **form_body(["file"], file={"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}),
        "description": "Files, whose names become ids; or (application/jsonl) one document per line, as for POST "
        "/v1/documents: " + '{"id": "ferry", "text": "The ferry goes to Oak Island."}',
    }
}


def router() -> APIRouter:
    """Returns all routes of /v1/documents; those with a verb come before the ids."""
    all_routes = APIRouter()
    for part in (_batch_router, _warm_router, _router):
        all_routes.include_router(part())
    return all_routes


def _batch_router() -> APIRouter:
    routes = APIRouter(tags=["documents"], responses=error_replies())

    @routes.post(ROUTE + ":batch", response_model=UploadSummary, openapi_extra=_BATCH_BODY)
    async def upload_documents(request: Request, served: Served) -> Response:
        """Stores many documents without computing them; one that is refused does not stop the others.

        A document whose id is taken is replaced. What was stored before the client disconnects stays.
        """
        return Response(await upload(request, served), media_type="application/json")

    return routes


def _router() -> APIRouter:
    routes = APIRouter(route_class=ParsedRoute, tags=["documents"], responses=error_replies())

    @routes.post(
        ROUTE,
        status_code=201,
        response_model_exclude_unset=True,
        responses={409: {"model": ErrorReply, "description": "The id is taken."}},
    )
    async def create_document(body: NewDocument, response: Response, served: Served) -> DocumentObject:
        """Stores a document. An id that is taken gives 409; PUT replaces."""
        draft = await served.in_thread(served.accepted, body, body.id)
        document = await served.in_thread(served.store.create, served.tenant, draft, body.id)
        return await _stored(served, document, response, draft)

    @routes.get(ROUTE, response_model_exclude_unset=True)
    async def list_documents(
        served: Served,
        limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = 20,
        after: Annotated[str | None, Query(max_length=MAX_ID_CHARACTERS)] = None,
        order: Literal["asc", "desc"] = "desc",
        search: Annotated[
            str, Query(max_length=MAX_SEARCH_CHARACTERS, description="Part of the id or title, in any case.")
        ] = "",
        ids: Annotated[
            list[IdInQuery] | None,
            Query(alias="id", max_length=MAX_LIST, description="Only those of these ids that are stored."),
        ] = None,
        include_chunks: Annotated[bool, Query(description="Say where their keys and values are.")] = False,
    ) -> DocumentList:
        """Lists documents in the order of creation, newest first, without their texts.

        `after` is the `next_after` of the reply before (or its `last_id`): whatever is created or deleted meanwhile, no
        other document is left out or listed twice.
        """
        page = await served.in_thread(
            served.store.page, served.tenant, limit=limit, after=after, order=order, search=search, ids=ids
        )
        found = await served.find_chunks(page.documents) if include_chunks else {}
        if found is None:
            told = "this server does not see which chunks of documents are cached; leave include_chunks out"
            raise ApiError(400, told, param="include_chunks")
        return DocumentList.of(page, [DocumentObject.of(each, **_chunks_of(each, found)) for each in page.documents])

    @routes.get(ONE, dependencies=NO_VERB, response_model_exclude_unset=True)
    async def get_document(
        document_id: IdInPath,
        response: Response,
        served: Served,
        version: Annotated[
            int | None, Query(ge=1, le=2**31, description="An earlier version. Default: the current one.")
        ] = None,
        include_versions: Annotated[bool, Query(description="List the versions that can be read.")] = False,
    ) -> DocumentObject:
        """A document with its text, and where its keys and values are."""
        document = await served.in_thread(served.store.get, served.tenant, document_id, version)
        found = await served.find_chunks([document])
        details: dict[str, Any] = {"text": document.content.text, **_chunks_of(document, found)}
        if include_versions:
            versions = await served.in_thread(served.store.versions, served.tenant, document_id)
            details["versions"] = [DocumentVersion.of(each) for each in versions]
        return _described(document, response, **details)

    @routes.put(
        ONE,
        dependencies=NO_VERB,
        response_model_exclude_unset=True,
        responses={201: {"model": DocumentObject, "description": "It is new."}, **CHANGED},
    )
    async def put_document(
        document_id: IdInPath, body: NewDocument, response: Response, served: Served, if_match: IfMatch = None
    ) -> DocumentObject:
        """Stores a document under an id, in place of the one that is there.

        The body may repeat the id. A request that begins after this reply reads the new text; one that reads the old
        text ends on it. Where the old text is cached, the reply says how many tokens of the new one are kept.
        """
        body.check_id(document_id)
        draft = await served.in_thread(served.accepted, body, document_id)
        document, is_new = await served.in_thread(served.store.put, served.tenant, document_id, draft, _match(if_match))
        response.status_code = 201 if is_new else 200
        return await _stored(served, document, response, draft)

    @routes.patch(ONE, dependencies=NO_VERB, response_model_exclude_unset=True, responses=CHANGED)
    async def change_document(
        document_id: IdInPath, body: DocumentChange, response: Response, served: Served, if_match: IfMatch = None
    ) -> DocumentObject:
        """Changes the metadata of a document, or how much its chunks, now and later, should stay in a full cache."""
        change = partial(served.store.change, served.tenant, document_id, body.values, _match(if_match))
        document = await served.in_thread(change)
        if "priority" in body.model_fields_set:
            await asyncio.shield(served.update_priority(document))
        return _described(document, response)

    @routes.delete(ONE, dependencies=NO_VERB, responses=CHANGED)
    async def delete_document(document_id: IdInPath, served: Served, if_match: IfMatch = None) -> DeletedDocument:
        """Deletes a document and its chunks; a request that reads it ends on it."""
        await served.delete(document_id, _match(if_match))
        return DeletedDocument(id=document_id, object="document.deleted", deleted=True)

    @routes.post(ONE + ":pin", response_model_exclude_unset=True)
    async def pin_document(document_id: IdInPath, response: Response, served: Served) -> DocumentObject:
        """Keeps the chunks of a document in the cache, those there and those computed later; it does not expire."""
        return await set_pinned(document_id, response, served, True)

    @routes.post(ONE + ":unpin", response_model_exclude_unset=True)
    async def unpin_document(document_id: IdInPath, response: Response, served: Served) -> DocumentObject:
        """Lets a document be evicted again; its time to live begins anew."""
        return await set_pinned(document_id, response, served, False)

    async def set_pinned(document_id: str, response: Response, served: ServedDocuments, pinned: bool) -> DocumentObject:
        document = await served.in_thread(served.store.set_pinned, served.tenant, document_id, pinned)
        await asyncio.shield(served.update_pin(document))  # the client may disconnect halfway
        return _described(document, response, **_chunks_of(document, await served.find_chunks([document])))

    return routes


async def _stored(
    served: ServedDocuments, document: StoredDocument, response: Response, draft: DocumentDraft
) -> DocumentObject:
    """Updates the cache after a document was stored, and describes it."""
    kept = await asyncio.shield(served.update_cache([(document, draft)]))
    return _described(document, response, **kept.get(document.id, {}))


def _described(document: StoredDocument, response: Response, **details: Any) -> DocumentObject:
    response.headers["ETag"] = f'"{document.version}"'
    return DocumentObject.of(document, **details)


def _chunks_of(document: StoredDocument, found: Mapping[str, list[ChunkObject]] | None) -> dict[str, Any]:
    return {"chunks": found[document.id]} if found and document.id in found else {}


def _match(header: str | None) -> Match | None:
    return None if header is None else Match.from_header(header)


def _warm_router() -> APIRouter:
    routes = APIRouter(route_class=ParsedRoute, tags=["documents"], responses=error_replies())
    options: dict[str, Any] = {
        "response_model": WarmSummary,
        "response_model_exclude_unset": True,
        "responses": {200: streamed("What became of the documents, or an event for each.")},
    }

    @routes.post(ROUTE + ":warm", **options)
    async def warm_documents(request: Request, body: WarmRequest, served: Served) -> WarmSummary | EventStream:
        """Computes documents now, so that later requests find them: some by id, others as they are, or all."""
        served.check_warmable(body.model)
        documents, warnings = await served.in_thread(_chosen_documents, served, body)
        warn(request, *warnings)
        return await reply(request, served, documents, body)

    @routes.post(ONE + ":warm", **options)
    async def warm_document(
        request: Request, document_id: IdInPath, served: Served, body: WarmOneRequest | None = None
    ) -> WarmSummary | EventStream:
        """Computes one stored document now."""
        body = body or WarmOneRequest()
        served.check_warmable(body.model)
        await served.in_thread(served.store.get, served.tenant, document_id)
        return await reply(request, served, {0: document_id}, body)

    async def reply(
        request: Request,
        served: ServedDocuments,
        documents: Mapping[int, Document | str],
        body: WarmOneRequest | WarmRequest,
    ) -> WarmSummary | EventStream:
        job = WarmJob(documents, body, body.cache_salt or "", warnings_of(request))
        if body.stream:
            return await open_stream(request, _warm_events(served, job))
        return await _warm_all(served, job)

    return routes


async def _warm_events(served: ServedDocuments, job: WarmJob) -> AsyncGenerator[str, None]:
    started, summary = time.monotonic(), WarmSummary.empty()
    evictions = await served.num_evictions()
    async with aclosing(served.warm(job)) as ends:
        async for warmed in ends:
            summary.add(warmed)
            yield event(WarmedObject.of(warmed), "document.failed" if warmed.error else "document.warmed")
    summary.ms = round((time.monotonic() - started) * 1e3, 3)
    await _end(served, job, summary, evictions)
    yield event(summary, "documents.warmed")


async def _warm_all(served: ServedDocuments, job: WarmJob) -> WarmSummary:
    """Returns one reply for all; raises the first error if none could be warmed."""
    started, evictions = time.monotonic(), await served.num_evictions()
    async with aclosing(served.warm(job)) as ends:
        ended = [warmed async for warmed in ends]
    summary = WarmSummary.of(ended, time.monotonic() - started)
    await _end(served, job, summary, evictions)
    return summary


async def _end(served: ServedDocuments, job: WarmJob, summary: WarmSummary, before: int | None) -> None:
    if job.warnings:
        summary.warnings = list(job.warnings)
    now = await served.num_evictions()
    if now is not None and before is not None:
        summary.num_evicted = max(now - before, 0)


def _chosen_documents(
    served: ServedDocuments, body: WarmRequest
) -> tuple[Mapping[int, Document | str], tuple[str, ...]]:
    """Returns ids of stored documents and texts by their places, and warnings.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: an entry without text and id.
    """
    store, tenant = served.store, served.tenant
    chosen, warnings = body.chosen(lambda: [document.id for document in store.documents(tenant)])
    store.check_stored(tenant, [name for name in chosen.values() if isinstance(name, str)])
    return chosen, warnings
