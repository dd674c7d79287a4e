"""Answers that may call tools: their text is parsed while it arrives, in whole replies and in streams alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvmosaic.engine import AnswerDelta
from kvmosaic.llm import LLM
from kvmosaic.sampling import SamplingParams, ToolCalling
from kvmosaic.server.openai.generation import Ending, WholeAnswer
from kvmosaic.server.openai.replies import (
    AnswerMessage,
    CallDelta,
    ChatEnding,
    FunctionDelta,
    FunctionReply,
    MessageDelta,
    ToolCallReply,
)
from kvmosaic.tools import CallCollector, CallEvent, CallParser, CallStart, ContentText, ReasoningText, ToolRequest


@dataclass(frozen=True, slots=True)
class ToolAnswers:
    """Makes the parsers of the answers of one request."""

    calling: ToolCalling
    request: ToolRequest
    params: SamplingParams

    def parser(self) -> CallParser:
        """Returns the parser of one answer."""
        return self.calling.parser(self.request, self.params)

    def whole(self) -> ToolAnswer:
        """Returns an empty answer."""
        return ToolAnswer(parser=self.parser())


def tool_answers(llm: LLM, request: ToolRequest, params: SamplingParams) -> ToolAnswers | None:
    """Returns the parsers of a request's answers and its parameters with tools; None if it can call none.

    Raises:
        InvalidTools, InvalidSampling: see `ToolCalling.sampling`.
    """
    if not request.callable_tools:
        return None
    calling = llm.tool_calling
    return ToolAnswers(calling, request, calling.sampling(params, request))


@dataclass(slots=True, kw_only=True)
class ToolAnswer(WholeAnswer):
    """One answer with its calls."""

    parser: CallParser
    parsed: CallCollector = field(default_factory=CallCollector)

    def add(self, delta: AnswerDelta) -> None:
        """Appends a delta."""
        WholeAnswer.add(self, delta)
        self.parsed.add(read_delta(self.parser, delta))

    def message(self) -> AnswerMessage:
        """Returns the message: content is null where there are calls only."""
        calls = [
            ToolCallReply(id=call.id, type="function", function=FunctionReply(name=call.name, arguments=call.arguments))
            for call in self.parsed.calls
        ]
        content = self.parsed.content
        message = AnswerMessage(role="assistant", content=content or None if calls else content, refusal=None)
        if calls:
            message.tool_calls = calls
        if self.parsed.reasoning:
            message.reasoning_content = self.parsed.reasoning
        return message


def read_delta(parser: CallParser, delta: AnswerDelta) -> list[CallEvent]:
    """Returns what a delta adds to content and calls."""
    events = parser.feed(delta.text)
    return events if delta.finish_reason is None else [*events, *parser.finish()]


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


def ending_with(parser: CallParser, ending: Ending) -> ChatEnding:
    """Returns the finish reason of an answer that may have calls."""
    return "tool_calls" if parser.num_calls and ending == "stop" else ending
