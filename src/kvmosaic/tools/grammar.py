"""A grammar of calls: answers that are calls, or in which a call keeps to the schema of its tool."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvmosaic.tools.formats.tool_format import Parts, Rule, ToolFormat, json_rule
from kvmosaic.tools.request import ToolRequest

_TERMINALS = {
    "TEXT": "TEXT: /(?s:.*)/",
    "PLAIN": r"PLAIN: /(?s:[^{\s].*)/",
    "value_text": r"value_text[lazy]: /(?s:.*)\n<\/parameter>\n/",
}
_ANY_ARGUMENTS = {"type": "object"}


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
    texts, is_single = tool_format.texts, tool_format.is_single or not request.is_parallel
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
    begin, trigger = tool_format.texts.begin, tool_format.triggers[0]
    calls = writer.rule((begin, Rule("more")))
    if (free := tool_format.free_parts()) is not None:
        before, instead = map(writer.rule, free)
        return [f"start: ({before})? " + (calls if is_forced else f"(({calls}) | ({instead}))")]
    if is_forced:
        return [f"start: {calls}"]
    if tool_format.is_bare:
        return [f"start: {calls} | PLAIN"]
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
