"""Route of /v1/documents:batch: store many documents, from lines of JSON or from files, with a result for each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from kvmosaic.api.upload_batch import FORM, upload
from kvmosaic.api.uploading import UploadSummary
from kvmosaic.server.documents.routes import ROUTE
from kvmosaic.server.documents.writer import ServerWriter
from kvmosaic.server.errors import request_id_of
from kvmosaic.server.openai.replies import error_replies
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

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


def router(services: Services) -> APIRouter:
    """Returns the route that stores many documents."""
    routes = APIRouter(tags=["documents"], responses=error_replies())

    @routes.post(ROUTE + ":batch", response_model=UploadSummary, openapi_extra=_BODY)
    async def upload_documents(request: Request, tenant: Annotated[Tenant, Depends(current_tenant)]) -> Response:
        """Stores many documents without computing them; one that is refused does not stop the others.

        A document whose id is taken is replaced. What was stored before the client disconnects stays.
        """
        content = await upload(request, ServerWriter(services, tenant.name, request_id_of(request)))
        return Response(content, media_type="application/json")

    return routes
