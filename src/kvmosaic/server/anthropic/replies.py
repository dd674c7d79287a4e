"""Replies of /v1/messages, whole and as events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.error_forms import MessagesError
from kvmosaic.api.fields import Reply
from kvmosaic.server.generation.usage import ReplyReport, UsageTotals

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_SHARED = ("system", "chunk")
"""Segment kinds that other requests reuse, whatever follows them."""


class MessagesUsage(Reply):
    """Tokens of a request; the three numbers of input tokens add up to those of the prompt."""

    input_tokens: Annotated[int, Field(description="Computed for this request: messages, and text around documents.")]
    cache_creation_input_tokens: Annotated[
        int, Field(description="Computed now, of the system text and of documents, and kept for other requests.")
    ]
    cache_read_input_tokens: Annotated[int, Field(description="Reused.")]
    output_tokens: int


class TextReply(Reply):
    """A text of the answer."""

    type: Literal["text"]
    text: str
    citations: None = None


class ToolUseReply(Reply):
    """A call of a tool in the answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ThinkingReply(Reply):
    """What the model thought, for models with a channel for it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


BlockReply = Annotated[TextReply | ToolUseReply | ThinkingReply, Field(discriminator="type")]


class MessageReply(Reply):
    """A whole reply of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[BlockReply]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    kvmosaic: ReplyReport | None = None


class BlockDelta(Reply):
    """What is new of a block."""

    type: Literal["text_delta", "input_json_delta", "thinking_delta"]
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None


class Ending(Reply):
    """How an answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageEvent(Reply):
    """One event of a streamed reply of /v1/messages."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageReply | None = None
    index: int | None = None
    content_block: BlockReply | None = None
    delta: BlockDelta | Ending | None = None
    usage: MessagesUsage | None = None
    kvmosaic: ReplyReport | None = None


class TokenCount(Reply):
    """A reply of /v1/messages/count_tokens."""

    input_tokens: int


def usage_of(tally: UsageTotals) -> MessagesUsage:
    """Returns the tokens of a request, of which all count as computed until the reuse is known."""
    num_prompt = tally.usage().prompt_tokens
    segments = tally.report().segments
    reused = sum(segment.reused_tokens for segment in segments)
    kept = sum(segment.tokens - segment.reused_tokens for segment in segments if segment.kind in _SHARED)
    return MessagesUsage(
        input_tokens=num_prompt - reused - kept,
        cache_creation_input_tokens=kept,
        cache_read_input_tokens=reused,
        output_tokens=tally.num_answer_tokens,
    )


def messages_error_replies() -> dict[int | str, dict[str, Any]]:
    """The declared errors of these routes."""
    meanings = {
        400: "invalid_request_error: something in the request cannot be used.",
        401: "authentication_error: no API key, or an unknown one.",
        404: "not_found_error: an unknown model, or a document that is not stored.",
        413: "request_too_large: the body is too large.",
        429: "rate_limit_error: too many requests wait, or a quota is used up; see Retry-After.",
        500: "api_error: something failed inside.",
        503: "overloaded_error: the server is shutting down, or its engine has stopped.",
    }
    known: dict[int | str, dict[str, Any]] = {
        status: {"model": MessagesError, "description": meaning} for status, meaning in meanings.items()
    }
    return {**known, "default": {"model": MessagesError, "description": "Any other error, in the same shape."}}
