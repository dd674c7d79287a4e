"""Conversations of Anthropic's API as the prompt encoder reads them: texts, and documents before them or in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.errors import InvalidDocument, InvalidMessages
from kvmosaic.prompt import Document
from kvmosaic.prompt.found_documents import FoundDocument
from kvmosaic.prompt.placed_documents import PlacedDocuments, content_key, placed_content
from kvmosaic.prompt.preamble import is_marked
from kvmosaic.server.anthropic.blocks import (
    ReadablePart,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvmosaic.server.anthropic.request import CountRequest, Message
from kvmosaic.web.errors import ApiError

_TEMPLATE_DOCUMENTS = "documents"
"""The variable of chat templates that have a format for documents."""
_FAILED = "Error:"
"""Before what a tool returned that failed, which templates have no field for."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages with texts as contents, and their documents.

    A chat template that has a format for documents writes them before the messages. Otherwise they stay at their place
    in the messages, as those in results of tools always do.
    """

    is_in_place: bool
    """Whether documents stay in messages of the user."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    documents: list[Document] = field(default_factory=list)
    """Documents that go before the messages, in order."""
    places: dict[str, tuple[FoundDocument, ...]] = field(default_factory=dict)
    blank: list[str] = field(default_factory=list)
    """Places of documents without text, which are left out."""

    @property
    def placed(self) -> PlacedDocuments | None:
        """The documents in its messages; None without any."""
        return PlacedDocuments(self.places) if self.places else None

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the last message, as it does after one of the assistant."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    @property
    def has_turns(self) -> bool:
        """Whether there is a message to be answered."""
        return any(message["role"] != "system" for message in self.messages)

    def add(self, role: str, parts: Sequence[str | Document], **extra: Any) -> None:
        """Appends a message; one that says nothing is left out."""
        if role == "user" and not self.is_in_place:
            self.documents.extend(part for part in parts if isinstance(part, Document))
            parts = [part for part in parts if isinstance(part, str)]
        content, found = placed_content(parts)
        if not content.strip() and not extra.get("tool_calls") and role != "tool":
            return
        if found:
            self.places[content_key(content)] = found
        self.messages.append({"role": role, "content": content, **extra})


def read_conversation(body: CountRequest, template: str) -> Conversation:
    """Returns the conversation of a body, for a chat template.

    Raises:
        ApiError: 400, a document that cannot be used, or a block where it cannot be.
        InvalidMessages: there is nothing to answer.
    """
    conversation = _read(body, is_in_place=_TEMPLATE_DOCUMENTS not in template)
    if not conversation.has_turns and conversation.documents:  # they are all that was said
        conversation = _read(body, is_in_place=True)
    if not conversation.has_turns:
        raise InvalidMessages("there is nothing to answer: the messages hold no text and no document; send one")
    return conversation


def _read(body: CountRequest, *, is_in_place: bool) -> Conversation:
    conversation = Conversation(is_in_place)
    if body.system:
        said = body.system
        system = said if isinstance(said, str) else [block.model_dump(exclude_none=True) for block in said]
        conversation.messages.append({"role": "system", "content": system})
    for role, blocks in _turns(body.messages):
        if role == "assistant":
            _add_answer(conversation, blocks)
        else:
            _add_texts(conversation, role, blocks)
    return conversation


Blocks = list[tuple[int, int, Any]]
"""Blocks of a turn, each with the number of its message and its place there."""


def _turns(messages: Sequence[Message]) -> Iterator[tuple[str, Blocks]]:
    """Yields role and blocks of every turn: messages in a row with the same role."""
    role, blocks = messages[0].role, Blocks()
    for number, message in enumerate(messages):
        if message.role != role:
            yield role, blocks
            role, blocks = message.role, []
        content = message.content
        texts = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        blocks += [(number, place, block) for place, block in enumerate(texts)]
    yield role, blocks


def _add_answer(conversation: Conversation, blocks: Blocks) -> None:
    texts = [block.text for _, _, block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for _, _, block in blocks if isinstance(block, ThinkingBlock)]
    calls = [_call(block) for _, _, block in blocks if isinstance(block, ToolUseBlock)]
    for number, place, block in blocks:
        if not isinstance(block, TextBlock | ThinkingBlock | ToolUseBlock):
            raise _misplaced(block, number, place, "the user")
    extra: dict[str, Any] = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    if calls:
        extra["tool_calls"] = calls
    conversation.add("assistant", texts, **extra)


def _add_texts(conversation: Conversation, role: str, blocks: Blocks) -> None:
    """Adds results of tools as messages of their own, then the rest as one message."""
    parts = list[str | Document]()
    last = len(blocks) - 1
    for index, (number, place, block) in enumerate(blocks):
        if isinstance(block, ThinkingBlock | ToolUseBlock):
            raise _misplaced(block, number, place, "the assistant")
        if role == "system" and not isinstance(block, TextBlock):
            raise _misplaced(block, number, place, "the user")
        where = f"messages.{number}.content.{place}"
        if isinstance(block, ToolResultBlock):
            conversation.add("tool", _result(conversation, block, where), tool_call_id=block.tool_use_id)
        else:
            marked = isinstance(block, TextBlock) and is_marked({"cache_control": block.cache_control})
            is_document = marked and role == "user" and index != last
            parts.append(_part(conversation, block, where, is_document=is_document))
    conversation.add(role, parts)


def _part(conversation: Conversation, block: ReadablePart, where: str, *, is_document: bool = False) -> str | Document:
    if isinstance(block, TextBlock) and not (is_document and block.text.strip()):
        return block.text
    try:
        document = Document(block.text) if isinstance(block, TextBlock) else block.document()
    except InvalidDocument as error:
        raise ApiError(400, f"{where}: {error}", param=where) from None
    if document is None:
        conversation.blank.append(where)
    return document or ""


def _result(conversation: Conversation, block: ToolResultBlock, where: str) -> list[str | Document]:
    content = block.content or ""
    if isinstance(content, str):
        parts: list[str | Document] = [content]
    else:
        parts = [_part(conversation, each, f"{where}.content.{place}") for place, each in enumerate(content)]
    return [_FAILED, *parts] if block.is_error else parts


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = json.dumps(block.input, ensure_ascii=False)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _misplaced(block: Any, number: int, place: int, author: str) -> ApiError:
    where = f"messages.{number}.content.{place}"
    return ApiError(400, f"{where}: a block of type {block.type!r} goes in a message of {author} only", param=where)
