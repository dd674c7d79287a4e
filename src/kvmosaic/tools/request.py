"""Tools as a request gives them: checked, bounded, and in an order that does not depend on the request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.errors import InvalidTools

MAX_TOOLS = 128
MAX_TOOLS_CHARACTERS = 2**20
"""All tools of a request together, as JSON."""
MAX_TOOL_CHARACTERS = 2**17
MAX_SCHEMA_DEPTH = 64
MAX_NAME_CHARACTERS = 64
NAME_PATTERN = r"^[A-Za-z0-9_.-]{1,64}$"
NAME_RULE = "1 to 64 letters, digits or any of _ . -"
_NAME = re.compile(NAME_PATTERN.removesuffix("$") + r"\Z")
_FIELDS = ("name", "description", "parameters", "strict")
_MODES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """A JSON schema of an object, its keys in the caller's order, which is the order of the arguments."""
    is_strict: bool = False
    """Whether calls keep to the schema even where calls are optional."""

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates read it: always the same text for the same tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": {**function, "parameters": parameters}}

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are always an object.

        Unknown arguments are excluded where the schema names some and does not say otherwise.
        """
        given = dict(self.parameters or {"properties": {}})
        closed = {} if given.keys() & _OPEN_KEYWORDS or "properties" not in given else {"additionalProperties": False}
        return {**given, "type": "object", **closed}


_OPEN_KEYWORDS = frozenset(
    "additionalProperties patternProperties unevaluatedProperties propertyNames $ref allOf anyOf oneOf if not "
    "dependentSchemas dependentRequired minProperties".split()
)
"""Where unknown arguments are wanted, or could be needed to fulfil the schema."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may, must or must not call a tool."""

    mode: str = "auto"
    """auto, none, required, or named."""
    names: tuple[str, ...] | None = None
    """The tools that may be called, or the one that must be; None: all."""

    @property
    def is_forced(self) -> bool:
        """Whether the answer is a call."""
        return self.mode in ("required", "named")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The tools of a request, sorted by name, and how they may be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice = field(default_factory=ToolChoice)
    is_parallel: bool = True
    """Whether an answer may hold more than one call."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Tools that the answer may call."""
        if self.choice.mode == "none":
            return ()
        names = self.choice.names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)

    @property
    def is_single(self) -> bool:
        """Whether an answer holds one call at most."""
        return not self.is_parallel or self.choice.mode == "named"

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them. They do not depend on the choice, so that prefixes stay cached."""
        return [tool.for_template() for tool in self.tools]


def read_tool_request(tools: object, choice: object = None, parallel: object = None) -> ToolRequest | None:
    """Reads the tools of a request, as OpenAI's API has them; None without tools.

    Args:
        tools: [{"type": "function", "function": {"name", "description", "parameters", "strict"}}], or None.
        choice: "auto" (the default), "none", "required", {"type": "function", "function": {"name": ...}}, or
            {"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}, flat or under "allowed_tools".
        parallel: whether an answer may hold several calls; None: it may.

    Raises:
        InvalidTools: no list of tools, too many or too large ones, or a choice that does not go with them.
    """
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidTools(f"parallel_tool_calls must be true or false, got {parallel!r:.80}")
    known = _read_tools(tools)
    read = _read_choice(choice, [tool.name for tool in known])
    return ToolRequest(known, read, parallel is not False) if known else None


def canonical_tools(tools: Sequence[Any]) -> list[Any]:
    """Tools for a chat template in the order of their names, so that permuted tools are the same prompt."""
    return sorted(tools, key=name_of)


def name_of(tool: Any) -> str:
    """The name of a tool in any shape; "" without one."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _read_tools(tools: object) -> tuple[Tool, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidTools(f"tools must be a list, got {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise InvalidTools(f"{len(tools)} tools; at most {MAX_TOOLS} are allowed")
    read = [_read_tool(tool, index) for index, tool in enumerate(tools)]
    total = sum(size for _, size in read)
    if total > MAX_TOOLS_CHARACTERS:
        raise InvalidTools(f"the tools have {total} characters as JSON; at most {MAX_TOOLS_CHARACTERS} together")
    by_name = {tool.name: tool for tool, _ in read}
    if len(by_name) < len(read):
        names = [tool.name for tool, _ in read]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidTools(f"two tools have the name {twice!r}; give each its own")
    return tuple(by_name[name] for name in sorted(by_name))


def _read_tool(tool: object, index: int) -> tuple[Tool, int]:
    """A checked tool and its length as JSON."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise InvalidTools(f"tool {index} is of type {kind!r:.80}; only tools of type 'function' can be called")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidTools(f'tool {index} must have "function": {{"name": ..., "parameters": ...}}')
    unknown = [str(key) for key in function if key not in _FIELDS]
    if unknown:
        raise InvalidTools(f"tool {index} has the unknown field {unknown[0]!r:.80}; known are {', '.join(_FIELDS)}")
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidTools(f"tool {index} has the name {name!r:.80}; a name has {NAME_RULE}")
    if description is not None and not isinstance(description, str):
        raise InvalidTools(f"the description of tool {name!r} must be a text, got {type(description).__name__}")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidTools(f"strict of tool {name!r} must be true or false, got {strict!r:.80}")
    parameters = _read_parameters(function.get("parameters"), name)
    read = Tool(name, description, parameters, bool(strict))
    return read, _checked_size(read)


def _read_parameters(parameters: object, name: str) -> Mapping[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        raise InvalidTools(f"the parameters of tool {name!r} must be a JSON schema, got {type(parameters).__name__}")
    if is_deeper(parameters, MAX_SCHEMA_DEPTH):
        raise InvalidTools(
            f"the parameters of tool {name!r} are nested deeper than {MAX_SCHEMA_DEPTH} levels; flatten them, or use "
            "$ref"
        )
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidTools(f"the parameters of tool {name!r} must be of type 'object', got {kind!r:.80}")
    return parameters


def _checked_size(tool: Tool) -> int:
    try:
        text = json.dumps(tool.for_template(), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidTools(f"tool {tool.name!r} cannot be written as JSON: {error}") from None
    if len(text) > MAX_TOOL_CHARACTERS:
        raise InvalidTools(
            f"tool {tool.name!r} has {len(text)} characters as JSON; at most {MAX_TOOL_CHARACTERS} are allowed"
        )
    return len(text)


def is_deeper(value: object, levels: int) -> bool:
    """Whether a value of JSON is nested deeper than so many levels."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return not levels or any(is_deeper(part, levels - 1) for part in parts)


def _read_choice(choice: object, names: Sequence[str]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str):
        if choice not in _MODES:
            raise InvalidTools(
                f"tool_choice is {choice!r:.80}; choose one of {', '.join(_MODES)}, or "
                '{"type": "function", "function": {"name": ...}}'
            )
        if choice == "required" and not names:
            raise InvalidTools("tool_choice is 'required', and there are no tools; send some")
        return ToolChoice(choice)
    given = choice if isinstance(choice, Mapping) else {}
    if given.get("type") == "allowed_tools":
        return _read_allowed(given.get("allowed_tools", given), names)
    name = name_of(given) if given.get("type") == "function" else ""
    if not name:
        raise InvalidTools(
            'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
        )
    return ToolChoice("named", _known((name,), names))


def _read_allowed(given: Any, names: Sequence[str]) -> ToolChoice:
    """A choice of some tools. Tools of other types are left out, since only functions can be called here."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, Sequence) or isinstance(tools, str):
        raise InvalidTools(
            f"tool_choice 'allowed_tools' needs a mode ('auto' or 'required') and a list of tools, got {given!r:.80}"
        )
    allowed = _known([name for tool in tools if (name := name_of(tool))], names)
    if not allowed and mode == "required":
        raise InvalidTools("tool_choice requires a call and allows no function; name one of the tools")
    return ToolChoice(mode, allowed)


def _known(chosen: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    unknown = next((name for name in chosen if name not in names), None)
    if unknown is not None:
        raise InvalidTools(f"tool_choice names {unknown!r:.80}, which is none of the tools; send it, or choose another")
    return tuple(chosen)
