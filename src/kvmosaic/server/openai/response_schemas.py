"""Bodies of /v1/responses: requests, and replies as a whole or as events."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kvmosaic.api.fields import (
    INTEGRAL,
    MAX_NAME,
    Body,
    Ignored,
    Name,
    NumTokens,
    Only,
    Plain,
    Reply,
    Text,
    Variables,
    example,
)
from kvmosaic.prompt.chat_request import content_parts
from kvmosaic.prompt.message import MAX_MESSAGES
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.server.generation.prompts import Rendering
from kvmosaic.server.generation.sampling_fields import Defaults
from kvmosaic.server.generation.usage import ReplyReport, Usage
from kvmosaic.server.openai.logprobs import TokenLogprob
from kvmosaic.server.openai.request_fields import MAX_LOGPROBS, JsonObjectFormat, SharedFields, TextFormat
from kvmosaic.server.openai.response_items import (
    InputItem,
    ItemStatus,
    OutputItem,
    OutputText,
    ReasoningContent,
    in_turns,
)
from kvmosaic.server.openai.tool_fields import FlatChoiceField, FlatTools
from kvmosaic.tools import ToolRequest, read_tool_request

LOGPROBS = "message.output_text.logprobs"


class NamedSchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(max_length=MAX_NAME)]
    json_schema: Annotated[Plain, Field(alias="schema")]
    description: Name | None = None
    strict: Annotated[bool | None, Field(description="The answer keeps to the schema in either case.")] = None


class TextField(Body):
    """The form of the answer."""

    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, Only((None, "medium"), "say it in the instructions", matters=False)] = None


class ResponseStreamOptions(Body):
    """Options of a stream."""

    include_obfuscation: Ignored = None


_NO_LOGPROBS = "answers that may call tools have none"
_NO_REASONING: tuple[Any, ...] = (None, {}, {"effort": None}, {"effort": "none"}, {"effort": None, "summary": None})
Included = Annotated[
    Any, Only((LOGPROBS, "reasoning.encrypted_content"), "there is nothing of this kind here", matters=False)
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class ResponseRequest(SharedFields):
    """A body of /v1/responses."""

    model_config = example(
        input="Where does the ferry go?",
        documents=[{"id": "ferry", "text": "The ferry goes to Oak Island."}],
        max_output_tokens=16,
    )

    input: Annotated[
        Annotated[Text, Tag("text")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES), Tag("items")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    ]
    instructions: Annotated[Text | None, Field(description="The system text; it precedes that of the input.")] = None
    max_output_tokens: NumTokens | None = None
    text: TextField | None = None
    include: Annotated[list[Included] | None, Field(max_length=16)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] = None
    metadata: Annotated[Metadata | None, Field(description="Sent back with the reply.")] = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Variables | None = None
    previous_response_id: Annotated[Any, Only((None,), "nothing is kept here, so send the whole conversation")] = None
    conversation: Annotated[Any, Only((None,), "nothing is kept here, so send the whole conversation")] = None
    prompt: Annotated[Any, Only((None,), "no prompts are kept here")] = None
    background: Annotated[Any, Only((None, False), "nothing is kept here, so there would be no reply to fetch")] = None
    tools: Annotated[
        FlatTools | None,
        Field(description="Functions that the model may call; tools of other types are ignored with a warning."),
    ] = None
    tool_choice: Annotated[
        FlatChoiceField | None,
        Field(description="required or a function: the answer is a call that keeps to the schema. Default: auto."),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Field(description="false: at most one call in an answer. Default: true.")
    ] = None
    logit_bias: Annotated[Any, Only((None, {}), "use /v1/chat/completions")] = None
    reasoning: Annotated[Any, Only(_NO_REASONING, "use chat_template_kwargs", matters=False)] = None
    truncation: Annotated[Any, Only((None, "disabled"), "prompts are never cut", matters=False)] = None
    context_management: Annotated[Any, Only((None, []), "prompts are never cut", matters=False)] = None
    moderation: Annotated[Any, Only((None,), "answers are not moderated")] = None
    max_tool_calls: Ignored = None

    def plain_messages(self) -> list[dict[str, Any]]:
        """Returns the conversation as the prompt encoder reads it, instructions first."""
        if isinstance(self.input, str):
            messages: list[dict[str, Any]] = [{"role": "user", "content": self.input}]
        else:
            messages = in_turns(item.plain() for item in self.input)
        if not self.instructions:
            return messages
        if messages[0]["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.instructions}, *messages]
        parts = [{"type": "text", "text": self.instructions}, *content_parts(messages[0])]
        return [{**messages[0], "content": parts}, *messages[1:]]

    def rendering(self) -> Rendering:
        """Returns how the conversation is rendered.

        Raises:
            InvalidTools: tools that cannot be called.
        """
        read = self.tool_request()
        tools = () if read is None else tuple(read.for_template())
        return Rendering(template_options=self.chat_template_kwargs, tools=tools)

    def tool_request(self) -> ToolRequest | None:
        """Returns the tools and how they may be called; None without tools.

        Raises:
            InvalidTools: tools that cannot be called, or a choice that does not go with them.
        """
        choice: Any = self.tool_choice
        choice = choice if choice is None or isinstance(choice, str) else choice.model_dump()
        return read_tool_request([tool.plain() for tool in self.tools or ()], choice, self.parallel_tool_calls)

    def warning(self) -> str:
        """What of the request is ignored; empty: nothing."""
        return f"log probabilities were ignored: {_NO_LOGPROBS}" if self._wants_logprobs and self._may_call else ""

    @property
    def _wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    @property
    def _may_call(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        logprobs = (self.top_logprobs or 0) if self._wants_logprobs and not self._may_call else None
        return self.sampling(defaults, max_tokens=self.max_output_tokens, logprobs=logprobs)

    def _format(self) -> StructuredOutputs | None:
        form = self.text.format if self.text else None
        if isinstance(form, JsonObjectFormat):
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=form.json_schema) if isinstance(form, NamedSchemaFormat) else None


Status = ItemStatus | Literal["failed"]


class InputTokensDetails(Reply):
    """Where the prompt's tokens came from; cached and recomputed ones add up to `input_tokens`."""

    cached_tokens: int
    composed_tokens: int
    recomputed_tokens: int
    cache_write_tokens: int
    """Always 0: writing into the cache costs nothing extra."""


class OutputTokensDetails(Reply):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(Reply):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> ResponseUsage:
        """Returns the same numbers under the names of this route."""
        details = usage.prompt_tokens_details
        return cls(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=details.cached_tokens if details else 0,
                composed_tokens=details.composed_tokens if details else 0,
                recomputed_tokens=details.recomputed_tokens if details else usage.prompt_tokens,
                cache_write_tokens=0,
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=usage.total_tokens,
        )


class IncompleteDetails(Reply):
    """Why an answer was cut."""

    reason: Literal["max_output_tokens"]


class ResponseError(Reply):
    """Why there is no answer."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class Response(Reply):
    """A reply of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    kvmosaic: ReplyReport | None = None


class ResponseEvent(Reply):
    """One event of a streamed reply of /v1/responses."""

    type: str
    sequence_number: int
    response: Response | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningContent | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[TokenLogprob] | None = None
