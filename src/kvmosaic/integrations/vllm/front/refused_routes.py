"""Routes of vLLM on which documents cannot be composed: they are refused there, since vLLM would drop them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvmosaic.api.errors import ApiError

_FIELDS = ("documents", "find_documents")
_BLOCKS = ("document", "search_result")
_PROMPTS = ("messages", "prompt", "input", "token_ids")
_RANKING = {
    "/rerank": "query",
    "/v1/rerank": "query",
    "/v2/rerank": "query",
    "/score": "queries",
    "/v1/score": "queries",
}
"""Routes with documents of their own, and the field of what these are compared with."""
_TEMPLATED = "/cohere/v2/chat"
"""Shows the model its documents by the chat template, as text."""
_MAX_HEADER = 512
_FORM_FIELD = re.compile(
    rb'(?i)content-disposition:[^\r\n]{0,256}[; ]name="?(documents|find_documents)(?:\[\])?["\r\n;]'
)


def check_no_documents(content: bytes, path: str) -> None:
    """Refuses a body with documents on any route that does not compose them; any other body passes.

    Raises:
        ApiError: 400, the field or the block, and where documents are composed.
    """
    if not _may_have_documents(content):
        return
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return  # vLLM reports the error best
    if not isinstance(body, dict) or _has_own_documents(body, path):
        return
    name = next((name for name in _FIELDS if body.get(name) not in (None, [], "none")), None)
    name = name or next(_document_blocks(body.get("messages"), "messages"), None)
    if name is not None:
        raise _refusal(name, path)


class FormCheck:
    """Refuses a form with documents, as its parts arrive."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._rest = b""

    def check(self, part: bytes) -> None:
        """Checks the next part.

        Raises:
            ApiError: 400, it has a field of documents.
        """
        text = self._rest + part
        if (found := _FORM_FIELD.search(text)) is not None:
            raise _refusal(found[1].decode().lower(), self._path)
        self._rest = text[-_MAX_HEADER:]


def _refusal(name: str, path: str) -> ApiError:
    return ApiError(
        400,
        f"{name}: documents are not composed on {path} inside vLLM, which would drop them; send them to "
        "/v1/chat/completions, /v1/completions or /v1/responses, or leave them out",
        param=name,
    )


def _has_own_documents(body: Mapping[str, Any], path: str) -> bool:
    """Whether vLLM itself reads the documents of this body."""
    if path == "/invocations":  # answers bodies of any route
        return any(name in body for name in _RANKING.values()) and not any(name in body for name in _PROMPTS)
    return path == _TEMPLATED or _RANKING.get(path) in body


def _may_have_documents(content: bytes) -> bool:
    """Whether a body may have documents; True is always safe, since escapes or UTF-16 could hide anything."""
    return any(sign in content for sign in (b"document", b"search_result", b"\\u", b"\0"))


def _document_blocks(messages: Any, where: str) -> Iterator[str]:
    """The places of documents in messages, in results of tools in them, and in batches of conversations."""
    for number, message in enumerate(_list(messages)):
        if isinstance(message, list):
            yield from _document_blocks(message, f"{where}.{number}")
        content = message.get("content") if isinstance(message, Mapping) else None
        for place, block in enumerate(_list(content)):
            here = f"{where}.{number}.content.{place}"
            if _is_document(block):
                yield here
            inner = block.get("content") if isinstance(block, Mapping) else None
            yield from (f"{here}.content.{index}" for index, part in enumerate(_list(inner)) if _is_document(part))


def _is_document(block: object) -> bool:
    return isinstance(block, Mapping) and block.get("type") in _BLOCKS


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
