"""Response formats: JSON of a schema, a choice, a pattern or a grammar."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvmosaic.api.fields import MAX_NAME, Body, Only, Plain
from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling import StructuredOutputs

MAX_GRAMMAR = 2**17


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


class StructuredOutputFields(Body):
    """vLLM's `structured_outputs`: exactly one of these."""

    json_schema: Annotated[
        Plain | Annotated[str, Field(max_length=MAX_GRAMMAR)] | None,
        Field(alias="json", description="A JSON schema, or one written as text."),
    ] = None
    json_object: bool | None = None
    regex: Annotated[str | None, Field(max_length=MAX_GRAMMAR)] = None
    choice: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_NAME)]] | None, Field(min_length=1, max_length=1_024)
    ] = None
    grammar: Annotated[str | None, Field(max_length=MAX_GRAMMAR)] = None
    structural_tag: Annotated[Any, Only((None,), "use a grammar")] = None

    def read(self) -> StructuredOutputs:
        """Returns the constraint on the answer.

        Raises:
            InvalidSampling: none of the fields, or several.
        """
        return StructuredOutputs(
            json=self.json_schema,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=None if self.choice is None else tuple(self.choice),
            grammar=self.grammar,
        )


class StructuredFields(Body):
    """The form that the answer must have; routes add OpenAI's own field to it."""

    structured_outputs: StructuredOutputFields | None = None

    def structure(self) -> StructuredOutputs | None:
        """Returns the constraint on the answer; None for any text.

        Raises:
            InvalidSampling: a format given twice, or an unsupported one.
        """
        asked = self._format()
        if self.structured_outputs is None:
            return asked
        if asked is not None:
            raise InvalidSampling("the form of the answer is given twice; send response_format or structured_outputs")
        return self.structured_outputs.read()

    def _format(self) -> StructuredOutputs | None:
        return None


def structure_of(form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> StructuredOutputs | None:
    """Returns the constraint of a `response_format`."""
    if isinstance(form, JsonObjectFormat):
        return StructuredOutputs(json_object=True)
    if isinstance(form, JsonSchemaFormat):
        return StructuredOutputs(json=form.json_schema.json_schema if form.json_schema.json_schema is not None else {})
    return None
