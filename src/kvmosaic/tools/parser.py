"""Tool calls in the text of an answer, found while it arrives (each character is read once), and put together."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvmosaic.tools.call import ArgumentsText, CallEvent, CallStart, ContentText, ReasoningText, ToolCall, joined_events
from kvmosaic.tools.json_scanner import JsonScanner

if TYPE_CHECKING:
    from kvmosaic.tools.formats.tool_format import ToolFormat
    from kvmosaic.tools.request import Tool


MAX_HELD_CHARACTERS = 2**16
"""A call whose name is not known after this many characters is none."""
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_.-")
_MAX_NAME = 64
_SPACES = " \t\r\n"

Steps = Generator[None, None, None]
"""Reads what is there, and yields where it needs more."""


class NotACall(Exception):
    """The text that was read is no call of this format."""


class CallParser:
    r"""Splits an answer into content and calls.

        Let me see.\n<tool_call>{"name": "weather", "arguments": {"city": "Os | lo"}}</tool_call>
        content      held until the name is known               arguments, as they arrive

    A call is announced when its name and the beginning of its arguments are there; then its arguments follow as they
    are written. Text that begins like a call and is none, or that calls a tool which was not offered, is content.
    Arguments that turn out not to be JSON later stay arguments, as the model wrote them. White space around calls is
    dropped. Events do not depend on how the text is cut into pieces, once neighbours of a kind are joined.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Sequence[Tool],
        *,
        hidden: Collection[str] = (),
        max_calls: int | None = None,
    ) -> None:
        """Begins an answer.

        Args:
            tool_format: how calls are written.
            tools: tools that may be called.
            hidden: control tokens of the format that are no content.
            max_calls: further calls are dropped; None: there may be any number.
        """
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.num_calls = 0
        self._format = tool_format
        self._hidden = frozenset(hidden)
        self._max_calls = max_calls
        self._markers = _any_of([*tool_format.triggers, *hidden])
        self._hidden_texts = _any_of(hidden)
        self._text = ""
        self._place = 0
        self._held = 0
        """Where the text begins that is neither content nor a call so far."""
        self._is_ended = False
        self._events: list[CallEvent] = []
        self._spaces: list[str] = []
        self._last_arguments = JsonScanner()
        self._steps = tool_format.read(self)
        self._is_done = False

    def is_called(self, stop_reason: int | str | None) -> bool:
        """Whether an answer that has ended calls tools: not if a stop text or token cut the arguments of its last call.

        A client would run the tool with half of them.
        """
        return bool(self.num_calls) and (stop_reason is None or self._last_arguments.is_complete)

    def feed(self, text: str) -> list[CallEvent]:
        """Reads more text of the answer, and returns what is certain now."""
        self._text = self._text[self._held :] + text
        self._place -= self._held
        self._held = 0
        return self._advance()

    def finish(self) -> list[CallEvent]:
        """Ends the answer, and returns the rest."""
        self._is_ended = True
        events = self._advance()
        if self._spaces and not self.num_calls:
            events.append(ContentText("".join(self._spaces)))
        self._spaces.clear()
        return events

    def _advance(self) -> list[CallEvent]:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self
        events, self._events = self._events, []
        return joined_events(events)

    # What a format reads with.

    def content(self) -> Generator[None, None, str]:
        """Reads content up to the next trigger and over it; returns the trigger, or "" at the end of the answer."""
        while True:
            found = self._markers.search(self._text, self._place) if self._markers else None
            end = len(self._text) - (0 if self._is_ended else self._num_partial(self._format.triggers, self._hidden))
            if found is not None and found.start() <= end:
                self._say(self._text[self._place : found.start()])
                self._held, self._place = found.start(), found.end()
                if found[0] in self._format.triggers:
                    return found[0]
                self._held = self._place  # a control token that is no content
                continue
            self._say(self._text[self._place : end])
            self._held = self._place = end
            if self._is_ended:
                return ""
            yield

    def until(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Returns the text before the first of some markers, and the marker, which is read over; "": there is none."""
        pattern, offset = _any_of(ends), self._place - self._held
        assert pattern is not None
        while True:
            found = pattern.search(self._text, self._place)
            if found is not None:
                self._place = found.end()
                return self._text[self._held + offset : found.start()], found[0]
            self._place = max(self._place, len(self._text) - max(map(len, ends)) + 1)
            if self._is_ended:
                self._place = len(self._text)
                return self._text[self._held + offset :], ""
            yield from self._wait()

    def peek(self) -> Generator[None, None, str]:
        """Returns the next character; "" at the end."""
        while self._place >= len(self._text):
            if self._is_ended:
                return ""
            yield from self._wait()
        return self._text[self._place]

    def skip(self, characters: str = _SPACES) -> Steps:
        """Reads over some characters, white space if none are given."""
        while (character := (yield from self.peek())) and character in characters:
            self._place += 1

    def expect(self, text: str) -> Steps:
        """Reads this text.

        Raises:
            NotACall: another text.
        """
        for character in text:
            if (yield from self.peek()) != character:
                raise NotACall
            self._place += 1

    def accept(self, *texts: str) -> Generator[None, None, str]:
        """Reads one of some texts if it is next, and returns it; otherwise "" without reading."""
        while True:
            rest = self._text[self._place : self._place + max(map(len, texts))]
            for text in texts:
                if rest.startswith(text):
                    self._place += len(text)
                    return text
            if self._is_ended or not any(text.startswith(rest) for text in texts):
                return ""
            yield from self._wait()

    def name(self) -> Generator[None, None, str]:
        """Reads the name of a tool that may be called.

        Raises:
            NotACall: another name.
        """
        characters: list[str] = []
        while (
            (character := (yield from self.peek())) and character in _NAME_CHARACTERS and len(characters) <= _MAX_NAME
        ):
            characters.append(character)
            self._place += 1
        return self.known("".join(characters))

    def known(self, name: str) -> str:
        """Returns the name if there is such a tool.

        Raises:
            NotACall: there is none.
        """
        if name not in self.tools:
            raise NotACall
        return name

    def value(self) -> Generator[None, None, str]:
        """Reads a JSON value, and returns its text.

        Raises:
            NotACall: no JSON, or the answer ends inside of it.
        """
        yield from self.skip()
        scanner, offset = JsonScanner(), self._place - self._held
        while not scanner.is_complete:
            self._place = scanner.scan(self._text, self._place)
            if self._is_ended:
                scanner.end()
            if scanner.is_broken or (self._is_ended and not scanner.is_complete):
                raise NotACall
            if not scanner.is_complete:
                yield from self._wait()
        return self._text[self._held + offset : self._place]

    def string(self) -> Generator[None, None, str]:
        """Reads a JSON string, and returns its value.

        Raises:
            NotACall: another value.
        """
        text = json.loads((yield from self.value()))
        if not isinstance(text, str):
            raise NotACall
        return text

    def arguments(self, name: str, ends: Sequence[str] = ()) -> Generator[None, None, bool]:
        """Reads the arguments of a call: a JSON object, or one written as a text; returns whether they are complete.

        Args:
            name: the tool.
            ends: markers at which arguments end that are not JSON; without any, they go on to the end of the answer.

        Raises:
            NotACall: no object, before the call was announced.
        """
        yield from self.skip()
        if (yield from self.peek()) != "{":
            self.whole_call(name, (yield from self.value()))
            return True
        scanner, offset, is_announced = JsonScanner(), self._place - self._held, False
        while True:
            start = self._place
            self._place = scanner.scan(self._text, start)
            if is_announced:
                self.add_arguments(self._text[start : self._place])
            elif scanner.is_complete or scanner.num_keys:
                is_announced = True
                start = self._held + offset
                self.announce(name)
                self.add_arguments(self._text[start : self._place])
            if scanner.is_complete:
                return True
            if scanner.is_broken or self._is_ended:
                if not is_announced:
                    raise NotACall
                yield from self.pass_on(ends, self.add_arguments)
                return False
            yield from self._wait()

    def pass_on(self, ends: Sequence[str], add: Callable[[str], None]) -> Steps:
        """Adds text as it arrives, up to a marker, which is not read."""
        pattern = _any_of(ends)
        while True:
            found = pattern.search(self._text, self._place) if pattern else None
            end = found.start() if found else len(self._text) - (0 if self._is_ended else self._num_partial(ends))
            text = self._text[self._place : end]
            self._held = self._place = end
            if text:
                add(text)
            if found or self._is_ended:
                return
            yield

    # What a format says.

    def whole_call(self, name: str, value: str) -> None:
        """Announces a call with all of its arguments: an object, an object written as a text, or null.

        Raises:
            NotACall: another value.
        """
        if value.startswith('"'):
            value = json.loads(value)
        if value == "null":
            value = "{}"
        if not _is_object(value):
            raise NotACall
        self.announce(name)
        self.add_arguments(value)

    def announce(self, name: str) -> None:
        """Begins a call: what was read so far is part of it."""
        self.num_calls += 1
        self._spaces.clear()
        self._held = self._place
        if self._is_wanted:
            self._last_arguments = JsonScanner()
            self._events.append(CallStart(self.num_calls - 1, self._format.call_id(), name))

    def add_arguments(self, text: str) -> None:
        """Adds text to the arguments of the last call."""
        self._held = self._place
        if text and self._is_wanted:
            self._last_arguments.scan(text)
            self._events.append(ArgumentsText(self.num_calls - 1, text))

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning."""
        self._held = self._place
        if text:
            self._events.append(ReasoningText(text))

    def add_content(self, text: str) -> None:
        """Adds content."""
        self._held = self._place
        self._say(text)

    def commit(self) -> None:
        """Drops what was read: it is part of a call."""
        self._held = self._place

    def try_calls(self, calls: Steps) -> Steps:
        """Reads calls; what turns out to be none is content."""
        before = self.num_calls
        try:
            yield from calls
        except NotACall:
            if self.num_calls == before:
                text, self._held = self._text[self._held : self._place], self._place
                if not before or not self._is_ended or self._place < len(self._text):  # else a call that was cut
                    self._say(self._hidden_texts.sub("", text) if self._hidden_texts else text)
            elif not self._is_ended or self._place < len(self._text):
                self._place = self._held  # after the last call: it is read again as content
        self._held = self._place

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls

    def _say(self, text: str) -> None:
        """Content; white space waits for what follows it."""
        body = text.rstrip(_SPACES)
        if body:
            self._events.append(ContentText("".join([*self._spaces, body])))
            self._spaces.clear()
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _wait(self) -> Steps:
        if self._is_ended or self._place - self._held > MAX_HELD_CHARACTERS:
            raise NotACall
        yield

    def _num_partial(self, *markers: Collection[str]) -> int:
        """Length of the end of the text that may be the beginning of a marker."""
        texts = [marker for some in markers for marker in some]
        longest = min(max(map(len, texts), default=1) - 1, len(self._text) - self._place)
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if any(text.startswith(self._text[-n:]) for text in texts)), 0)


def _is_object(text: str) -> bool:
    """Whether a text is a JSON object that can be sent."""
    scanner = JsonScanner()
    end = scanner.scan(text)
    is_text = not any("\ud800" <= character <= "\udfff" for character in text)
    return text[:1] == "{" and scanner.is_complete and not text[end:].strip() and is_text


def _any_of(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that matches one of these texts, the longest first."""
    found = "|".join(re.escape(text) for text in sorted(filter(None, texts), key=len, reverse=True))
    return re.compile(found) if found else None


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
