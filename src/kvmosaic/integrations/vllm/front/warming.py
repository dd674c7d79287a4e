"""/v1/documents:warm through vLLM itself: each document is computed by a request of one token."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Scope

from kvmosaic.api.errors import ApiError
from kvmosaic.api.fields import Name
from kvmosaic.api.warming import WarmedDocument, WarmRequest, WarmSummary
from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.contract import FIELD, Composition, EncodedRequest, composed
from kvmosaic.integrations.vllm.front.internal_requests import api_error, ask
from kvmosaic.integrations.vllm.front.replies import json_reply
from kvmosaic.integrations.vllm.front.settings import TENANT
from kvmosaic.layout import context_with
from kvmosaic.prompt import Document

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

MAX_WARM = 10_000
AT_ONCE = 4


class WarmBody(WarmRequest):
    """What to warm, and for which of vLLM's models."""

    model: Name | None = None


class Warming:
    """Prefills documents separately, a few concurrently. A failed one does not stop others."""

    def __init__(self, front: ComposedDocuments, body: WarmBody, scope: Scope) -> None:
        self._front = front
        self._body = body
        self._scope = scope

    async def run(self, name: str) -> Response:
        """Warms the document with this id, or ("") those of the body.

        Raises:
            ApiError: none could be warmed, there are too many, or events are asked for.
        """
        if self._body.stream:
            raise ApiError(400, "inside vLLM warming sends no events; leave stream out", param="stream")
        chosen = (name,) if name else await self._front.in_thread(self._chosen)
        if len(chosen) > MAX_WARM:
            raise ApiError(400, f"{len(chosen)} documents at once; at most {MAX_WARM} can be warmed: send fewer")
        begun, running = time.monotonic(), asyncio.Semaphore(AT_ONCE)

        async def one(index: int, document: Document | str) -> WarmedDocument:
            async with running:
                try:
                    return await self._warm_one(index, document)
                except ApiError as error:
                    return WarmedDocument(index, _id_of(document), error=error)

        warmed = await asyncio.gather(*(one(index, document) for index, document in enumerate(chosen)))
        return json_reply(WarmSummary.of(warmed, time.monotonic() - begun))

    def _chosen(self) -> tuple[Document | str, ...]:
        return self._body.chosen(lambda: [each.id for each in self._front.documents.documents(TENANT)])

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
            **self._body.model_dump(include={"model", "cache_salt"}, exclude_none=True),
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
                document = store.get(TENANT, document).content
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
