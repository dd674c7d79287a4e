"""Items of /v1/responses: messages, calls, results of tools and reasoning, as sent and as they come back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from kvmosaic.api.fields import Body, Ignored, Name, Reply, Text, unsupported
from kvmosaic.prompt.chat_request import content_parts
from kvmosaic.prompt.message import MAX_MESSAGES
from kvmosaic.server.openai.chat_request import Content, TextPart
from kvmosaic.server.openai.logprobs import TokenLogprob

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def plain_content(content: str | list[TextPart]) -> str | list[dict[str, Any]]:
    """Returns a content as the prompt encoder reads it."""
    if isinstance(content, str):
        return content
    return [{**part.model_dump(exclude_none=True), "type": "text"} for part in content]


class InputMessage(Body):
    """A message of the conversation, or an answer of an earlier reply."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as the prompt encoder reads it."""
        return {"role": self.role, "content": plain_content(self.content)}


class InputCall(Body):
    """A call in an earlier reply."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Annotated[Text, Field(description="JSON, as the model wrote it.")]
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns a message with this call."""
        function = {"name": self.name, "arguments": self.arguments}
        calls = [{"id": self.call_id, "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}


class InputResult(Body):
    """What a tool returned."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns the message of the tool."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": plain_content(self.output)}


class ReasoningPart(Body):
    """A part of what a model wrote for itself."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """What a model wrote for itself in an earlier reply; chat templates read it as `reasoning_content`."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(min_length=1, max_length=MAX_MESSAGES)]
    id: Ignored = None
    status: Ignored = None
    summary: Ignored = None
    encrypted_content: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns a message with this reasoning."""
        told = "\n".join(part.text for part in self.content)
        return {"role": "assistant", "content": None, "reasoning_content": told}


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, Mapping) else getattr(item, "type", "message")


def _readable(item: Any) -> Any:
    kind = _kind(item)
    if kind == "reasoning" and isinstance(item, Mapping) and not item.get("content"):
        raise unsupported("reasoning without a text cannot be read", matters=False)
    if kind not in _ITEMS:
        reason = "nothing is kept here, so send the item itself" if kind == "item_reference" else "it cannot be read"
        told = "an item of type {kind} is not supported: {reason}; known are {known}"
        context = {"kind": f"{kind!r:.80}", "reason": reason, "known": ", ".join(_ITEMS)}
        raise PydanticCustomError("unsupported", told, context)
    return item


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
    BeforeValidator(_readable),
]


def in_turns(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages: what one answer said, thought and called is one message, as chat templates have it."""
    messages: list[dict[str, Any]] = []
    for item in items:
        last = messages[-1] if messages else {"role": ""}
        is_more = last["role"] == item["role"] == "assistant"
        if is_more and ("tool_calls" in item or "tool_calls" in last or last["content"] is None):
            both = (messages.pop(), item)
            content = [part for each in both if each["content"] is not None for part in content_parts(each)]
            thoughts = "\n".join(each["reasoning_content"] for each in both if "reasoning_content" in each)
            calls = [call for each in both for call in each.get("tool_calls", ())]
            extra = {"reasoning_content": thoughts, "tool_calls": calls}
            item = {**item, "content": content or None, **{name: value for name, value in extra.items() if value}}
        messages.append(dict(item))
    return messages


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(Reply):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[str, Field(description="JSON, as the model wrote it: check it before use.")]


class ReasoningContent(Reply):
    """What the model wrote for itself."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Reply):
    """Reasoning, of models that have a channel for it; with tools."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningContent]


OutputItem = OutputMessage | OutputCall | OutputReasoning
