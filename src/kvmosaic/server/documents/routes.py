"""Routes of /v1/documents: create, list, replace, pin, delete and compute stored documents, one or many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, HTTPException, Path, Query, Request, Response

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
from kvmosaic.api.upload_batch import FORM, upload
from kvmosaic.api.uploading import UploadSummary
from kvmosaic.api.warming import WarmedObject, WarmOneRequest, WarmOptions, WarmRequest, WarmSummary
from kvmosaic.documents import DocumentDraft, Match, StoredDocument, shown_name
from kvmosaic.documents.store import MAX_SEARCH_CHARACTERS
from kvmosaic.layout import context_with
from kvmosaic.prompt import Document
from kvmosaic.prompt.document_id import ID_PATTERN, MAX_ID_CHARACTERS
from kvmosaic.prompt.patterns import read_find_documents
from kvmosaic.server.documents.cached import (
    CachedChunk,
    apply_draft,
    count_kept,
    drop_superseded,
    find_cached,
    pin_cached,
    set_cached_priority,
)
from kvmosaic.server.documents.warmup import WarmJob, check_warmable, num_evictions, warm
from kvmosaic.server.documents.writer import ServerWriter
from kvmosaic.server.errors import request_id_of
from kvmosaic.server.generation.sse import EventStream, event, open_stream
from kvmosaic.server.json_body import ParsedRoute
from kvmosaic.server.openai.replies import ErrorReply, error_replies, streamed
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

ROUTE = "/v1/documents"
Asker = Annotated[Tenant, Depends(current_tenant)]
IdInPath = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARACTERS, pattern=ID_PATTERN)]
IdInQuery = Annotated[str, Query(min_length=1, max_length=MAX_ID_CHARACTERS)]
IfMatch = Annotated[
    str | None, Header(alias="If-Match", max_length=4_096, description="The ETag that the change is meant for, or *.")
]


async def _refuse_verb(request: Request) -> None:
    """Refuses other methods than POST for addresses that end in a verb; they name no document."""
    if str(request.path_params["document_id"]).endswith((":warm", ":pin", ":unpin")):
        raise HTTPException(405, headers={"Allow": "POST"})


NO_VERB = (Depends(_refuse_verb),)
CHANGED: dict[int | str, dict[str, Any]] = {
    412: {"model": ErrorReply, "description": "What is stored is not the version that If-Match names."}
}


_BATCH_BODY: dict[str, Any] = {
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


def batch_router(services: Services) -> APIRouter:
    """Returns the route that stores many documents."""
    routes = APIRouter(tags=["documents"], responses=error_replies())

    @routes.post(ROUTE + ":batch", response_model=UploadSummary, openapi_extra=_BATCH_BODY)
    async def upload_documents(request: Request, tenant: Annotated[Tenant, Depends(current_tenant)]) -> Response:
        """Stores many documents without computing them; one that is refused does not stop the others.

        A document whose id is taken is replaced. What was stored before the client disconnects stays.
        """
        content = await upload(request, ServerWriter(services, tenant.name, request_id_of(request)))
        return Response(content, media_type="application/json")

    return routes


def router(services: Services) -> APIRouter:
    """Returns the routes of single documents and of their list."""
    routes = APIRouter(route_class=ParsedRoute, tags=["documents"], responses=error_replies())
    store = services.documents

    @routes.post(
        ROUTE,
        status_code=201,
        response_model_exclude_unset=True,
        responses={409: {"model": ErrorReply, "description": "The id is taken."}},
    )
    async def create_document(body: NewDocument, response: Response, tenant: Asker) -> DocumentObject:
        """Stores a document. An id that is taken gives 409; PUT replaces."""
        writer = ServerWriter(services, tenant.name)
        draft = await writer.in_thread(writer.accepted, body, body.id)
        document = await services.in_thread(tenant.name, store.create, tenant.name, draft, body.id)
        return await _stored(services, tenant, document, response, draft)

    @routes.get(ROUTE, response_model_exclude_unset=True)
    async def list_documents(
        tenant: Asker,
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
        page = await services.in_thread(
            tenant.name, store.page, tenant.name, limit=limit, after=after, order=order, search=search, ids=ids
        )
        found = await find_cached(services, tenant.name, page.documents) if include_chunks else {}
        return DocumentList.of(page, [DocumentObject.of(each, **_chunks_of(each, found)) for each in page.documents])

    @routes.get(ROUTE + "/{document_id:path}", dependencies=NO_VERB, response_model_exclude_unset=True)
    async def get_document(
        document_id: IdInPath,
        response: Response,
        tenant: Asker,
        version: Annotated[
            int | None, Query(ge=1, le=2**31, description="An earlier version. Default: the current one.")
        ] = None,
        include_versions: Annotated[bool, Query(description="List the versions that can be read.")] = False,
    ) -> DocumentObject:
        """A document with its text, and where its keys and values are."""
        document = await services.in_thread(tenant.name, store.get, tenant.name, document_id, version)
        found = await find_cached(services, tenant.name, [document])
        details: dict[str, Any] = {"text": document.content.text, "chunks": _chunk_objects(found[document_id])}
        if include_versions:
            versions = await services.in_thread(tenant.name, store.versions, tenant.name, document_id)
            details["versions"] = [DocumentVersion.of(each) for each in versions]
        response.headers["ETag"] = _etag(document)
        return DocumentObject.of(document, **details)

    @routes.put(
        ROUTE + "/{document_id:path}",
        dependencies=NO_VERB,
        response_model_exclude_unset=True,
        responses={201: {"model": DocumentObject, "description": "It is new."}, **CHANGED},
    )
    async def put_document(
        document_id: IdInPath, body: NewDocument, response: Response, tenant: Asker, if_match: IfMatch = None
    ) -> DocumentObject:
        """Stores a document under an id, in place of the one that is there.

        The body may repeat the id. A request that begins after this reply reads the new text; one that reads the old
        text ends on it. Where the old text is cached, the reply says how many tokens of the new one are kept.
        """
        body.check_id(document_id)
        writer = ServerWriter(services, tenant.name)
        draft = await writer.in_thread(writer.accepted, body, document_id)
        document, is_new = await services.in_thread(
            tenant.name, store.put, tenant.name, document_id, draft, _match(if_match)
        )
        response.status_code = 201 if is_new else 200
        return await _stored(services, tenant, document, response, draft, is_new=is_new)

    @routes.patch(
        ROUTE + "/{document_id:path}", dependencies=NO_VERB, response_model_exclude_unset=True, responses=CHANGED
    )
    async def change_document(
        document_id: IdInPath, body: DocumentChange, response: Response, tenant: Asker, if_match: IfMatch = None
    ) -> DocumentObject:
        """Changes the metadata of a document, or how much its chunks, now and later, should stay in a full cache."""
        change = partial(store.change, tenant.name, document_id, body.values, _match(if_match))
        document = await services.in_thread(tenant.name, change)
        if "priority" in body.model_fields_set:
            await asyncio.shield(set_cached_priority(services, tenant.name, document))
        response.headers["ETag"] = _etag(document)
        return DocumentObject.of(document)

    @routes.delete(ROUTE + "/{document_id:path}", dependencies=NO_VERB, responses=CHANGED)
    async def delete_document(document_id: IdInPath, tenant: Asker, if_match: IfMatch = None) -> DeletedDocument:
        """Deletes a document and its chunks; a request that reads it ends on it."""
        await services.in_thread(tenant.name, store.delete, tenant.name, document_id, _match(if_match))
        await drop_superseded(services)
        return DeletedDocument(id=document_id, object="document.deleted", deleted=True)

    @routes.post(ROUTE + "/{document_id:path}:pin", response_model_exclude_unset=True)
    async def pin_document(document_id: IdInPath, response: Response, tenant: Asker) -> DocumentObject:
        """Keeps the chunks of a document in the cache, those there and those computed later; it does not expire."""
        return await set_pinned(document_id, response, tenant, True)

    @routes.post(ROUTE + "/{document_id:path}:unpin", response_model_exclude_unset=True)
    async def unpin_document(document_id: IdInPath, response: Response, tenant: Asker) -> DocumentObject:
        """Lets a document be evicted again; its time to live begins anew."""
        return await set_pinned(document_id, response, tenant, False)

    async def set_pinned(document_id: str, response: Response, tenant: Tenant, pinned: bool) -> DocumentObject:
        document = await services.in_thread(tenant.name, store.set_pinned, tenant.name, document_id, pinned)
        await asyncio.shield(pin_cached(services, tenant.name, document))  # the client may disconnect halfway
        found = await find_cached(services, tenant.name, [document])
        response.headers["ETag"] = _etag(document)
        return DocumentObject.of(document, chunks=_chunk_objects(found[document_id]))

    return routes


async def _stored(
    services: Services,
    tenant: Tenant,
    document: StoredDocument,
    response: Response,
    draft: DocumentDraft,
    *,
    is_new: bool = True,
) -> DocumentObject:
    """Updates the cache after a document was stored, and describes it."""
    response.headers["ETag"] = _etag(document)
    await asyncio.shield(apply_draft(services, tenant.name, document, draft))
    await drop_superseded(services)
    counted = {} if is_new else await count_kept(services, tenant.name, [(document, draft)])
    return DocumentObject.of(document, **(counted[document.id].described if counted else {}))


def _chunk_objects(chunks: Sequence[CachedChunk]) -> list[ChunkObject]:
    return [_chunk_object(chunk) for chunk in chunks]


def _chunk_object(chunk: CachedChunk) -> ChunkObject:
    _, _, part = shown_name(chunk.name).partition(" ")
    return ChunkObject(
        tier="device",
        state="ready" if chunk.is_ready else "computing",
        part=part.strip("()") or None,
        tokens=chunk.num_tokens,
        blocks=chunk.num_blocks,
        bytes=chunk.num_bytes,
        hits=chunk.hits,
        in_use=chunk.num_users,
        pinned=chunk.pinned,
        salted=chunk.is_salted,
        compute_ms=round(chunk.compute_ms, 3),
    )


def _chunks_of(document: StoredDocument, found: Mapping[str, Sequence[CachedChunk]]) -> dict[str, Any]:
    return {"chunks": _chunk_objects(found[document.id])} if document.id in found else {}


def _etag(document: StoredDocument) -> str:
    return f'"{document.version}"'


def _match(header: str | None) -> Match | None:
    return None if header is None else Match.from_header(header)


def warm_router(services: Services) -> APIRouter:
    """Returns the routes that warm one document, or many."""
    routes = APIRouter(route_class=ParsedRoute, tags=["documents"], responses=error_replies())
    responses: dict[int | str, dict[str, Any]] = {
        200: streamed("What became of the documents, or an event for each.", _WARM_EXAMPLE)
    }

    @routes.post(ROUTE + ":warm", response_model=WarmSummary, response_model_exclude_unset=True, responses=responses)
    async def warm_documents(request: Request, body: WarmRequest, tenant: Asker) -> WarmSummary | EventStream:
        """Computes documents now, so that later requests find them: some by id, others as they are, or all."""
        check_warmable(services, tenant)
        documents = await services.in_thread(tenant.name, _chosen_documents, services, tenant, body)
        return await reply(request, tenant, body, documents, body.cache_salt)

    @routes.post(
        ROUTE + "/{document_id:path}:warm",
        response_model=WarmSummary,
        response_model_exclude_unset=True,
        responses=responses,
    )
    async def warm_document(
        request: Request, document_id: IdInPath, tenant: Asker, body: WarmOneRequest | None = None
    ) -> WarmSummary | EventStream:
        """Computes one stored document now."""
        check_warmable(services, tenant)
        await services.in_thread(tenant.name, services.documents.get, tenant.name, document_id)
        body = body or WarmOneRequest()
        return await reply(request, tenant, body, (document_id,), body.cache_salt)

    async def reply(
        request: Request, tenant: Tenant, body: WarmOptions, documents: tuple[Document | str, ...], salt: str | None
    ) -> WarmSummary | EventStream:
        found = read_find_documents(body.find_documents or ())
        context = context_with(body.companions, body.chunk_context)
        job = WarmJob(documents, body.system, salt or "", body.chat, context, body.preamble, found, body.companions)
        if body.stream:
            return await open_stream(request, _warm_events(services, tenant, job, request_id_of(request)))
        return await _warm_all(services, tenant, job, request_id_of(request))

    return routes


async def _warm_events(services: Services, tenant: Tenant, job: WarmJob, request_id: str) -> AsyncGenerator[str, None]:
    started, summary = time.monotonic(), WarmSummary.empty()
    evictions = await num_evictions(services, tenant)
    async with aclosing(warm(services, tenant, job, request_id)) as ends:
        async for warmed in ends:
            summary.add(warmed)
            yield event(WarmedObject.of(warmed), "document.failed" if warmed.error else "document.warmed")
    summary.ms = round((time.monotonic() - started) * 1e3, 3)
    summary.num_evicted = max(await num_evictions(services, tenant) - evictions, 0)
    yield event(summary, "documents.warmed")


async def _warm_all(services: Services, tenant: Tenant, job: WarmJob, request_id: str) -> WarmSummary:
    """Returns one reply for all; raises the first error if none could be warmed."""
    started, evictions = time.monotonic(), await num_evictions(services, tenant)
    async with aclosing(warm(services, tenant, job, request_id)) as ends:
        ended = [warmed async for warmed in ends]
    summary = WarmSummary.of(ended, time.monotonic() - started)
    summary.num_evicted = max(await num_evictions(services, tenant) - evictions, 0)
    return summary


def _chosen_documents(services: Services, tenant: Tenant, body: WarmRequest) -> tuple[Document | str, ...]:
    """Returns ids of stored documents and texts, in the order of the body.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: an entry without text and id.
    """
    store = services.documents
    chosen = body.chosen(lambda: [document.id for document in store.documents(tenant.name)])
    store.check_stored(tenant.name, [name for name in chosen if isinstance(name, str)])
    return chosen


_WARM_EXAMPLE = (
    'event: document.warmed\ndata: {"object":"document.warmed","index":0,"id":"ferry","tokens":120,"chunks":1,'
    '"was_cached":false,"ms":8.4}\n\nevent: documents.warmed\ndata: {"object":"documents.warmed","num_documents":1,'
    '"num_computed":1,"num_cached":0,"num_failed":0,"tokens":120,"num_evicted":0,"ms":9.1}\n\n'
)
