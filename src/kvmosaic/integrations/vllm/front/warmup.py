"""Cache warming: prefills documents with requests of one token through vLLM itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvmosaic.errors import KVMosaicError
from kvmosaic.integrations.vllm.contract import FIELD
from kvmosaic.integrations.vllm.front.document_fields import read_documents
from kvmosaic.integrations.vllm.front.encoded_request import composed
from kvmosaic.integrations.vllm.front.error_replies import Refusal, refusal_of
from kvmosaic.integrations.vllm.front.internal_requests import Scope, ask

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

MAX_WARM = 10_000
AT_ONCE = 4
_FIELDS = ("ids", "documents", "system", "cache_salt", "endpoint", "stream", "model", "chunk_context")


async def warm(
    front: ComposedDocuments, scope: Scope, entries: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Prefills documents separately, a few concurrently; returns the result of each. A failed one does not stop others.

    Raises:
        Refusal: invalid options, too many documents, or every document failed.
    """
    if unknown := next((name for name in options if name not in _FIELDS), None):
        raise Refusal(400, f"there is no field {unknown!r:.80}; there are {', '.join(_FIELDS)}", param=unknown[:200])
    if options.get("stream"):
        raise Refusal(400, "inside vLLM warming sends no events; leave stream out", param="stream")
    if len(entries) > MAX_WARM:
        raise Refusal(400, f"{len(entries)} documents at once; at most {MAX_WARM} can be warmed: send fewer")
    for name in ("system", "cache_salt", "endpoint", "model"):
        if options.get(name) is not None and not isinstance(options[name], str):
            raise Refusal(400, f"{name} is {options[name]!r:.80}; send a text", param=name)
    begun, turns = time.monotonic(), asyncio.Semaphore(AT_ONCE)
    refusals: list[Refusal] = []

    async def one(index: int, entry: Any) -> dict[str, Any]:
        async with turns:
            told: dict[str, Any] = {"index": index, "id": entry.get("id") if isinstance(entry, dict) else None}
            try:
                found = await _warm_one(front, scope, entry, options)
            except Refusal as refusal:
                refusals.append(refusal)
                return {"object": "document.failed", **told, "error": refusal.body["error"]}
            return {"object": "document.warmed", **told, **found}

    data = await asyncio.gather(*(one(index, entry) for index, entry in enumerate(entries)))
    if refusals and len(refusals) == len(data):
        raise refusals[0]
    warmed = [each for each in data if "error" not in each]
    num_cached = sum(bool(each["was_cached"]) for each in warmed)
    return {
        "object": "documents.warmed",
        "num_documents": len(data),
        "num_computed": len(warmed) - num_cached,
        "num_cached": num_cached,
        "num_failed": len(refusals),
        "tokens": sum(each["tokens"] for each in warmed),
        "ms": round((time.monotonic() - begun) * 1e3, 3),
        "data": data,
    }


async def _warm_one(front: ComposedDocuments, scope: Scope, entry: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    begun = time.monotonic()
    ready = await front.in_thread(_prompt_of, front, scope, entry, options)
    composition = ready.composition
    body = {
        "prompt": list(ready.token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": composition.to_params(),
        **{name: options[name] for name in ("model", "cache_salt") if options.get(name) is not None},
    }
    reply = await ask(front.app, scope, "POST", "/v1/completions", body)
    try:
        answer = json.loads(reply.content)
    except ValueError:
        answer = {}
    if reply.status != 200:
        error = answer.get("error") if isinstance(answer, dict) else None
        told = error.get("message") if isinstance(error, dict) else error
        raise Refusal(reply.status, f"vLLM refuses it: {told!s:.1000}")
    report = (answer.get("kv_transfer_params") or {}).get(FIELD) or {}
    actions = [each.get("action") for each in report.get("documents", ())]
    return {
        "tokens": sum(composition.chunks),
        "chunks": len(composition.chunks),
        "was_cached": bool(actions) and all(action in ("reused", "moved") for action in actions),
        "ms": round((time.monotonic() - begun) * 1e3, 3),
    }


def _prompt_of(front: ComposedDocuments, scope: Scope, entry: Any, options: Mapping[str, Any]) -> Any:
    """The prompt of a request with this document alone."""
    try:
        documents = read_documents([entry], front.handles.document, 1)
        renderer = front.renderer(scope)
        prompt = renderer.warming(documents, options.get("system"), options.get("endpoint"))
        how = front.settings.how.updated({"chunk_context": options.get("chunk_context")})
        return composed(prompt, how, renderer.model.trained_positions)
    except KVMosaicError as error:
        raise refusal_of(error) from error
