"""Request body of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from kvmosaic.api.fields import INTEGRAL, NumTokens, Only, Text, TokenIds, example
from kvmosaic.sampling import SamplingParams, StructuredOutputs
from kvmosaic.server.errors import ApiError
from kvmosaic.server.openai.formats import ResponseFormat, structure_of
from kvmosaic.server.openai.sampling_fields import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Defaults,
    SharedFields,
    StreamOptions,
    check_stream_options,
)

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_ALL_CHOICES = 512


def _shape(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "texts" if isinstance(first, str) else "ids" if isinstance(first, int | float) else "lists of ids"


PromptField = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("lists of ids")],
    Discriminator(_shape),
]


class CompletionRequest(SharedFields):
    """A body of /v1/completions."""

    model_config = example(prompt="The ferry goes to", max_tokens=16)

    prompt: PromptField
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES), INTEGRAL] = 1
    best_of: Annotated[int | None, Field(ge=1, le=MAX_CHOICES, description="Must equal n."), INTEGRAL] = None
    max_tokens: NumTokens | None = DEFAULT_MAX_TOKENS
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS), INTEGRAL] = None
    echo: Annotated[bool | None, Field(description="The prompt before its answer; texts without logprobs only.")] = (
        False
    )
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    suffix: Annotated[Any, Only((None,), "the answer cannot be made to fit a suffix")] = None

    def sampling_params(self, defaults: Defaults) -> SamplingParams:
        """Returns the sampling parameters.

        Raises:
            InvalidSampling: values that do not go together.
        """
        most = self.max_tokens or DEFAULT_MAX_TOKENS
        return self.sampling(defaults, n=self.n or 1, max_tokens=most, logprobs=self.logprobs)

    def _format(self) -> StructuredOutputs | None:
        return structure_of(self.response_format)

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        """All prompts, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def check(self, max_at_once: int) -> None:
        """Refuses contradictory fields, and more prompts than the server ever admits.

        Raises:
            ApiError: 400.
        """
        check_stream_options(self.stream, self.stream_options)
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise ApiError(
                400, f"best_of is {self.best_of} and n is {n}; only equal ones are supported", param="best_of"
            )
        if len(self.prompts) * n > MAX_ALL_CHOICES:
            raise ApiError(400, f"{len(self.prompts)} prompts with n={n}; at most {MAX_ALL_CHOICES} answers", param="n")
        if len(self.prompts) * n > max_at_once:
            many = f"{len(self.prompts)} prompts" + (f" with n={n}" if n > 1 else "")
            message = f"{many}; this server lets {max_at_once} answers in at once: send fewer prompts"
            raise ApiError(400, message, param="prompt")
        if self.echo and (self.logprobs is not None or not all(isinstance(prompt, str) for prompt in self.prompts)):
            raise ApiError(400, "echo goes with prompts of text and without logprobs", param="echo")
