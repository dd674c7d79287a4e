"""Tools in request bodies, with OpenAI's names: definitions, the choice, and calls of earlier turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from kvmosaic.api.fields import Body, Ignored, Name, Plain, Text, unsupported
from kvmosaic.errors import InvalidTools
from kvmosaic.tools.request import MAX_NAME_CHARACTERS, MAX_TOOL_CHARACTERS, MAX_TOOLS, NAME_PATTERN
from kvmosaic.web.errors import as_api_error

MAX_CALLS = 1_024
_CHOICES = ("function", "allowed_tools")
"""Types of choices, and the names of what they have in the nested form."""
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


class AllowedTools(Body):
    """The tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Plain], Field(max_length=MAX_TOOLS, description="The names of some of the request's tools.")]


class AllowedChoice(Body):
    """A choice of some tools. The model reads all of them, so that the cached prefix stays."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def flat_function(value: Any) -> Any:
    """A tool or a choice of /v1/responses, also where it has the nested form of the chat route."""
    kinds = _CHOICES if isinstance(value, Mapping) else ()
    nested = next((kind for kind in kinds if isinstance(value.get(kind), Mapping)), None)
    if nested is None:
        return value
    return {name: each for name, each in value.items() if name != nested} | value[nested]


def _nested_choice(value: Any) -> Any:
    """A choice of the chat route, also where it has the flat form of /v1/responses."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in _CHOICES or kind in value:
        return value
    return {"type": kind, kind: {name: each for name, each in value.items() if name != "type"}}


def _function_only(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"tools of type {kind!r:.80} cannot be called here, only functions", matters=False)
    return flat_function(value)


class FlatTool(FunctionFields):
    """A tool of /v1/responses."""

    type: Literal["function"]

    def plain(self) -> dict[str, Any]:
        """Returns the tool as `read_tool_request` reads it."""
        return {"type": "function", "function": self.model_dump(exclude_unset=True, exclude={"type"})}


class FlatAllowed(AllowedTools):
    """A choice of some tools, of /v1/responses."""

    type: Literal["allowed_tools"]


class FlatChoice(NamedFunction):
    """A choice of one function, of /v1/responses."""

    type: Literal["function"]


FlatTools = Annotated[list[Annotated[FlatTool, BeforeValidator(_function_only)]], Field(max_length=MAX_TOOLS)]
_Mode = Annotated[Literal["none", "auto", "required"], Tag("mode")]
_by_form = Discriminator(lambda value: "mode" if isinstance(value, str) else "tool")
FlatChoiceField = Annotated[
    _Mode | Annotated[FlatChoice | FlatAllowed, Field(discriminator="type"), Tag("tool")],
    _by_form,
    BeforeValidator(flat_function),
]
Tools = Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)]
Functions = Annotated[list[FunctionFields], Field(max_length=MAX_TOOLS)]
ToolChoiceField = Annotated[
    _Mode | Annotated[NamedChoice | AllowedChoice, Field(discriminator="type"), Tag("tool")],
    _by_form,
    BeforeValidator(_nested_choice),
]


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
