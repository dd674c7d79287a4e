"""Request body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kvmosaic.api.fields import INTEGRAL, Body, Ignored, NumTokens, Only, Variables, example
from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.server.openai.formats import ResponseFormat, structure_of
from kvmosaic.server.openai.messages import Messages
from kvmosaic.server.openai.prompts import Rendering
from kvmosaic.server.openai.sampling_fields import MAX_CHOICES, MAX_LOGPROBS, Defaults, SharedFields, StreamOptions


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

    def rendering(self) -> Rendering:
        """Returns how the conversation is rendered."""
        return Rendering(self.add_generation_prompt, bool(self.continue_final_message), self.chat_template_kwargs)

    def plain_messages(self) -> list[dict[str, Any]]:
        """Returns the conversation as the prompt encoder reads it."""
        return [message.plain() for message in self.messages]


class ChatRequest(SharedFields, ChatFields):
    """A body of /v1/chat/completions."""

    model_config = example(
        messages=[{"role": "user", "content": "Where does the ferry go?"}],
        documents=[{"id": "ferry", "text": "The ferry goes to Oak Island."}],
        max_tokens=16,
    )

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES), INTEGRAL] = 1
    max_tokens: NumTokens | None = None
    max_completion_tokens: Annotated[
        NumTokens | None,
        Field(description="The newer name of max_tokens, and it wins. Default: all there is room for."),
    ] = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[Any, Only((None, []), "tools cannot be called")] = None
    tool_choice: Annotated[Any, Only((None, "none", "auto"), "tools cannot be called")] = None
    functions: Annotated[Any, Only((None, []), "tools cannot be called")] = None
    function_call: Annotated[Any, Only((None, "none", "auto"), "tools cannot be called")] = None
    audio: Annotated[Any, Only((None,), "only text is written")] = None
    modalities: Annotated[Any, Only((None, ["text"]), "only text is written")] = None
    reasoning_effort: Annotated[Any, Only((None, "none"), "use chat_template_kwargs")] = None
    verbosity: Annotated[Any, Only((None, "medium"), "say it in the system message")] = None
    web_search_options: Annotated[Any, Only((None,), "the web is not searched")] = None
    moderation: Annotated[Any, Only((None,), "answers are not moderated")] = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None

    def _format(self) -> StructuredOutputs | None:
        return structure_of(self.response_format)

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
