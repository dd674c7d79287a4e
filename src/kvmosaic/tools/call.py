"""Tool calls, and the events from which a stream of them is put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as a model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it: cut off if the answer was."""


@dataclass(frozen=True, slots=True)
class ContentText:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text that the model wrote for itself, in formats that have a channel for it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: its number in the answer, its id and the name of the tool."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """More text of the arguments of a call."""

    index: int
    text: str


CallEvent = ContentText | ReasoningText | CallStart | ArgumentsText


def joined_events(events: Sequence[CallEvent]) -> list[CallEvent]:
    """The same events with neighbours of a kind joined."""
    joined: list[CallEvent] = []
    for kind, group in groupby(events, key=_kind):
        if isinstance(kind, CallStart):
            joined += group
        else:
            joined.append(
                replace(kind, text="".join(event.text for event in group if not isinstance(event, CallStart)))
            )
    return joined


def _kind(event: CallEvent) -> CallEvent:
    return event if isinstance(event, CallStart) else replace(event, text="")
