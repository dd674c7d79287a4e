"""Blocks of messages in Anthropic's API: texts, documents, search results, calls of tools and their results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvmosaic.api.fields import Body, Ignored, Name, Plain, Text, unsupported
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import MAX_MESSAGES

Mark = Annotated[bool | Plain | None, Field(examples=[{"type": "ephemeral"}])]
_TYPES = ("text", "document", "search_result", "thinking", "tool_use", "tool_result")
_ONLY_TEXT = "only text can be read"
_REASONS = {
    "image": _ONLY_TEXT,
    "container_upload": _ONLY_TEXT,
    "base64": "send the text of the file as a source of type 'text'",
    "url": "nothing is fetched; send the text of the file as a source of type 'text'",
    "file": "no files are kept here; send the text as a source of type 'text', or store it with PUT /v1/documents/{id}",
    "redacted_thinking": "it cannot be read",
}


def _refuse_type(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("block", "must be a JSON object with a 'type', such as {example}", {
            "example": '{"type": "text", "text": "..."}',
        })  # fmt: skip
    reason = _REASONS.get(kind, "this type is not known here")
    raise PydanticCustomError(
        "unsupported", "type {kind} is not supported: {reason}", {"kind": f"{kind!r:.80}", "reason": reason}
    )


Refused = Annotated[Any, AfterValidator(_refuse_type), WithJsonSchema({"not": {}})]
"""A block or source of a type that cannot be read."""


def _tag_of(*known: str) -> Discriminator:
    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        return kind if kind in known else "other"

    return Discriminator(tag)


def _check_citations(value: Any) -> Any:
    if value is not None and value.get("enabled") not in (None, False):
        raise unsupported("answers do not cite", matters=False)
    return value


Citations = Annotated[
    Plain | None, AfterValidator(_check_citations), Field(description="Ignored with a warning where `enabled` is true.")
]


class TextBlock(Body):
    """A text. In messages of the user, a mark makes it a document, unless it is the last block."""

    type: Literal["text"]
    text: Text
    cache_control: Mark = None
    citations: Ignored = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES)]


class ThinkingBlock(Body):
    """What a model thought in an earlier answer; chat templates read it as `reasoning_content`."""

    type: Literal["thinking"]
    thinking: Text
    signature: Ignored = None


class TextSource(Body):
    """A plain text."""

    type: Literal["text"]
    data: Text
    media_type: Literal["text/plain"] = "text/plain"


SourceBlock = Annotated[Annotated[TextBlock, Tag("text")] | Annotated[Refused, Tag("other")], _tag_of("text")]


class ContentSource(Body):
    """Blocks of text, which are read one below the other."""

    type: Literal["content"]
    content: Text | Annotated[list[SourceBlock], Field(max_length=MAX_MESSAGES)]


class DocumentBlock(Body):
    """A document, which is computed once and reused at any place of any request."""

    type: Literal["document"]
    source: Annotated[
        Annotated[TextSource, Tag("text")]
        | Annotated[ContentSource, Tag("content")]
        | Annotated[Refused, Tag("other")],
        _tag_of("text", "content"),
    ]
    title: Name | None = None
    context: Annotated[Text | None, Field(description="What the model reads of the document before its text.")] = None
    citations: Citations = None
    cache_control: Ignored = None

    def document(self) -> Document | None:
        """Returns the document: the model reads title, context and text. None: its text is blank.

        Raises:
            InvalidDocument: a text that cannot be used.
        """
        source = self.source
        text = source.data if isinstance(source, TextSource) else _joined(source.content)
        if not text.strip():
            return None
        if self.context and self.context.strip():
            text = f"{self.context.strip()}\n\n{text}"
        return Document(text, self.title)


class SearchResultBlock(Body):
    """A search result: a document with its source in a line before its text."""

    type: Literal["search_result"]
    source: Name
    title: Name
    content: Annotated[TextBlocks, Field(min_length=1)]
    citations: Citations = None
    cache_control: Ignored = None

    def document(self) -> Document | None:
        """Returns the document: the model reads title, source and text. None: its text is blank.

        Raises:
            InvalidDocument: a text that cannot be used.
        """
        text = _joined(self.content)
        if not text.strip():
            return None
        return Document(f"{self.source}\n{text}" if self.source.strip() else text, self.title)


def _joined(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


ResultPart = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[Refused, Tag("other")],
    _tag_of("text", "document", "search_result"),
]
ReadablePart = TextBlock | DocumentBlock | SearchResultBlock


class ToolUseBlock(Body):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Plain
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Body):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Text | Annotated[list[ResultPart], Field(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = False
    cache_control: Ignored = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[Refused, Tag("other")],
    _tag_of(*_TYPES),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": list(_TYPES)}},
            "description": "A block as in Anthropic's API; see docs/server/anthropic.md for its fields.",
        }
    ),
]
"""A block of a message. The OpenAPI document names the types only: all their combinations are too many for generators
of clients and of tests."""
Content = Text | Annotated[list[Block], Field(max_length=MAX_MESSAGES)]
