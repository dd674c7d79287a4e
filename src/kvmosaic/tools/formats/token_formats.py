"""Formats that mark calls by control tokens or tags: DeepSeek, GPT-OSS and Qwen3-Coder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvmosaic.errors import InvalidTools
from kvmosaic.tools.formats.tool_format import CallTexts, Parts, Rule, ToolFormat, json_rule, read_end
from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekV3(ToolFormat):
    """Calls with a type, and arguments in a code block: DeepSeek V3 and R1.

    `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name` and a block of JSON, then
    `<｜tool▁call▁end｜><｜tool▁calls▁end｜>`.
    """

    name = "deepseek_v3"
    markers = (_BEGIN, _END, _CALL, _SEPARATOR, _CALL_END)
    triggers = (_BEGIN, _CALL)
    texts = CallTexts(_BEGIN, "\n", _END)

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the tokens, and code blocks."""
        return _BEGIN in template and "```json" in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads calls up to the token that ends them."""
        is_begun, before = trigger == _CALL, parser.num_calls
        while True:
            yield from parser.skip()
            if not is_begun and not (yield from parser.accept(_CALL)):
                break
            is_begun = False
            yield from self._read_call(parser)
        has_end = not (yield from parser.peek()) or (yield from parser.accept(_END))
        if not has_end or parser.num_calls == before:
            raise NotACall
        parser.commit()

    def _read_call(self, parser: CallParser) -> Steps:
        name, _ = yield from parser.until(_SEPARATOR)
        yield from parser.skip()
        if name.strip() == "function" and (yield from parser.peek()) != "{":
            name = yield from parser.name()
        yield from parser.skip()
        is_block = yield from parser.accept("```json")
        yield from parser.arguments(parser.known(name.strip()), ("\n```", _CALL_END, _END))
        yield from parser.skip()
        if is_block:
            yield from parser.accept("```")
            yield from parser.skip()
        if (yield from parser.peek()) and not (yield from parser.accept(_CALL_END)):
            raise NotACall
        parser.commit()

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """One block."""
        return (f"{_CALL}function{_SEPARATOR}{tool.name}\n```json\n", arguments, f"\n```{_CALL_END}")


class DeepSeekV31(DeepSeekV3):
    """Calls without a type and a code block: DeepSeek V3.1."""

    name = "deepseek_v31"
    texts = CallTexts(_BEGIN, "", _END)

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the tokens, and no code blocks."""
        return _BEGIN in template and "```json" not in template

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """One block."""
        return (f"{_CALL}{tool.name}{_SEPARATOR}", arguments, _CALL_END)


_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START, _CHANNEL)
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]{1,64})")
_MAX_HEADER = 1_000


class Harmony(ToolFormat):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`: GPT-OSS.

    The channel `analysis` is reasoning; `final`, and `commentary` to the user, are content.
    """

    name = "harmony"
    markers = (_CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS[:4])
    triggers = (_CHANNEL, _START)
    texts = CallTexts("<|channel|>commentary to=functions.")
    is_single = True

    def is_used_by(self, template: str) -> bool:
        """Whether the template has channels and functions."""
        return _CHANNEL in template and "functions." in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads one message: its header, and what it says."""
        header, marker = "", trigger
        while marker != _MESSAGE:
            if marker not in self.triggers or len(header) > _MAX_HEADER:
                raise NotACall
            part, marker = yield from parser.until(_MESSAGE, *_ENDS)
            header += f" {part}"
        recipient = _RECIPIENT.search(header[:_MAX_HEADER])
        if recipient and recipient[1] in parser.tools:
            yield from parser.arguments(recipient[1], _ENDS)
        else:
            is_reasoning = "analysis" in header[:_MAX_HEADER]
            yield from parser.pass_on(_ENDS, parser.add_reasoning if is_reasoning else parser.add_content)
        yield from parser.accept(*_ENDS[:3])
        parser.commit()

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """The rest of the header and the arguments."""
        return (f"{tool.name} <|constrain|>json<|message|>", arguments)

    def free_parts(self) -> tuple[Parts, Parts] | None:
        """Reasoning before a call, and a message to the user instead of one."""
        reasoning = ("<|channel|>analysis<|message|>", Rule("TEXT"), "<|end|><|start|>assistant")
        return reasoning, ("<|channel|>final<|message|>", Rule("TEXT"))


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
