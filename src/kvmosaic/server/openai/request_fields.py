"""Fields of OpenAI's answering routes: stop texts, form of the answer, options of streams, and what is ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvmosaic.api.fields import INTEGRAL, MAX_NAME, Body, Ignored, Plain, StopField
from kvmosaic.sampling import StructuredOutputs
from kvmosaic.sampling.params import MAX_BIASED
from kvmosaic.server.generation.sampling_fields import GenerationFields
from kvmosaic.web.errors import ApiError

MAX_CHOICES = 128
MAX_LOGPROBS = 20


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: Annotated[str, Field(max_length=MAX_NAME)]
    description: Annotated[str | None, Field(max_length=MAX_NAME)] = None
    json_schema: Annotated[Plain | None, Field(alias="schema")] = None
    strict: Annotated[bool | None, Field(description="The answer keeps to the schema in either case.")] = None


class JsonSchemaFormat(Body):
    """JSON that keeps to a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Body):
    """What a stream tells besides text."""

    include_usage: Annotated[bool | None, Field(description="A last chunk without choices, with `usage`.")] = False
    continuous_usage_stats: Annotated[bool | None, Field(description="`usage` so far in every chunk.")] = False
    include_obfuscation: Ignored = None


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Refuses stream options without a stream.

    Raises:
        ApiError: 400.
    """
    if options is not None and not stream:
        raise ApiError(400, "stream_options go with stream=true only", param="stream_options")


class SharedFields(GenerationFields):
    """What a request may say on each of OpenAI's answering routes."""

    stop: StopField = None
    user: Ignored = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None

    def _stop_texts(self) -> str | list[str] | None:
        return self.stop


_BiasedToken = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")]


def _by_id(biases: dict[str, float]) -> dict[int, float]:
    return {int(token_id): bias for token_id, bias in biases.items()}


class ChoiceFields(SharedFields):
    """What a request may say where a reply has choices."""

    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES), INTEGRAL] = 1
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[
        dict[_BiasedToken, Annotated[float, Field(ge=-100, le=100)]] | None,
        Field(max_length=MAX_BIASED, description="Added to the logits of these token ids."),
        AfterValidator(lambda biases: biases and _by_id(biases)),
    ] = None

    def _format(self) -> StructuredOutputs | None:
        form = self.response_format
        if isinstance(form, JsonObjectFormat):
            return StructuredOutputs(json_object=True)
        if isinstance(form, JsonSchemaFormat):
            schema = form.json_schema.json_schema
            return StructuredOutputs(json=schema if schema is not None else {})
        return None
