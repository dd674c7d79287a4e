"""Rewriting of bodies with documents into bodies for vLLM: token ids and segment boundaries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvmosaic.api.errors import ApiError
from kvmosaic.api.json_limits import mended
from kvmosaic.errors import InvalidPrompt, KVMosaicError
from kvmosaic.layout import context_with
from kvmosaic.prompt import Prompt, PromptSettings
from kvmosaic.prompt.patterns import HINTS, MARK_HINT, ONLY_AUTO, read_find_documents
from kvmosaic.prompt.preamble import MARKS
from kvmosaic.vllm.contract import FIELD, FIELDS, OF_STORED, Composition, How, composed
from kvmosaic.vllm.front.body_prompt import Renderer
from kvmosaic.vllm.front.pool_updates import api_error

Route = Literal["chat", "completion", "response"]
COMPLETIONS = "/v1/completions"
ROUTES: dict[str, Route] = {
    "/v1/chat/completions": "chat",
    COMPLETIONS: "completion",
    "/v1/responses": "response",
}
_TOKENS = "prompt_token_ids"
_OWN_BORDERS = f'"{FIELD}"'.encode()
_OTHERWISE: dict[str, tuple[Any, ...]] = {
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "add_special_tokens": (None, False),
}
"""Fields that would change the prompt again, and their neutral values."""

_CHAT_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None,),
}
_OF_CONVERSATIONS = {
    "messages", "tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "continue_final_message",
    "chat_template", "chat_template_kwargs", "reasoning_effort", "include_reasoning", "max_completion_tokens",
    "logprobs", "top_logprobs", "echo", "add_special_tokens",
}  # fmt: skip
"""Fields of conversations, which a completion does not have."""


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A body for vLLM, and the format of its answer."""

    content: bytes
    num_choices: int
    """Number of answers."""
    includes_usage: bool
    """Whether the last chunk of a stream holds the usage."""
    warnings: tuple[str, ...] = ()
    """What differs in the prompt from the body."""
    is_elsewhere: bool = False
    """Whether a conversation is sent to /v1/completions, since this vLLM takes token ids only there."""


def may_have_documents(content: bytes, settings: PromptSettings) -> bool:
    """Whether a body may have documents; True is always safe, since escapes or UTF-16 could hide anything."""
    separator = settings.chunk_separator
    names = read_find_documents(settings.find_documents)
    has_hint = names != ONLY_AUTO or settings.document_pattern or any(hint.encode() in content for hint in HINTS)
    if (names and (has_hint or MARK_HINT.search(content))) or b'"find_documents"' in content:
        return True
    if b"\\u" in content or b"\0" in content or b'"documents"' in content or _OWN_BORDERS in content:
        return True
    if any(mark.encode() in content for mark in MARKS):
        return True
    return separator is not None and json.dumps(separator, ensure_ascii=False)[1:-1].encode() in content


def rewritten(content: bytes, route: Route, renderer: Callable[[], Renderer], default: How) -> Rewritten | None:
    """Composes the documents of a body; None if it has none, so that it is passed to vLLM unchanged.

    A body that already has segment boundaries is checked and stays as it is.

    Raises:
        ApiError: invalid documents, or fields that do not go with them.
    """
    said: tuple[str, ...] = ()
    try:
        body = json.loads(content)
        with suppress(ApiError):  # in a name, which vLLM may take
            body, said = mended(body) if b"\\u" in content else (body, ())
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    own: Renderer | None = None
    try:
        own = copy(renderer())
        ready, warnings = _rewritten(body, route, own, default), own.given.warnings
        if ready is None and warnings:  # all documents are blank
            ready = _as_it_is(_json({name: value for name, value in body.items() if name != "documents"}), body)
        return None if ready is None else replace(ready, content=ready.content or content, warnings=(*said, *warnings))
    except KVMosaicError as error:
        raise api_error(error, own.given.places if own else ()) from error


def _rewritten(body: dict[str, Any], route: Route, renderer: Renderer, default: How) -> Rewritten | None:
    prompt = getattr(renderer, route)(body)
    if prompt is not None and prompt.is_found:
        with suppress(ApiError, KVMosaicError):  # found in text, not sent as documents: vLLM answers the text
            return _composed(body, route, renderer, default, prompt)
        return None
    params = body.get("kv_transfer_params")
    if prompt is not None:
        return _composed(body, route, renderer, default, prompt)
    if not isinstance(params, dict) or params.get(FIELD) is None:
        return None
    _check_connector(renderer)
    _check_borders(body, route, params)
    return _as_it_is(b"", body)


def _check_connector(renderer: Renderer) -> None:
    if not renderer.model.has_connector:
        raise ApiError(
            501,
            "this vLLM runs without the connector that composes documents; start it with kvmosaic vllm serve, or with "
            """--kv-transfer-config '{"kv_connector": "kvmosaic", "kv_role": "kv_both"}'""",
        )


def _composed(body: dict[str, Any], route: Route, renderer: Renderer, default: How, prompt: Prompt) -> Rewritten:
    _check_connector(renderer)
    is_elsewhere = route != "completion" and not renderer.model.takes_chat_tokens
    if is_elsewhere and (route == "response" or renderer.model.reasons):
        raise ApiError(
            501,
            "this vLLM takes no token ids here, so documents cannot be composed; send the prompt to /v1/completions, "
            "or update vLLM (0.32 takes them)",
            param="documents",
        )
    _check_others(body, route)
    how = default.updated(body | {"chunk_context": context_with(body.get("companions"), body.get("chunk_context"))})
    ready = composed(prompt, how, renderer.model.facts, renderer.words)
    params = _given_params(body)
    if ready.composition is not None:
        params |= renderer.with_stored_documents(ready.composition).to_params()
    token_ids = list(ready.token_ids)
    changed = {
        name: value
        for name, value in body.items()
        if name not in ("documents", "preamble", "companions", "find_documents", *FIELDS)
    }
    if is_elsewhere:
        changed = _as_completion(changed, token_ids, renderer.model.max_positions)
    elif route == "completion":
        changed["prompt"] = token_ids
        changed.pop("add_special_tokens", None)
    else:
        params[_TOKENS] = token_ids
    changed["kv_transfer_params"] = params
    return replace(_as_it_is(_json(changed), body), is_elsewhere=is_elsewhere)


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _as_it_is(content: bytes, body: dict[str, Any]) -> Rewritten:
    options, number = body.get("stream_options"), body.get("n")
    return Rewritten(
        content,
        num_choices=number if type(number) is int else 1,
        includes_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _check_borders(body: dict[str, Any], route: Route, params: dict[str, Any]) -> None:
    """Checks that boundaries set by the client come with its own token ids, and without what stored documents say."""
    fields = params[FIELD]
    if taken := [name for name in OF_STORED if isinstance(fields, dict) and fields.get(name)]:
        raise ApiError(
            400,
            f"kv_transfer_params.{FIELD}.{taken[0]} is set by the server, for stored documents; leave it out, or store "
            "the document and pin it with POST /v1/documents/ID:pin",
            param="kv_transfer_params",
        )
    token_ids = body.get("prompt") if route == "completion" else params.get(_TOKENS)
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        place = "prompt" if route == "completion" else f"kv_transfer_params.{_TOKENS}"
        raise ApiError(
            400,
            f"kv_transfer_params.{FIELD} counts token ids; send {place} as a list of them, or documents as text",
            param="kv_transfer_params",
        )
    Composition.from_params(params, len(token_ids))


def _check_others(body: dict[str, Any], route: Route) -> None:
    for name, allowed in _OTHERWISE.items():
        value = body.get(name)
        is_fine = value in allowed or (name == "add_special_tokens" and route == "completion" and value is True)
        if not is_fine:
            raise ApiError(400, f"{name} is {value!r:.80}, which does not go with documents; leave it out", param=name)


def _given_params(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("kv_transfer_params") or {}
    if not isinstance(params, dict):
        raise InvalidPrompt(f"kv_transfer_params is {params!r:.80}; send an object, or leave it out")
    for name in (FIELD, _TOKENS):
        if name in params:
            raise ApiError(
                400,
                f"kv_transfer_params has {name}, and there are documents too; send one of them",
                param="kv_transfer_params",
            )
    return dict(params)


def _as_completion(body: Mapping[str, Any], token_ids: Sequence[int], max_positions: int | None) -> dict[str, Any]:
    """The body of /v1/completions that samples the same answer.

    Raises:
        ApiError: 501, a field that only vLLM's chat route supports.
    """
    for name, allowed in _CHAT_ONLY.items():
        if body.get(name) not in allowed:
            raise ApiError(
                501,
                f"with documents, this vLLM knows no {name} in a conversation; leave {name} out, or update vLLM (0.32 "
                "knows them)",
                param=name,
            )
    changed = {name: value for name, value in body.items() if name not in _OF_CONVERSATIONS}
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if most is None and max_positions is not None:
        most = max(max_positions - len(token_ids), 1)
    if most is not None:
        changed["max_tokens"] = most
    return {**changed, "prompt": list(token_ids)}
