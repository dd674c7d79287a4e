"""Fields of OpenAI's answering routes: stop texts, form of the answer, options of streams, and what is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.fields import MAX_NAME, Body, Ignored, Only, Plain, StopField
from kvmosaic.sampling import StructuredOutputs
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


def structure_of(form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> StructuredOutputs | None:
    """Returns the constraint of a `response_format`."""
    if isinstance(form, JsonObjectFormat):
        return StructuredOutputs(json_object=True)
    if isinstance(form, JsonSchemaFormat):
        return StructuredOutputs(json=form.json_schema.json_schema if form.json_schema.json_schema is not None else {})
    return None


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
    logit_bias: Annotated[Any, Only((None, {}), "single logits cannot be changed")] = None
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
