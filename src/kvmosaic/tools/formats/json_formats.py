"""Formats that write a call as one JSON object with its name."""

from __future__ import annotations

import secrets
import string
from typing import ClassVar

from kvmosaic.tools.formats.tool_format import (
    CallTexts,
    Parts,
    Rule,
    ToolFormat,
    json_call,
    read_end,
    read_object,
    read_objects,
    shows_tools,
)
from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool


class Hermes(ToolFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4."""

    name = "hermes"
    markers = ("<tool_call>", "</tool_call>")
    triggers = ("<tool_call>",)
    texts = CallTexts("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the tags."""
        return "<tool_call>" in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads one object, or a list of them."""
        ends = self.markers[1:] if trigger else ("```",)
        yield from read_objects(parser, ends, is_bare=not trigger)
        yield from read_end(parser, *ends)

    def read(self, parser: CallParser) -> Steps:
        """Reads an answer: also an object without tags, as of Qwen2.5-Coder, unless tools are strict."""
        if not any(tool.is_strict for tool in parser.tools.values()):
            yield from parser.try_calls(self._read_bare(parser))
        yield from super().read(parser)


class Granite(ToolFormat):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3."""

    name = "granite"
    markers = ("<|tool_call|>", "<tool_call>")
    triggers = ("<|tool_call|>", "<tool_call>")
    texts = CallTexts("<|tool_call|>[", ", ", "]")

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the token."""
        return "<|tool_call|>" in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads a list of objects, or one."""
        yield from read_objects(parser)


class Mistral(ToolFormat):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`: Mistral up to 2024."""

    name = "mistral"
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    triggers = ("[TOOL_CALLS]",)
    texts = CallTexts("[TOOL_CALLS][", ", ", "]")

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the token, and none for arguments."""
        return "[TOOL_CALLS]" in template and "[ARGS]" not in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads a list of objects, or the newer form."""
        yield from parser.skip()
        if (yield from parser.peek()) in ("[", "{"):
            yield from read_objects(parser)
            return
        name = yield from parser.name()
        if (yield from parser.accept("[CALL_ID]")):
            yield from parser.until("[ARGS]")
        else:
            yield from parser.accept("[ARGS]")
        yield from parser.arguments(name, self.triggers)

    def call_id(self) -> str:
        """Nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class MistralArgs(Mistral):
    """`[TOOL_CALLS]name[ARGS]{...}`: Mistral since 2025."""

    name = "mistral_args"
    texts = CallTexts()

    def is_used_by(self, template: str) -> bool:
        """Whether the template has both tokens."""
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """The name and its arguments."""
        return (f"[TOOL_CALLS]{tool.name}[ARGS]", arguments)


class Llama3(ToolFormat):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3.1 to 3.3."""

    name = "llama3_json"
    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    triggers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    texts = CallTexts()
    is_single = True
    is_bare = True

    def is_used_by(self, template: str) -> bool:
        """Whether the template has the token, or explains the form."""
        return "<|python_tag|>" in template or '"parameters": dictionary of argument name' in template

    def read_calls(self, parser: CallParser, trigger: str) -> Steps:
        """Reads objects with semicolons between them."""
        while True:
            yield from parser.skip()
            if (yield from parser.peek()) != "{":
                raise NotACall
            yield from read_object(parser, is_bare=not trigger)
            yield from parser.skip()
            yield from parser.accept(";")
            yield from parser.skip()
            if (yield from parser.peek()) != "{":
                break

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """One object."""
        return json_call(tool, arguments, "parameters")


class Json(Llama3):
    """`{"name": ..., "arguments": {...}}` as the whole answer: models whose template shows no tools."""

    name = "json"
    markers = ()
    triggers = ()

    def is_used_by(self, template: str) -> bool:
        """Whether the template shows no tools."""
        return not shows_tools(template)

    def call_parts(self, tool: Tool, arguments: Rule) -> Parts:
        """One object."""
        return json_call(tool, arguments)
