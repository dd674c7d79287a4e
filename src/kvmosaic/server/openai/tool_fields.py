"""Tools in request bodies, with OpenAI's names: definitions, the choice, and calls of earlier turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.fields import Body, Ignored, Name, Plain, Text
from kvmosaic.errors import InvalidTools
from kvmosaic.tools.request import MAX_NAME_CHARACTERS, MAX_TOOL_CHARACTERS, MAX_TOOLS, NAME_PATTERN
from kvmosaic.web.errors import as_api_error

MAX_CALLS = 1_024
ToolName = Annotated[str, Field(pattern=NAME_PATTERN, max_length=MAX_NAME_CHARACTERS)]


class FunctionFields(Body):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str | None, Field(max_length=MAX_TOOL_CHARACTERS)] = None
    parameters: Annotated[
        Plain | None, Field(description="A JSON schema of an object; its keys are read in this order.")
    ] = None
    strict: Annotated[
        bool | None,
        Field(description="Calls keep to the schema. So do calls that tool_choice requires, without it, too."),
    ] = None


class ToolFields(Body):
    """A tool; only functions can be called."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(Body):
    """The function that must be called."""

    name: ToolName


class NamedChoice(Body):
    """A choice of one function."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]
Functions = Annotated[list[FunctionFields], Field(max_length=MAX_TOOLS)]
ToolChoiceField = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(Body):
    """What was called."""

    name: Name
    arguments: Annotated[Text, Field(description="JSON, as the model wrote it.")]


class CallFields(Body):
    """A call in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = None


Calls = Annotated[list[CallFields], Field(max_length=MAX_CALLS)]


@contextmanager
def named_by_field() -> Iterator[None]:
    """Names the field in errors about tools."""
    try:
        yield
    except InvalidTools as error:
        told = as_api_error(error)
        told.param = "tool_choice" if told.message.startswith("tool_choice") else "tools"
        raise told from error
