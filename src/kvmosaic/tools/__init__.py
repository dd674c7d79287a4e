"""Tools: what a model may call, and the formats in which models write their calls."""

from __future__ import annotations

from kvmosaic.tools.call import ArgumentsText, CallEvent, CallStart, ContentText, ReasoningText, ToolCall
from kvmosaic.tools.formats import TOOL_FORMATS, ToolFormat, detect_tool_format, shows_tools
from kvmosaic.tools.formats.tool_format import ControlToken, call_grammar
from kvmosaic.tools.parser import CallCollector, CallParser
from kvmosaic.tools.request import Tool, ToolChoice, ToolRequest, canonical_tools, read_tool_request
