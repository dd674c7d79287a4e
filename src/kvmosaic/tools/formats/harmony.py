"""The format of GPT-OSS: messages in channels, calls as messages to a function."""

from __future__ import annotations

import re

from kvmosaic.tools.formats.tool_format import CallTexts, Parts, Rule, ToolFormat
from kvmosaic.tools.parser import CallParser, NotACall, Steps
from kvmosaic.tools.request import Tool

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
