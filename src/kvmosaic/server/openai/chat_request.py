"""Request body of /v1/chat/completions: messages, and how they are rendered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvmosaic.api.fields import (
    INTEGRAL,
    Body,
    Ignored,
    Name,
    NumTokens,
    Only,
    Plain,
    Text,
    Variables,
    example,
)
from kvmosaic.errors import InvalidSampling, InvalidTools
from kvmosaic.prompt.message import MAX_MESSAGES
from kvmosaic.sampling import SamplingParams
from kvmosaic.server.generation.prompts import Rendering
from kvmosaic.server.generation.sampling_fields import Defaults
from kvmosaic.server.openai.request_fields import (
    MAX_LOGPROBS,
    ChoiceFields,
)
from kvmosaic.server.openai.tool_fields import (
    AllowedChoice,
    CalledFunction,
    CallFields,
    Calls,
    Functions,
    NamedChoice,
    NamedFunction,
    ToolChoiceField,
    Tools,
)
from kvmosaic.tools import ToolRequest, read_tool_request

Mark = bool | Plain | None
_OLD_CALL = "call00000"
"""The id of a call in the old form, which has none; templates of Mistral want nine letters and digits."""


def _shape(content: Any) -> str:
    return "text" if isinstance(content, str) else "parts"


def _check_part_type(value: Any) -> Any:
    if isinstance(value, str) and value not in ("text", "input_text", "output_text"):
        told = "{value} is not supported: models here read text only; send a part of the type 'text'"
        raise PydanticCustomError("part_type", told, {"value": f"{value!r:.80}"})
    return value


class TextPart(Body):
    """A part of a message. A mark makes it a segment of its own: see `documents` in the manual."""

    type: Annotated[Literal["text", "input_text", "output_text"], BeforeValidator(_check_part_type)] = "text"
    text: Text
    cache_control: Annotated[Mark, Field(examples=[{"type": "ephemeral"}])] = None
    prompt_cache_breakpoint: Annotated[Mark, Field(examples=[{"mode": "explicit"}])] = None
    annotations: Ignored = None
    logprobs: Ignored = None


Content = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES), Tag("parts")],
    Discriminator(_shape),
]


class ChatMessage(Body):
    """One message."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool", "function"],
        Field(description="'developer' is 'system' for models whose template does not know it; 'function' is 'tool'."),
    ]
    tool_calls: Annotated[Calls | None, Field(description="Calls in an answer.")] = None
    tool_call_id: Annotated[Name | None, Field(description="The call whose result a tool's message is.")] = None
    content: Annotated[Content | None, Field(description="May be null in an answer.", validate_default=True)] = None
    name: Name | None = None
    reasoning_content: Text | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: Annotated[Any, Only((None,), "only text can be read")] = None
    function_call: Annotated[CalledFunction | None, Field(description="The old form of tool_calls.")] = None

    @field_validator("content")
    @classmethod
    def _said(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") != "assistant":
            raise PydanticCustomError("missing", "Field required")
        return content

    def plain(self) -> dict[str, Any]:
        """Returns the message as the prompt encoder reads it."""
        content = self.content
        kept = [part.model_dump(exclude_none=True) for part in content] if isinstance(content, list) else content
        calls = self.tool_calls or []
        if self.function_call is not None:
            calls = [*calls, CallFields(id=_OLD_CALL, function=self.function_call)]
        is_old = self.role == "function"
        extra = {
            "name": self.name,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.model_dump(exclude={"index"}) for call in calls] or None,
            "tool_call_id": _OLD_CALL if is_old else self.tool_call_id,
        }
        return {
            "role": "tool" if is_old else self.role,
            "content": kept,
            **{key: text for key, text in extra.items() if text is not None},
        }


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


class ChatFields(Body):
    """A conversation and how it is rendered."""

    messages: Messages
    add_generation_prompt: Annotated[
        bool | None, Field(description="Default: true, or false with continue_final_message.")
    ] = None
    continue_final_message: bool | None = False
    chat_template_kwargs: Annotated[
        Variables | None, Field(description="Variables of the chat template, such as enable_thinking.")
    ] = None

    tools: Annotated[
        Tools | None, Field(description="Functions that the model may call; it reads them in the order of their names.")
    ] = None

    def rendering(self) -> Rendering:
        """Returns how the conversation is rendered.

        Raises:
            InvalidTools: tools that cannot be called.
        """
        read = read_tool_request(self.plain_tools())
        return Rendering(
            self.add_generation_prompt,
            bool(self.continue_final_message),
            self.chat_template_kwargs,
            () if read is None else tuple(read.for_template()),
        )

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools as `read_tool_request` reads them."""
        return None if self.tools is None else [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def plain_messages(self) -> list[dict[str, Any]]:
        """Returns the conversation as the prompt encoder reads it."""
        return [message.plain() for message in self.messages]


class ChatRequest(ChoiceFields, ChatFields):
    """A body of /v1/chat/completions."""

    model_config = example(
        messages=[{"role": "user", "content": "Where does the ferry go?"}],
        documents=[{"id": "ferry", "text": "The ferry goes to Oak Island."}],
        max_tokens=16,
    )

    max_tokens: NumTokens | None = None
    max_completion_tokens: Annotated[
        NumTokens | None,
        Field(description="The newer name of max_tokens, and it wins. Default: all there is room for."),
    ] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] = None
    tool_choice: Annotated[
        ToolChoiceField | None,
        Field(description="required or a function: the answer is a call that keeps to the schema. Default: auto."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: at most one call in an answer. Default: true.")
    ] = None
    functions: Annotated[
        Functions | None, Field(description="The old form of tools; then calls are in function_call.")
    ] = None
    function_call: Annotated[
        Literal["none", "auto"] | NamedFunction | None, Field(description="The old form of tool_choice.")
    ] = None
    audio: Annotated[Any, Only((None,), "only text is written")] = None
    modalities: Annotated[Any, Only((None, ["text"]), "only text is written")] = None
    reasoning_effort: Annotated[Any, Only((None, "none"), "use chat_template_kwargs", matters=False)] = None
    verbosity: Annotated[Any, Only((None, "medium"), "say it in the system message", matters=False)] = None
    web_search_options: Annotated[Any, Only((None,), "the web is not searched")] = None
    moderation: Annotated[Any, Only((None,), "answers are not moderated")] = None
    prediction: Ignored = None

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools, or the functions as tools."""
        if not self.functions:
            return super().plain_tools()
        return [{"type": "function", "function": each.model_dump(exclude_unset=True)} for each in self.functions]

    def tool_request(self) -> ToolRequest | None:
        """Returns the tools and how they may be called; None without tools.

        Raises:
            InvalidTools: tools that cannot be called, or a choice that does not go with them.
        """
        if self.functions and (self.tools or self.tool_choice):
            raise InvalidTools("functions are the old form of tools; send tools and tool_choice only")
        choice: Any = self.tool_choice if self.function_call is None else self.function_call
        if isinstance(choice, NamedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        elif isinstance(choice, NamedChoice | AllowedChoice):
            choice = choice.model_dump()
        return read_tool_request(self.plain_tools(), choice, False if self.functions else self.parallel_tool_calls)

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidSampling("top_logprobs needs logprobs=true")
        return self.sampling(
            defaults,
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
