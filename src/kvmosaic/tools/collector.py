"""An answer put together from the events of its parser."""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.tools.call import CallEvent, CallStart, ContentText, ReasoningText, ToolCall
from kvmosaic.tools.parser import CallParser


class CallCollector:
    """An answer put together from its events."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, events: Sequence[CallEvent]) -> None:
        """Adds events."""
        for event in events:
            if isinstance(event, ContentText):
                self._content.append(event.text)
            elif isinstance(event, ReasoningText):
                self._reasoning.append(event.text)
            elif isinstance(event, CallStart):
                self._calls.append((event, []))
            else:
                self._calls[event.index][1].append(event.text)

    @property
    def content(self) -> str:
        """The text outside of calls."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The text that the model wrote for itself."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(ToolCall(start.id, start.name, "".join(parts)) for start, parts in self._calls)


def parse_calls(parser: CallParser, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the calls of a whole answer."""
    collector = CallCollector()
    collector.add(parser.feed(text))
    collector.add(parser.finish())
    return collector.content, collector.calls
