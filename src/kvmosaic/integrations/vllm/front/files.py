"""/v1/files next to vLLM's own routes: OpenAI's way to upload a file, which becomes a stored document."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.api.errors import read_body
from kvmosaic.api.files import DeletedFile, FileObject
from kvmosaic.api.stored_files import create_file, find_file, list_files
from kvmosaic.integrations.vllm.front.replies import check_method, json_reply
from kvmosaic.prompt.document_id import MAX_ID_CHARACTERS

ROUTE = "/v1/files"
_CONTENT = "/content"


class _ListQuery(BaseModel):
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
    return await writer.in_thread(_answered, request, name, writer)


def _answered(request: Request, name: str, writer: DocumentWriter) -> Response:
    store, tenant = writer.store, writer.tenant
    if not name:
        query = read_body(_ListQuery, dict(request.query_params), "query")
        return json_reply(
            list_files(store, tenant, query.limit, query.after, query.order, query.purpose), has_defaults=True
        )
    if name.endswith(_CONTENT):
        check_method(request.method, "GET")
        return PlainTextResponse(find_file(store, tenant, name.removesuffix(_CONTENT)).content.text)
    check_method(request.method, "GET", "DELETE")
    file = find_file(store, tenant, name)
    if request.method == "GET":
        return json_reply(FileObject.of(file), has_defaults=True)
    store.delete(tenant, name)
    return json_reply(DeletedFile(id=name), has_defaults=True)
