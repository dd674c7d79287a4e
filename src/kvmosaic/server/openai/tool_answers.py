"""Answers with calls of tools, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator

from kvmosaic.server.generation.answers import Ending
from kvmosaic.server.generation.tool_answers import ToolAnswer
from kvmosaic.server.openai.replies import (
    AnswerMessage,
    CallDelta,
    ChatEnding,
    FunctionDelta,
    FunctionReply,
    MessageDelta,
    ToolCallReply,
)
from kvmosaic.tools import CallEvent, CallParser, CallStart, ContentText, ReasoningText


def message_of(answer: ToolAnswer) -> AnswerMessage:
    """Returns the message of an answer: content is null where there are calls only."""
    calls = [
        ToolCallReply(id=call.id, type="function", function=FunctionReply(name=call.name, arguments=call.arguments))
        for call in answer.parsed.calls
    ]
    content = answer.parsed.content
    message = AnswerMessage(role="assistant", content=content or None if calls else content, refusal=None)
    if calls:
        message.tool_calls = calls
    if answer.parsed.reasoning:
        message.reasoning_content = answer.parsed.reasoning
    return message


def message_deltas(events: list[CallEvent]) -> Iterator[MessageDelta]:
    """Yields events in OpenAI's shape: the name of a call first, then its arguments in pieces."""
    for event in events:
        if isinstance(event, ContentText):
            yield MessageDelta(content=event.text)
        elif isinstance(event, ReasoningText):
            yield MessageDelta(reasoning_content=event.text)
        elif isinstance(event, CallStart):
            function = FunctionDelta(name=event.name, arguments="")
            yield MessageDelta(
                tool_calls=[CallDelta(index=event.index, id=event.id, type="function", function=function)]
            )
        else:
            function = FunctionDelta(arguments=event.text)
            yield MessageDelta(tool_calls=[CallDelta(index=event.index, function=function)])


def ending_with(parser: CallParser, ending: Ending, stop_reason: int | str | None) -> ChatEnding:
    """Returns the finish reason of an answer that may have calls."""
    return "tool_calls" if ending == "stop" and parser.is_called(stop_reason) else ending
