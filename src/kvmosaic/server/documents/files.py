"""Routes of /v1/files: OpenAI's way to upload a file, which becomes a stored document; and its routes not served."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import PlainTextResponse

from kvmosaic.api import stored_files
from kvmosaic.api.files import DeletedFile, FileList, FileObject, Purpose
from kvmosaic.api.stored_files import ANCHOR, MAX_SECONDS, MIN_SECONDS, SECONDS, find_file, not_served
from kvmosaic.api.upload_batch import FORM
from kvmosaic.prompt.document_id import ID_PATTERN, MAX_ID_CHARACTERS
from kvmosaic.server.documents.cached import drop_superseded
from kvmosaic.server.documents.writer import ServerWriter
from kvmosaic.server.errors import request_id_of
from kvmosaic.server.openai.replies import error_replies
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

ROUTE = "/v1/files"
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


def router(services: Services) -> APIRouter:
    """Returns the routes of files."""
    routes = APIRouter(tags=["files"], responses=error_replies())
    store = services.documents

    @routes.post(ROUTE, openapi_extra=_FORM)
    async def create_file(request: Request, tenant: Asker) -> FileObject:
        """Stores the text of a file as a document, whose id is that of the file."""
        return await stored_files.create_file(request, ServerWriter(services, tenant.name, request_id_of(request)))

    @routes.get(ROUTE)
    async def list_files(
        tenant: Asker,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
        after: Annotated[str | None, Query(max_length=MAX_ID_CHARACTERS)] = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> FileList:
        """Lists files in the order of creation, newest first."""
        return await services.in_thread(
            tenant.name, stored_files.list_files, store, tenant.name, limit, after, order, purpose
        )

    @routes.get(ROUTE + "/{file_id}")
    async def get_file(file_id: FileId, tenant: Asker) -> FileObject:
        """A file, without its text."""
        return FileObject.of(await services.in_thread(tenant.name, find_file, store, tenant.name, file_id))

    @routes.get(
        ROUTE + "/{file_id}/content",
        response_model=None,
        responses={200: {"content": {"text/plain": {}}, "description": "The text of the file, as models read it."}},
    )
    async def get_file_content(file_id: FileId, tenant: Asker) -> PlainTextResponse:
        """The text that was read from a file; the file itself is not kept."""
        document = await services.in_thread(tenant.name, find_file, store, tenant.name, file_id)
        return PlainTextResponse(document.content.text)

    @routes.delete(ROUTE + "/{file_id}")
    async def delete_file(file_id: FileId, tenant: Asker) -> DeletedFile:
        """Deletes a file, its document and the KV computed from it."""
        await services.in_thread(tenant.name, find_file, store, tenant.name, file_id)
        await services.in_thread(tenant.name, store.delete, tenant.name, file_id)
        await drop_superseded(services)
        return DeletedFile(id=file_id)

    @routes.api_route("/v1/vector_stores", methods=["GET", "POST"], include_in_schema=False)
    @routes.api_route("/v1/vector_stores/{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    @routes.post("/v1/embeddings", include_in_schema=False)
    @routes.post("/v1/rerank", include_in_schema=False)
    async def refuse(request: Request) -> None:
        """Refuses what other servers do for applications with documents, and says what to do."""
        raise not_served(request.url.path)

    return routes
