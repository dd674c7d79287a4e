"""A tool-call format: how a family of models writes calls, for reading them and for requiring them."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool

_SPACED = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}
"""A space after commas and colons, as chat templates write the calls of earlier turns."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A part of a grammar among literal texts."""

    lark: str


Parts = Sequence[str | Rule]
"""Literal texts and grammar rules, in order."""


def json_rule(schema: object) -> Rule:
    """JSON of a schema."""
    given: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    return Rule(f"%json {json.dumps({**given, 'x-guidance': _SPACED}, ensure_ascii=False)}")


@dataclass(frozen=True, slots=True)
class CallTexts:
    """The texts around calls: begin, call, (separator, call)*, end."""

    begin: str = ""
    separator: str = ""
    end: str = ""


class ToolFormat:
    """How calls are written. A subclass says which texts begin them, and reads and describes one call.

        content <tool_call> {"name": ..., "arguments": {...}} </tool_call>
                 trigger                                       end

    Formats have no state: that of an answer is in its parser.
    """

    name: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]
    """Texts that are control tokens in models of this format; they must be seen by the parser."""
    triggers: ClassVar[tuple[str, ...]]
    """Texts that begin calls."""
    texts: ClassVar[CallTexts]
    is_single: ClassVar[bool] = False
    """Whether an answer of this format has one call at most."""
    is_bare: ClassVar[bool] = False
    """Whether an answer that begins with "{" may be a call without a trigger."""

    def is_used_by(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        raise NotImplementedError

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads the calls after a trigger.

        Raises:
            NotACall: there are none.
        """
        raise NotImplementedError

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """The texts of one call around the rule of its arguments."""
        raise NotImplementedError

    def free_parts(self) -> tuple[Parts, Parts] | None:
        """What may come before a call, any number of times, and an answer instead of one; None: any text."""
        return None

    def read(self, parser: CallParser) -> Steps:
        """Reads an answer."""
        if self.is_bare:
            yield from parser.try_calls(self._read_bare(parser))
        while trigger := (yield from parser.content()):
            yield from parser.try_calls(self.read_calls(parser, trigger))

    def _read_bare(self, parser: CallParser) -> Steps:
        yield from parser.skip()
        if (yield from parser.peek()) != "{":
            raise NotACall
        yield from self.read_calls(parser, "")

    def call_id(self) -> str:
        """A new id for a call."""
        return f"call_{secrets.token_hex(12)}"


_SHORT_ID = string.ascii_letters + string.digits


def short_id() -> str:
    """An id of nine letters and digits, as the templates of Mistral want it."""
    return "".join(secrets.choice(_SHORT_ID) for _ in range(9))


def read_object(parser: CallParser, ends: Sequence[str] = ()) -> Steps:
    """Reads one call as an object: {"name": ..., "arguments" or "parameters": {...}}, its keys in any order."""
    yield from parser.expect("{")
    name = held = ""
    is_announced = False
    while True:
        key = yield from parser.string()
        yield from parser.skip()
        yield from parser.expect(":")
        if key == "name" and not name:
            yield from parser.skip()
            name = parser.known((yield from parser.string()))
        elif key in ("arguments", "parameters") and name and not is_announced:
            if not (yield from parser.arguments(name, ends)):
                return
            is_announced = True
        else:
            value = yield from parser.value()
            held = value if key in ("arguments", "parameters") else held
        yield from parser.skip()
        if not (yield from parser.accept(",")):
            break
    yield from parser.expect("}")
    if not is_announced:
        parser.whole_call(parser.known(name), held or "{}")
    parser.commit()


def read_objects(parser: CallParser, ends: Sequence[str] = ()) -> Steps:
    """Reads a list of such objects, or one."""
    yield from parser.skip()
    if not (yield from parser.accept("[")):
        yield from read_object(parser, ends)
        return
    while True:
        yield from parser.skip()
        yield from read_object(parser, ends)
        yield from parser.skip()
        if not (yield from parser.accept(",")):
            break
    yield from parser.expect("]")
    parser.commit()


def read_end(parser: CallParser, *ends: str) -> Steps:
    """Reads over the end of a call, and braces too many before it; without one, what follows is content."""
    yield from parser.skip(" \t\r\n}")
    if (yield from parser.peek()) and not (yield from parser.accept(*ends)):
        raise NotACall
    parser.commit()


def json_call(tool: Tool, arguments: Rule, key: str = "arguments") -> Parts:
    """One call as an object."""
    return (f'{{"name": "{tool.name}", "{key}": ', arguments, "}")
