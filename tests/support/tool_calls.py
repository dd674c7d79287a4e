"""Whole answers, read for the calls in them."""

from __future__ import annotations

from kvmosaic.tools import CallCollector, CallParser, ToolCall


def parse_calls(parser: CallParser, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The content and the calls of a whole answer."""
    collector = CallCollector()
    collector.add(parser.feed(text))
    collector.add(parser.finish())
    return collector.content, collector.calls
