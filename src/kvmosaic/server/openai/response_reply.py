"""Replies of /v1/responses, whole and as events."""

from __future__ import annotations

from typing import Any, Literal

from kvmosaic.api.fields import Reply
from kvmosaic.server.openai.logprobs import TokenLogprob
from kvmosaic.server.openai.usage import ReplyReport, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(Reply):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Reply):
    """The answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(Reply):
    """Where the prompt's tokens came from; those reused, composed and recomputed add up to `input_tokens`."""

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
    output: list[OutputMessage]
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
    tool_choice: Literal["none"]
    tools: list[Any]
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
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
