"""Cache breakpoints: marked parts of a message that become segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import is_system

MARKS = ("cache_control", "prompt_cache_breakpoint")


def take_marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[Document, ...]]:
    """Extracts marked text parts from a conversation, as documents.

        system   [instructions | handbook* | manual*]         *: marked with `cache_control` or
        user     [letter* | question]                            `prompt_cache_breakpoint`

        system text: instructions, handbook     documents: manual, letter     question: question

    Marks count in system and user messages, earlier ones included: what was a document in the first turn of a
    conversation is the same document in the second. The first marked part of the system messages ends the system text,
    as it ends the cached prefix in other APIs; marked parts after it are documents. So are the marked parts of the
    user's messages, except that the last part of a message stays if every part is marked. Unmarked parts stay in their
    message, so nothing changes its role.

    Returns:
        The conversation without the documents, and the documents in order.

    Raises:
        InvalidMessages, InvalidDocument: a marked part without text.
    """
    kept: list[Mapping[str, Any]] = []
    documents: list[Document] = []
    has_system_end = False
    for index, message in enumerate(messages):
        parts = message.get("content")
        is_read = "role" in message and is_system(message)
        if not _is_parts(parts) or not (is_read or message.get("role") == "user"):
            kept.append(message)
            continue
        assert isinstance(parts, Sequence)
        marked = [number for number, part in enumerate(parts) if _is_marked(part)]
        if is_read and marked and not has_system_end:
            has_system_end = True
            marked = marked[1:]
        if not is_read and len(marked) == len(parts):
            marked = marked[:-1]
        documents += [_document(parts[number], index) for number in marked]
        rest = [part for number, part in enumerate(parts) if number not in marked]
        if rest:
            kept.append({**message, "content": rest} if marked else message)
    return kept, tuple(documents)


def _is_parts(content: object) -> bool:
    return isinstance(content, Sequence) and not isinstance(content, str | bytes) and len(content) > 0


def _is_marked(part: object) -> bool:
    return isinstance(part, Mapping) and any(part.get(mark) not in (None, False) for mark in MARKS)


def _document(part: Mapping[str, Any], message: int) -> Document:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidMessages(
            f"message {message} has a marked part of type {part.get('type')!r:.80}; only text is read"
        )
    return Document(text)
