"""The format of Qwen3-Coder: a tag for each argument, and its value as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvmosaic.errors import InvalidTools
from kvmosaic.tools.formats.tool_format import CallTexts, Parts, Rule, ToolFormat, json_rule, read_end
from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_KEY = re.compile(r"[^<>\s]{1,256}")
_UNCHECKED = ("pattern", "format", "minLength", "maxLength")
"""Keywords of a text that this format cannot require."""


class Qwen3Coder(ToolFormat):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder.

    A value is a text where the tool's schema says so, otherwise JSON if it can be read as such.
    """

    name = "qwen3_coder"
    markers = ("<tool_call>", "</tool_call>")
    triggers = ("<tool_call>", _FUNCTION)
    texts = CallTexts("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the tags."""
        return _FUNCTION in template and _PARAMETER in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads one function."""
        if trigger != _FUNCTION:
            yield from parser.skip()
            yield from parser.expect(_FUNCTION)
        name = yield from parser.name()
        yield from parser.expect(">")
        parser.announce(name)
        yield from self._read_parameters(parser, _properties(parser.tools[name]))
        if trigger != _FUNCTION:
            yield from read_end(parser, "</tool_call>")

    def _read_parameters(self, parser: CallParser, properties: Mapping[str, Any]) -> Steps:
        written = "{"
        while True:
            yield from parser.skip()
            if not (yield from parser.accept(_PARAMETER)):
                break
            key, end = yield from parser.until(">")
            if not end:
                raise NotACall
            parser.add_arguments(f"{written}{json.dumps(key.strip(), ensure_ascii=False)}: ")
            written = ", "
            yield from parser.accept("\n")
            if _is_text(properties.get(key.strip())):
                yield from self._read_text(parser)
                continue
            value, end = yield from parser.until(_PARAMETER_END)
            if not end:
                raise NotACall
            parser.add_arguments(_as_json(value.strip()))
        parser.add_arguments("}" if written != "{" else "{}")
        if not (yield from parser.accept(_FUNCTION_END)):
            raise NotACall
        parser.commit()

    def _read_text(self, parser: CallParser) -> Steps:
        """Reads the value of a text, and passes it on as JSON while it arrives."""

        def add(text: str) -> None:
            parser.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

        ends = (f"\n{_PARAMETER_END}", _PARAMETER_END)
        parser.add_arguments('"')
        yield from parser.pass_on(ends, add)
        if (yield from parser.accept(*ends)):
            parser.add_arguments('"')

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """The tags of a function, and of its parameters in their order."""
        schema = tool.schema
        parts: list[str | Rule] = [f"<function={tool.name}>\n"]
        for key, about in _properties(tool).items():
            if not _KEY.fullmatch(key):
                raise InvalidTools(
                    f"tool {tool.name!r} has the parameter {key!r:.80}; calls of this model can be required for names "
                    "without spaces and < > only"
                )
            value = _value_parts(tool, key, about)
            is_required = key in (schema.get("required") or ())
            parts += value if is_required else [Rule("("), *value, Rule(")?")]
        return (*parts, "</function>")


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = (tool.parameters or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _is_text(about: object) -> bool:
    return isinstance(about, Mapping) and about.get("type") == "string"


def _as_json(value: str) -> str:
    """The text of a value that should be JSON, as JSON; the template writes some values as Python does."""
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        json.dumps(json.loads(value), allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value


def _value_parts(tool: Tool, key: str, about: Any) -> list[str | Rule]:
    begin, end = f"<parameter={key}>\n", f"\n{_PARAMETER_END}\n"
    if not _is_text(about):
        return [begin, json_rule(about), end]
    if (wrong := next((name for name in _UNCHECKED if name in about), None)) is not None:
        raise InvalidTools(
            f"tool {tool.name!r}: {wrong!r} of the text {key!r} cannot be required in this model's calls; leave it "
            "out, or use tool_choice 'auto'"
        )
    choices = about.get("enum", [about["const"]] if "const" in about else None)
    if choices is None:
        return [begin, Rule("value_text")]
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices if isinstance(choice, str))
    return [begin, Rule(f"({texts})"), end]
