"""A tool-call format: how a family of models writes calls, for reading them, and the grammar that requires them."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool, ToolRequest

_SPACED = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}
"""A space after commas and colons, as chat templates write the calls of earlier turns."""
_TERMINALS = {
    "TEXT": "TEXT: /(?s:.*)/",
    "BARE": r"BARE: /(?s:\s*(```(json)?\s*)?(\{.*)?)/",
    "value_text": r"value_text[lazy]: /(?s:.*)\n<\/parameter>\n/",
}
_ANY_ARGUMENTS = {"type": "object"}
_CALL_KEYS = ("name", "arguments", "parameters", "type", "id")


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
    """Whether an answer that begins with "{", also in a code block, may be a call without a trigger."""

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
        """The texts of one call around the rule of its arguments: one object."""
        return json_call(tool, arguments)

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
        if is_block := (yield from parser.accept("```")):
            yield from parser.accept("json")
            yield from parser.skip()
        if (yield from parser.peek()) != "{":
            raise NotACall
        yield from self.read_calls(parser, "")
        if is_block:
            yield from parser.skip()
            yield from parser.accept("```")
            parser.commit()

    def call_id(self) -> str:
        """A new id for a call."""
        return f"call_{secrets.token_hex(12)}"


def shows_tools(template: str) -> bool:
    """Whether a chat template may show tools to its model."""
    return "tools" in template


def read_object(parser: CallParser, ends: Sequence[str] = (), *, is_bare: bool = False) -> Steps:
    """Reads one call as an object: {"name": ..., "arguments" or "parameters": {...}}, its keys in any order.

    A bare one, which no tag says to be a call, has arguments and no keys of other things.
    """
    yield from parser.expect("{")
    name = held = ""
    is_announced = False
    while True:
        key = yield from parser.string()
        if is_bare and key not in _CALL_KEYS:
            raise NotACall
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
        if is_bare and not held:
            raise NotACall
        parser.whole_call(parser.known(name), held or "{}")
    parser.commit()


def read_objects(parser: CallParser, ends: Sequence[str] = (), *, is_bare: bool = False) -> Steps:
    """Reads a list of such objects, or one."""
    yield from parser.skip()
    if not (yield from parser.accept("[")):
        yield from read_object(parser, ends, is_bare=is_bare)
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


@dataclass(frozen=True, slots=True)
class ControlToken:
    """The token of one of a format's markers."""

    id: int
    is_special: bool
    """Whether no ordinary text contains it."""


def call_grammar(
    tool_format: ToolFormat, request: ToolRequest, tokens: Mapping[str, ControlToken], reserved: Collection[str] = ()
) -> str | None:
    """The grammar of an answer in Lark; None if the answer may be anything.

    Args:
        tool_format: how calls are written.
        request: the tools and the choice. If no call is forced, tools with `strict` keep to their schemas.
        tokens: the format's control tokens in this model, by their texts.
        reserved: the texts of all added tokens of the model.

    Raises:
        InvalidTools: a tool whose calls cannot be required in this format.
    """
    tools, is_forced = request.callable_tools, request.choice.is_forced
    if not tools or not (is_forced or any(tool.is_strict for tool in tools)):
        return None
    writer = _Writer(tokens)
    lines = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        schema = tool.schema if is_forced or tool.is_strict else _ANY_ARGUMENTS
        lines.append(f"call_{number}: {writer.rule(tool_format.call_parts(tool, Rule(f'args_{number}')))}")
        lines.append(f"args_{number}: {json_rule(schema).lark}")
    texts, is_single = tool_format.texts, tool_format.is_single or request.is_single
    more: Parts = () if is_single else (Rule("("), texts.separator, Rule("call )*"))
    lines.append(f"more: {writer.rule((Rule('call'), *more, texts.end))}")
    lines += _start(tool_format, writer, is_forced=is_forced)
    used = " ".join(lines)
    schemas = json.dumps([tool.schema for tool in tools], ensure_ascii=False)
    if any(text in schemas for text in reserved):
        # llguidance tokenizes texts that can only go on in one way, and finds the control token, which is not allowed.
        lines.insert(0, '%llguidance {"no_forcing": true}')
    return "\n".join([*lines, *(line for name, line in _TERMINALS.items() if re.search(rf"\b{name}\b", used))])


def _start(tool_format: ToolFormat, writer: _Writer, *, is_forced: bool) -> list[str]:
    begin = tool_format.texts.begin
    calls = writer.rule((begin, Rule("more")))
    if (free := tool_format.free_parts()) is not None:
        before, instead = map(writer.rule, free)
        return [f"start: ({before})? " + (calls if is_forced else f"(({calls}) | ({instead}))")]
    if is_forced:
        return [f"start: {calls}"]
    if tool_format.is_bare:
        return [f"start: {calls} | PLAIN", "PLAIN: (TEXT & ~BARE)"]
    trigger = tool_format.triggers[0]
    text = json.dumps(trigger, ensure_ascii=False)
    plain = f"FREE: TEXT & ~(TEXT {text} TEXT)"
    if not begin.startswith(trigger) or writer.is_special(trigger):
        return [f"start: FREE ({calls})?", plain]
    # Where the trigger may be ordinary text, any text ends as soon as it is complete, and a call follows. The same
    # trigger may be a token that no text of the grammar contains: llguidance treats all added <...> so.
    rest = writer.rule((begin.removeprefix(trigger), Rule("more")))
    return [f"start: FREE ({calls})? | head {rest}", f"head[lazy]: TEXT {text}", plain]


class _Writer:
    """Writes literal texts as Lark, control tokens by their ids."""

    def __init__(self, tokens: Mapping[str, ControlToken]) -> None:
        self._tokens = tokens
        found = "|".join(re.escape(text) for text in sorted(tokens, key=len, reverse=True))
        self._pattern = re.compile(f"({found})") if found else None

    def is_special(self, text: str) -> bool:
        """Whether a text is a control token that no ordinary text contains."""
        return text in self._tokens and self._tokens[text].is_special

    def rule(self, parts: Parts) -> str:
        """The parts of a rule."""
        return " ".join(part.lark if isinstance(part, Rule) else self._literal(part) for part in parts)

    def _literal(self, text: str) -> str:
        parts = self._pattern.split(text) if self._pattern else [text]
        return " ".join(
            f"<[{self._tokens[part].id}]>" if part in self._tokens else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )
