"""Blocks of an answer: texts, thoughts and calls, in the order in which the model writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from kvmosaic.engine import AnswerDelta
from kvmosaic.server.anthropic.replies import (
    BlockDelta,
    BlockReply,
    MessageEvent,
    StopReason,
    TextReply,
    ThinkingReply,
    ToolUseReply,
)
from kvmosaic.server.generation.answers import WholeAnswer
from kvmosaic.server.generation.tool_answers import ToolAnswers, read_delta
from kvmosaic.tools import CallEvent, CallParser, CallStart, ContentText, ReasoningText


@dataclass(slots=True)
class _Block:
    """One block, and its text so far."""

    event: CallEvent
    parts: list[str] = field(default_factory=list)

    def reply(self) -> BlockReply:
        text = "".join(self.parts)
        if isinstance(self.event, CallStart):
            return ToolUseReply(type="tool_use", id=self.event.id, name=self.event.name, input=_read_input(text))
        if isinstance(self.event, ReasoningText):
            return ThinkingReply(type="thinking", thinking=text, signature="")
        return TextReply(type="text", text=text, citations=None)


@dataclass(slots=True, kw_only=True)
class BlockAnswer(WholeAnswer):
    """One answer as blocks, whole or as events."""

    parser: CallParser | None = None
    _blocks: list[_Block] = field(default_factory=list)

    @classmethod
    def new(cls, tools: ToolAnswers | None) -> BlockAnswer:
        """Returns an empty answer, which calls the tools of the request."""
        return cls(parser=None if tools is None else tools.parser())

    def add(self, delta: AnswerDelta) -> None:
        """Appends a delta."""
        self.events(delta)

    def events(self, delta: AnswerDelta) -> list[MessageEvent]:
        """Appends a delta, and returns the events that tell it."""
        WholeAnswer.add(self, delta)
        events = [event for each in self._read(delta) for event in self._told(each)]
        if delta.finish_reason is not None and self._blocks:
            events.append(self._end())
        return events

    def content(self) -> list[BlockReply]:
        """Returns all blocks."""
        return [block.reply() for block in self._blocks]

    @property
    def stop(self) -> tuple[StopReason, str | None]:
        """Why the answer ended, and the stop text that ended it."""
        if self.finish_reason == "length":
            return "max_tokens", None
        if self.parser is not None and self.parser.is_called(self.stop_reason):
            return "tool_use", None
        if isinstance(self.stop_reason, str):
            return "stop_sequence", self.stop_reason
        return "end_turn", None

    def _read(self, delta: AnswerDelta) -> Sequence[CallEvent]:
        if self.parser is not None:
            return read_delta(self.parser, delta)
        return [ContentText(delta.text)] if delta.text else []

    def _told(self, event: CallEvent) -> list[MessageEvent]:
        """Adds to the block that is open, or ends it and begins another."""
        events = list[MessageEvent]()
        if isinstance(event, CallStart) or self._is_other(event):
            if self._blocks:
                events.append(self._end())
            self._blocks.append(_Block(event))
            index = len(self._blocks) - 1
            events.append(MessageEvent(type="content_block_start", index=index, content_block=self._blocks[-1].reply()))
        if isinstance(event, CallStart) or not event.text:
            return events
        self._blocks[-1].parts.append(event.text)
        events.append(MessageEvent(type="content_block_delta", index=len(self._blocks) - 1, delta=_delta(event)))
        return events

    def _is_other(self, event: CallEvent) -> bool:
        """Whether an event of text does not belong to the open block."""
        for kind in (ContentText, ReasoningText):
            if isinstance(event, kind):
                return not self._blocks or not isinstance(self._blocks[-1].event, kind)
        return False

    def _end(self) -> MessageEvent:
        return MessageEvent(type="content_block_stop", index=len(self._blocks) - 1)


def _delta(event: Any) -> BlockDelta:
    if isinstance(event, ContentText):
        return BlockDelta(type="text_delta", text=event.text)
    if isinstance(event, ReasoningText):
        return BlockDelta(type="thinking_delta", thinking=event.text)
    return BlockDelta(type="input_json_delta", partial_json=event.text)


def _read_input(arguments: str) -> dict[str, Any]:
    """Returns the arguments of a call; of one that was cut off, the complete ones."""
    try:
        read = from_json(arguments, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
