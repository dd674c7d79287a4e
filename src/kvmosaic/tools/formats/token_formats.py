"""Formats that mark calls by control tokens: the blocks of DeepSeek, and the channels of GPT-OSS."""

from __future__ import annotations

import re

from kvmosaic.tools.formats.tool_format import CallTexts, Parts, Rule, ToolFormat
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
