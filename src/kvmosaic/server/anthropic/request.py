"""Request bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.fields import Body, Ignored, NumTokens, Only, Plain, StopTexts, Text, Variables, example
from kvmosaic.prompt.message import MAX_MESSAGES
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.server.anthropic.blocks import Content, TextBlocks
from kvmosaic.server.generation.sampling_fields import Defaults, GenerationFields
from kvmosaic.tools import ToolRequest, read_tool_request
from kvmosaic.tools.request import MAX_TOOL_CHARACTERS, MAX_TOOLS, NAME_PATTERN

THINKING_VARIABLE = "enable_thinking"
"""The variable by which chat templates switch thinking on and off."""


class Message(Body):
    """One message; neighbours with the same role are read as one."""

    role: Literal["user", "assistant", "system"]
    content: Content


class Thinking(Body):
    """Whether the model thinks first."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Field(description="Ignored with a warning where the model's chat template cannot switch thinking on."),
    ]
    budget_tokens: Ignored = None
    display: Ignored = None


class SchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[Plain, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    format: SchemaFormat | None = None
    effort: Ignored = None


class CountRequest(GenerationFields):
    """A body of /v1/messages/count_tokens: that of /v1/messages, of which only the prompt matters."""

    model_config = example(
        messages=[{"role": "user", "content": "Where does the ferry go?"}],
        documents=[{"id": "ferry", "text": "The ferry goes to Oak Island."}],
    )

    max_tokens: NumTokens | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[Text | TextBlocks | None, Field(description="The first mark in it ends the preamble.")] = None
    stop_sequences: StopTexts = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: Annotated[
        Tools | None, Field(description="Functions that the model may call; it reads them in the order of their names.")
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Field(description="any or tool: the answer is a call that keeps to the schema. Default: auto."),
    ] = None
    chat_template_kwargs: Annotated[Variables | None, Field(description="Variables of the chat template.")] = None
    container: Annotated[Any, Only((None,), "code is not run here")] = None
    mcp_servers: Annotated[Any, Only((None, []), "other servers are not called")] = None
    context_management: Annotated[Any, Only((None, {}), "prompts are never cut", matters=False)] = None
    metadata: Ignored = None
    service_tier: Ignored = None
    inference_geo: Ignored = None
    speed: Ignored = None
    cache_control: Ignored = None

    def template_options(self, template: str) -> dict[str, Any] | None:
        """Returns variables of a chat template, with thinking switched as the request says."""
        options = dict(self.chat_template_kwargs or {})
        if self.thinking is not None and THINKING_VARIABLE in template:
            options.setdefault(THINKING_VARIABLE, self.thinking.type != "disabled")
        return options or None

    def warning(self, template: str) -> str:
        """What of the request is ignored for this template; empty: nothing."""
        is_thinking = self.thinking is not None and self.thinking.type != "disabled"
        if not is_thinking or THINKING_VARIABLE in template:
            return ""
        return "'thinking' was ignored: this model's chat template cannot switch it on"

    def tool_request(self) -> ToolRequest | None:
        """Returns the tools and how they may be called; None without tools.

        Raises:
            InvalidTools: tools that cannot be called, or a choice that does not go with them.
        """
        return tool_request(self.tools, self.tool_choice)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        return self.sampling(defaults, max_tokens=self.max_tokens)

    def _format(self) -> StructuredOutputs | None:
        form = self.output_config.format if self.output_config else None
        return None if form is None else StructuredOutputs(json=form.json_schema)

    def _stop_texts(self) -> list[str] | None:
        return self.stop_sequences


class MessagesRequest(CountRequest):
    """A body of /v1/messages."""

    model_config = example(
        max_tokens=16,
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "document",
                        "title": "The ferry",
                        "source": {"type": "text", "media_type": "text/plain", "data": "It goes to Oak Island."},
                    },
                    {"type": "text", "text": "Where does the ferry go?"},
                ],
            }
        ],
    )

    max_tokens: Annotated[NumTokens, Field(examples=[16])]


ToolName = Annotated[str, Field(pattern=NAME_PATTERN)]
_MODES = {"auto": "auto", "any": "required", "none": "none"}


class ToolFields(Body):
    """A function that the model may call. Tools that run at Anthropic (another `type`) are refused."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: Annotated[str | None, Field(max_length=MAX_TOOL_CHARACTERS)] = None
    input_schema: Annotated[Plain, Field(description="A JSON schema of an object; its keys are read in this order.")]
    strict: Annotated[bool | None, Field(description="Calls keep to the schema, also where they are optional.")] = None
    defer_loading: Annotated[Any, Only((None, False), "all tools are shown to the model", matters=False)] = None
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
