"""Answers that may call tools: their text is parsed while it arrives, in whole replies and in streams alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

from kvmosaic.engine import AnswerDelta
from kvmosaic.llm import LLM
from kvmosaic.sampling import SamplingParams, ToolCalling
from kvmosaic.server.generation.answers import WholeAnswer
from kvmosaic.tools import ArgumentsText, CallCollector, CallEvent, CallParser, CallStart, ContentText, ToolRequest


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


@dataclass(slots=True)
class Block:
    """A text, a thought or a call of an answer."""

    event: CallEvent
    """What began it."""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text so far; that of a call are its arguments."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A block begins, has more text, or ends."""

    kind: Literal["begin", "more", "end"]
    index: int
    block: Block
    text: str = ""


@dataclass(slots=True, kw_only=True)
class BlockAnswer(WholeAnswer):
    """One answer as blocks in their order, for APIs that have texts beside calls."""

    parser: CallParser | None = None
    blocks: list[Block] = field(default_factory=list)

    @classmethod
    def new(cls, tools: ToolAnswers | None) -> Self:
        """Returns an empty answer, which calls the tools of the request."""
        return cls(parser=None if tools is None else tools.parser())

    def add(self, delta: AnswerDelta) -> None:
        """Appends a delta."""
        for _ in self.steps(delta):
            pass

    def steps(self, delta: AnswerDelta) -> Iterator[BlockStep]:
        """Appends a delta; yields what it does to blocks, each step before the next one is done."""
        WholeAnswer.add(self, delta)
        for event in self._read(delta):
            kind = CallStart if isinstance(event, ArgumentsText) else type(event)
            if isinstance(event, CallStart) or not self.blocks or not isinstance(self.blocks[-1].event, kind):
                self.blocks.append(Block(event))
                if len(self.blocks) > 1:
                    yield self._step("end", -2)
                yield self._step("begin")
            if not isinstance(event, CallStart):
                self.blocks[-1].parts.append(event.text)
                yield self._step("more", text=event.text)
        if delta.finish_reason is not None and self.blocks:
            yield self._step("end")

    @property
    def is_called(self) -> bool:
        """Whether an answer that has ended calls tools; see `CallParser.is_called`."""
        return self.parser is not None and self.parser.is_called(self.stop_reason)

    def _read(self, delta: AnswerDelta) -> Sequence[CallEvent]:
        if self.parser is not None:
            return read_delta(self.parser, delta)
        return [ContentText(delta.text)] if delta.text or delta.logprobs else []

    def _step(self, kind: Literal["begin", "more", "end"], place: int = -1, text: str = "") -> BlockStep:
        return BlockStep(kind, len(self.blocks) + place, self.blocks[place], text)
