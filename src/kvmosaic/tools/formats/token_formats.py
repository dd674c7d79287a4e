"""The formats of DeepSeek: blocks between tokens of their own."""

from __future__ import annotations

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
