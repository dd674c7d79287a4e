"""Replies of the chat and completion routes, whole and in chunks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.fields import Reply
from kvmosaic.server.generation.answers import Ending
from kvmosaic.server.generation.usage import ReplyReport, Usage
from kvmosaic.server.openai.logprobs import ChatLogprobs, TextLogprobs

ChatEnding = Ending | Literal["tool_calls", "function_call"]


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
    function_call: Annotated[FunctionReply | None, Field(description="The call, where functions were sent.")] = None
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
    function_call: FunctionDelta | None = None
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
