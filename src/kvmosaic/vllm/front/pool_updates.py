"""Requests of the front itself, by which document pools learn labels, priorities and pins of stored documents."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope

from kvmosaic.api.errors import ApiError, for_clients, known_error
from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.documents import DocumentStore, StoredDocument, label_in, shown_name
from kvmosaic.vllm.contract import DEFAULT_PRIORITY, FIELD, UPDATE, Composition

if TYPE_CHECKING:
    from kvmosaic.vllm.front.middleware import ComposedDocuments


def api_error(error: Exception, places: Sequence[int] = ()) -> ApiError:
    """The error that a client sees; `places`: see `known_error`."""
    return known_error(error, places) or ApiError(500, for_clients(str(error)))


async def whole_body(receive: Receive, max_bytes: int, way_out: str) -> bytes | None:
    """Reads the body of a request; None if the client disconnected before its end.

    Raises:
        ApiError: 413, it is longer than `max_bytes`; the message ends with `way_out`.
    """
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        content += message.get("body", b"")
        if len(content) > max_bytes:
            raise ApiError(413, f"the body is longer than {max_bytes} bytes{way_out}", code="body_too_large")
        if not message.get("more_body", False):
            return bytes(content)


async def ask(app: ASGIApp, scope: Scope, method: str, path: str, body: Any = None) -> Response:
    """Sends a request with the same headers to another path of the app, and returns its reply."""
    content = b"" if body is None else json.dumps(body).encode()
    kept = [pair for pair in scope["headers"] if pair[0].lower() not in (b"content-length", b"content-type")]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    root = scope.get("root_path", "")
    other = {
        **scope,
        "method": method,
        "path": root + path,
        "raw_path": (root + path).encode(),
        "query_string": b"",
        "headers": headers,
        "state": dict(scope.get("state") or {}),
    }
    parts = [{"type": "http.request", "body": content, "more_body": False}]
    replied: list[Message] = []

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # never reports a disconnect before the reply
        raise AssertionError

    async def send(message: Message) -> None:
        replied.append(message)

    await app(other, receive, send)
    start = next(message for message in replied if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in replied if message["type"] == "http.response.body")
    reply = Response(content, start["status"])
    reply.raw_headers = list(start.get("headers", []))
    return reply


PATIENCE_SECONDS = 5.0
"""A sleeping engine does not answer."""
_RANK = b"x-data-parallel-rank"
_TOKEN = 0
_log = logging.getLogger(__name__)


def with_stored_documents(composition: Composition, store: DocumentStore) -> Composition:
    """A composition of which the report shows ids, and the engine's document pool sees labels and pins."""
    labels = tuple(label_in(name or "")[0] or None for name in composition.ids)
    if not any(labels):
        return composition
    names = [name for name, label in zip(composition.ids, labels, strict=True) if name and label]
    owners = store.owners(DEFAULT_TENANT, names)
    documents = [owners.get(name or "") for name in composition.ids]
    pins = tuple(int(_is_pinned(document, label)) for document, label in zip(documents, labels, strict=True))
    changes = tuple(0 if document is None else document.change for document in documents)
    ids = tuple(None if name is None else shown_name(name) for name in composition.ids)
    return replace(composition, ids=ids, labels=labels, pins=pins if any(pins) else (), changes=changes)


def _is_pinned(document: StoredDocument | None, label: str | None) -> bool:
    """Whether the text with this label is the current one of a pinned document."""
    return document is not None and document.pinned and document.content.label == label


class PoolUpdates:
    """Sends new priorities and pins of stored documents to every engine of this API server.

    vLLM has no other way from an API server to a scheduler than a request, so it is one: of one token, whose
    `kv_transfer_params` the connector reads. What an engine does not learn this way (it sleeps, or is one of another
    API server with an external balancer), it learns with the next request that names the document.
    """

    def __init__(self, front: ComposedDocuments, scope: Scope) -> None:
        self._front, self._scope = front, scope

    async def send(self, changed: Iterable[StoredDocument], *, was_pinned: bool = False) -> None:
        """Sends documents of which pin or priority was set, and which texts are no longer current.

        The latter matter where a pinned document was replaced or deleted. Others are evicted as they are used less.
        """
        documents = list(changed)
        superseded = await self._front.in_thread(self._superseded)
        update = {document.content.label: _claim(document) for document in documents}
        if was_pinned or any(document.pinned for document in documents):
            update = superseded | update
        if not update:
            return
        scopes = [_for_rank(self._scope, rank) for rank in _ranks(self._scope)]
        await asyncio.gather(*(self._ask(scope, update) for scope in scopes))

    def _superseded(self) -> dict[str, Any]:
        """Texts that are no longer current: released, if no request can read them any more."""
        store = self._front.documents
        store.in_grace_period()  # forgets the ones of long ago
        labels = [text.label for text in store.take_superseded() if text.tenant == DEFAULT_TENANT]
        owners = store.owners(DEFAULT_TENANT, labels) if labels else {}
        return {
            label: {"pinned": False, "change": owners[label].change} if label in owners else None for label in labels
        }

    async def _ask(self, scope: Scope, update: dict[str, Any]) -> None:
        body = {
            "prompt": [_TOKEN],
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {FIELD: {UPDATE: update}},
        }
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reply = await ask(self._front.app, scope, "POST", "/v1/completions", body)
        except TimeoutError:
            _log.warning("an engine did not learn new pins and priorities: it does not answer")
            return
        if reply.status_code != 200:
            _log.warning("an engine did not learn new pins and priorities: %s", bytes(reply.body)[:500])


def _claim(document: StoredDocument) -> dict[str, Any]:
    priority = document.content.priority
    return {
        "priority": DEFAULT_PRIORITY if priority is None else priority,
        "pinned": document.pinned,
        "change": document.change,
    }


def _ranks(scope: Scope) -> list[int | None]:
    """The data parallel engines that this API server can address; None: the one that it has."""
    config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    is_internal = not any(
        getattr(parallel, name, False) for name in ("data_parallel_external_lb", "data_parallel_hybrid_lb")
    )
    number = int(getattr(parallel, "data_parallel_size", 1) or 1) if is_internal else 1
    return list(range(number)) if number > 1 else [None]


def _for_rank(scope: Scope, rank: int | None) -> Scope:
    headers = [pair for pair in scope["headers"] if pair[0].lower() != _RANK]
    return {**scope, "headers": headers if rank is None else [*headers, (_RANK, str(rank).encode())]}
