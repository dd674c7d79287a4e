"""Replies of the chat and completion routes, whole and in chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.errors import ErrorDetail
from kvmosaic.api.fields import Reply
from kvmosaic.server.generation.answers import Ending
from kvmosaic.server.generation.usage import ReplyReport, Usage
from kvmosaic.server.openai.logprobs import ChatLogprobs, TextLogprobs

ChatEnding = Ending | Literal["tool_calls"]


class ErrorReply(Reply):
    """An error, in OpenAI's shape."""

    error: ErrorDetail


class FunctionReply(Reply):
    """What is called."""

    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it: check it before use.")]


class ToolCallReply(Reply):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class AnswerMessage(Reply):
    """The answer of a conversation."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Field(description="null: the answer is calls only.")]
    refusal: None = None
    tool_calls: list[ToolCallReply] | None = None
    reasoning_content: Annotated[
        str | None, Field(description="With tools, and for models that have a channel for it.")
    ] = None


class ChatChoice(Reply):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatEnding
    stop_reason: int | str | None


class ChatCompletion(Reply):
    """A whole reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    kvmosaic: ReplyReport


class FunctionDelta(Reply):
    """What is new of a call: its name, or more of its arguments."""

    name: str | None = None
    arguments: str


class CallDelta(Reply):
    """What is new of one call of an answer."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class MessageDelta(Reply):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    reasoning_content: str | None = None


class ChunkChoice(Reply):
    """What is new of one of n answers."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatEnding | None
    stop_reason: int | str | None = None


class ChatChunk(Reply):
    """One event of a streamed reply of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    kvmosaic: ReplyReport | None = None


class TextChoice(Reply):
    """One answer of /v1/completions, or what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Ending | None
    stop_reason: int | str | None


class Completion(Reply):
    """A reply of /v1/completions, whole or one event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    kvmosaic: ReplyReport | None = None


def error_replies(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The declared errors of a route."""
    meanings = {
        400: "Something in the request cannot be used.",
        401: "No API key, or an unknown one.",
        404: "An unknown model, or a document that is not stored.",
        413: "The body is too large.",
        429: "Too many requests wait, or a quota is used up; see Retry-After.",
        500: "Something failed inside.",
        503: "The server is shutting down, or its engine has stopped.",
    }
    known: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply, "description": meanings[status]} for status in statuses or meanings
    }
    return {**known, "default": {"model": ErrorReply, "description": "Any other error, in the same shape."}}


def streamed(description: str, example: str) -> dict[str, Any]:
    """The declared other form of a 200: server-sent events, each with a text of JSON (or [DONE]) as its data."""
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    content = {"text/event-stream": {"itemSchema": event, "example": example}}
    return {"description": description, "content": content}
