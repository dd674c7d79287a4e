"""/v1/documents next to vLLM's own routes: stored texts that prompts reference by id."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from kvmosaic.errors import InvalidDocument, KVMosaicError, UnknownDocument
from kvmosaic.integrations.vllm.front.error_replies import Refusal, refusal_of
from kvmosaic.integrations.vllm.front.handles import DocumentDraft, Handles
from kvmosaic.integrations.vllm.front.internal_requests import (
    HTTPReply,
    Receive,
    Scope,
    Send,
    ask,
    json_reply,
    whole_body,
)
from kvmosaic.integrations.vllm.front.stored import StoredDocument
from kvmosaic.integrations.vllm.front.warmup import warm
from kvmosaic.prompt.document_id import VERBS

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

ROUTE = "/v1/documents"
MAX_LIST = 1_000
_VERB = re.compile(rf"(.*):({'|'.join(VERBS)})", re.DOTALL)


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
        except Refusal as refusal:
            reply = json_reply(refusal.body, refusal.status)
        except KVMosaicError as error:
            told = refusal_of(error)
            reply = json_reply(told.body, told.status)
        await reply.send(send)

    async def _reply(self, path: str, scope: Scope, receive: Receive) -> HTTPReply:
        door = await ask(self._front.app, scope, "GET", "/v1/models")
        if door.status >= 400:
            return door
        method, name = scope["method"], path.removeprefix(ROUTE).removeprefix("/")
        verb = None
        if found := _VERB.fullmatch(name):
            name, verb = found[1], found[2]
        body = await self._body(receive) if method in ("POST", "PUT") else {}
        if verb is not None:
            if verb != "warm":
                raise Refusal(404, f"inside vLLM there is no {verb!r} of documents; vLLM's cache decides what stays")
            _check_method(method, "POST")
            return await self._warmed(name, body, scope)
        return await self._front.in_thread(self._changed, method, name, body, scope)  # type: ignore[no-any-return]

    def _changed(self, method: str, name: str, body: dict[str, Any], scope: Scope) -> HTTPReply:
        handles = self._front.handles
        if not name:
            _check_method(method, "GET", "POST")
            if method == "GET":
                return json_reply(_listed(handles, dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))))
            document = handles.create(DocumentDraft.read(body, handles.settings.document_ttl), _id_in(body))
            return _one(handles, document, 201)
        _check_method(method, "GET", "PUT", "DELETE")
        if_match = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"if-match"), None)
        if method == "PUT":
            if _id_in(body) not in (None, name):
                raise InvalidDocument(
                    f"the address names the document {name!r:.300}, the body {body['id']!r:.300}; leave it out"
                )
            document, is_new = handles.put(name, DocumentDraft.read(body, handles.settings.document_ttl), if_match)
            return _one(handles, document, 201 if is_new else 200)
        if method == "DELETE":
            handles.delete(name, if_match)
            return json_reply({"id": name, "object": "document.deleted", "deleted": True})
        return _one(handles, handles.get(name), 200, with_text=True)

    async def _warmed(self, name: str, body: dict[str, Any], scope: Scope) -> HTTPReply:
        handles = self._front.handles
        if name:
            entries: list[Any] = [{"id": name}]
        elif body.get("ids") is not None or body.get("documents") is not None:
            entries = [{"id": each} for each in _list(body, "ids")] + _list(body, "documents")
        else:
            heads = await self._front.in_thread(handles.all)
            entries = [{"id": head.id} for head in heads]
        return json_reply(await warm(self._front, scope, entries, body))

    async def _body(self, receive: Receive) -> dict[str, Any]:
        content = await whole_body(receive, self._front.settings.max_body_bytes, "; send less at once")
        if content is None:
            raise Refusal(400, "the client went away before the end of the body")
        try:
            body = json.loads(content) if content.strip() else {}
        except (ValueError, RecursionError):
            raise Refusal(400, "the body is not JSON", code="invalid_json") from None
        if not isinstance(body, dict):
            raise Refusal(400, f"the body is {body!r:.80}; send an object")
        return body


def _one(handles: Handles, document: StoredDocument, status: int, *, with_text: bool = False) -> HTTPReply:
    fields = _described(handles, document)
    if with_text:
        fields["text"] = document.text
    return json_reply(fields, status, {"etag": f'"{document.version}"'})


def _described(handles: Handles, document: StoredDocument) -> dict[str, Any]:
    hits, expires_at = handles.hits(document.id), document.expires_at
    return {
        "id": document.id,
        "object": "document",
        "title": document.title,
        "metadata": dict(document.metadata),
        "version": document.version,
        "characters": document.characters,
        "bytes": document.num_bytes,
        "created_at": int(document.created_at),
        "updated_at": int(document.updated_at),
        "expires_at": None if expires_at is None else int(expires_at),
        "ttl_seconds": document.ttl_seconds,
        "refresh_ttl_on_hit": document.refresh_ttl_on_hit,
        "pinned": False,
        "priority": 0.5,
        "hits": hits.number,
        "last_used_at": None if hits.last is None else int(hits.last),
    }


def _listed(handles: Handles, query: Mapping[str, str]) -> dict[str, Any]:
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= MAX_LIST):
        raise Refusal(400, f"limit is {limit!r:.80}; give a whole number from 1 to {MAX_LIST}", param="limit")
    if order not in ("asc", "desc"):
        raise Refusal(400, f"order is {order!r:.80}; choose asc or desc", param="order")
    heads = handles.all() if order == "asc" else handles.all()[::-1]
    if (after := query.get("after")) is not None:
        place = _place(heads, after)
        heads = [head for head in heads if (head.number > place if order == "asc" else head.number < place)]
    shown, has_more = heads[: int(limit)], len(heads) > int(limit)
    return {
        "object": "list",
        "data": [_described(handles, head) for head in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": has_more,
        "next_after": f"~{shown[-1].number}" if has_more else None,
    }


def _place(heads: list[StoredDocument], after: str) -> int:
    digits = after[1:]
    if after.startswith("~") and digits.isascii() and digits.isdigit() and len(digits) <= 18:
        return int(digits)
    number = next((head.number for head in heads if head.id == after), None)
    if number is None:
        raise UnknownDocument(
            f"after={after!r:.80} is no document of this list; use the next_after of the reply before, or start again "
            "without it"
        )
    return number


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is not None and not isinstance(value, list):
        raise Refusal(400, f"{name} is {value!r:.80}; send a list", param=name)
    return value or []


def _id_in(body: Mapping[str, Any]) -> str | None:
    value = body.get("id")
    if value is not None and not isinstance(value, str):
        raise InvalidDocument(f"a document's id must be a text, got {value!r:.80}")
    return value


def _check_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise Refusal(405, f"this address takes {', '.join(allowed)} only", code="method_not_allowed")
