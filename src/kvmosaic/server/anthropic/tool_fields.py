"""Tools in request bodies, with Anthropic's names: definitions and the choice."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.fields import Body, Ignored, Only, Plain
from kvmosaic.tools import ToolRequest, read_tool_request
from kvmosaic.tools.request import MAX_TOOL_CHARACTERS, MAX_TOOLS, NAME_PATTERN

ToolName = Annotated[str, Field(pattern=NAME_PATTERN)]
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class ToolFields(Body):
    """A function that the model may call. Tools that run at Anthropic (another `type`) are refused."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: Annotated[str | None, Field(max_length=MAX_TOOL_CHARACTERS)] = None
    input_schema: Annotated[Plain, Field(description="A JSON schema of an object; its keys are read in this order.")]
    strict: Annotated[bool | None, Field(description="Calls keep to the schema, also where they are optional.")] = None
    defer_loading: Annotated[Any, Only((None, False), "all tools are shown to the model")] = None
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None
    allowed_callers: Ignored = None

    def plain(self) -> dict[str, Any]:
        """Returns the tool as `read_tool_request` reads it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(Body):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[ToolName | None, Field(description="With tool: the one that must be called.")] = None
    disable_parallel_tool_use: Annotated[bool | None, Field(description="At most one call in an answer.")] = None


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]


def tool_request(tools: list[ToolFields] | None, choice: ToolChoice | None) -> ToolRequest | None:
    """Returns the tools of a body and how they may be called; None without tools.

    Raises:
        InvalidTools: tools that cannot be called, or a choice that does not go with them.
    """
    plain = None if tools is None else [tool.plain() for tool in tools]
    if choice is None:
        return read_tool_request(plain)
    wanted = {"type": "function", "function": {"name": choice.name}} if choice.type == "tool" else _MODES[choice.type]
    return read_tool_request(plain, wanted, not choice.disable_parallel_tool_use)
