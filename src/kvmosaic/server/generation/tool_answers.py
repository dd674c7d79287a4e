"""Answers that may call tools: their text is parsed while it arrives, in whole replies and in streams alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmosaic.engine import AnswerDelta
from kvmosaic.llm import LLM
from kvmosaic.sampling import SamplingParams, ToolCalling
from kvmosaic.server.generation.answers import WholeAnswer
from kvmosaic.tools import CallCollector, CallEvent, CallParser, ToolRequest


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


def read_delta(parser: CallParser, delta: AnswerDelta) -> list[CallEvent]:
    """Returns what a delta adds to content and calls."""
    events = parser.feed(delta.text)
    return events if delta.finish_reason is None else [*events, *parser.finish()]
