"""/v1/documents:warm through vLLM itself: each document is computed by a request of one token."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.types import Scope

from kvmosaic.api.errors import ApiError
from kvmosaic.api.warming import WarmedDocument, WarmJob
from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.contract import FIELD, Composition, EncodedRequest, composed
from kvmosaic.integrations.vllm.front.internal_requests import api_error, ask
from kvmosaic.integrations.vllm.front.settings import TENANT
from kvmosaic.layout import context_with
from kvmosaic.prompt import Document
from kvmosaic.web.errors import as_api_error

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments


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
