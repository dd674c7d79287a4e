"""Routes of vLLM on which documents cannot be composed: they are refused there, since vLLM would drop them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvmosaic.api.error_forms import is_messages_route
from kvmosaic.api.errors import ApiError

REFUSING = frozenset(
    {
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/responses/render",
        "/tokenize",
        "/invocations",
        "/inference/v1/generate",
    }
)
"""Routes with a prompt; routes that take documents themselves, such as /rerank, are not among them."""
_FIELDS = ("documents", "find_documents")
_BLOCKS = ("document", "search_result")
_PROMPTS = ("messages", "prompt", "input", "token_ids")


def check_no_documents(content: bytes, path: str) -> None:
    """Refuses a body with documents; any other body passes, whatever it holds.

    Raises:
        ApiError: 400, the field or the block, and where documents are composed.
    """
    if not _may_have_documents(content):
        return
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return  # vLLM reports the error best
    if not isinstance(body, dict) or not any(name in body for name in _PROMPTS):
        return
    name = next((name for name in _FIELDS if body.get(name) not in (None, [], "none")), None)
    if name is None and is_messages_route(path):
        name = next(_document_blocks(body), None)
    if name is not None:
        raise ApiError(
            400,
            f"{name}: documents are not composed on {path} inside vLLM, which would drop them; send them to "
            "/v1/chat/completions, /v1/completions or /v1/responses, or leave them out",
            param=name,
        )


def _may_have_documents(content: bytes) -> bool:
    """Whether a body may have documents; True is always safe, since escapes or UTF-16 could hide anything."""
    return any(sign in content for sign in (b"document", b"search_result", b"\\u", b"\0"))


def _document_blocks(body: Mapping[str, Any]) -> Iterator[str]:
    """The places of documents in messages, and in results of tools in them."""
    for number, message in enumerate(_list(body.get("messages"))):
        content = message.get("content") if isinstance(message, Mapping) else None
        for place, block in enumerate(_list(content)):
            where = f"messages.{number}.content.{place}"
            if _is_document(block):
                yield where
            inner = block.get("content") if isinstance(block, Mapping) else None
            yield from (f"{where}.content.{index}" for index, part in enumerate(_list(inner)) if _is_document(part))


def _is_document(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") in _BLOCKS


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
