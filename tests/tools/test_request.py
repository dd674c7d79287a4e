"""Tools of a request: what is refused, and what a template reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tool_families import tool

from kvmosaic.errors import InvalidTools
from kvmosaic.tools import canonical_tools, read_tool_request
from kvmosaic.tools.request import MAX_TOOLS


def nested(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(levels - 1)}} if levels else {"type": "string"}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


@pytest.mark.parametrize(
    ("tools", "choice", "told"),
    [
        ("search", None, "tools must be a list, got str"),
        ([tool(f"t{i}") for i in range(MAX_TOOLS + 1)], None, "129 tools; at most 128"),
        ([{"type": "web_search"}], None, "of type 'web_search'; only tools of type 'function'"),
        ([{"type": "function"}], None, 'tool 0 must have "function"'),
        (function(name=""), None, "1 to 64 letters, digits"),
        (function(name="a" * 65), None, "1 to 64 letters, digits"),
        (function(name="<tool_call>"), None, "1 to 64 letters, digits"),
        (function(name="a\n"), None, "1 to 64 letters, digits"),
        (function(name='a", "arguments"'), None, "1 to 64 letters, digits"),
        (function(arguments={}), None, "the unknown field 'arguments'; known are name"),
        (function(description=3), None, "description of tool 'f' must be a text"),
        (function(strict="yes"), None, "strict of tool 'f' must be true or false"),
        (function(parameters=[]), None, "must be a JSON schema, got list"),
        (function(parameters={"type": "array"}), None, "must be of type 'object', got 'array'"),
        (function(parameters=nested(40)), None, "nested deeper than 64 levels"),
        (function(parameters={"a": float("nan")}), None, "cannot be written as JSON"),
        (function(description="\ud800"), None, "cannot be written as JSON"),
        (function(description="a" * 2**17), None, "characters as JSON; at most 131072"),
        ([tool(f"t{i}", "a" * 2**16) for i in range(20)], None, "at most 1048576 together"),
        ([tool("a"), tool("b"), tool("a")], None, "two tools have the name 'a'"),
        ([tool("a")], "always", "tool_choice is 'always'; choose one of auto, none, required"),
        ([tool("a")], {"type": "function"}, "tool_choice must be"),
        ([tool("a")], {"type": "function", "function": {"name": "b"}}, "names 'b', which is none of the tools"),
        ([], {"type": "function", "function": {"name": "b"}}, "names 'b', which is none of the tools"),
        (None, "required", "'required', and there are no tools"),
        ([tool("a")], {"type": "allowed_tools", "mode": "always", "tools": []}, "needs a mode .*'always'"),
        ([tool("a")], {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, "needs a mode"),
        ([tool("a")], {"type": "allowed_tools", "mode": "auto", "tools": [tool("b")]}, "names 'b', which is none"),
        ([tool("a")], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}, "allows no function"),
    ],
)
def test_what_cannot_be_called_is_refused(tools: Any, choice: Any, told: str) -> None:
    with pytest.raises(InvalidTools, match=told):
        read_tool_request(tools, choice)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called_and_all_are_read(mode: str) -> None:
    flat = {"mode": mode, "tools": [{"type": "function", "name": "b"}, {"type": "mcp", "server_label": "s"}]}
    nested = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool("b")]}}
    for choice in ({"type": "allowed_tools", **flat}, nested):
        request = read_tool_request([tool("a"), tool("b")], choice)
        assert request is not None and request.choice.is_forced == (mode == "required") and not request.is_single
        assert [each.name for each in request.callable_tools] == ["b"]
        assert request.for_template() == read_tool_request([tool("a"), tool("b")]).for_template()  # type: ignore[union-attr]


def test_parallel_must_be_a_truth_value() -> None:
    with pytest.raises(InvalidTools, match="parallel_tool_calls must be true or false, got 'no'"):
        read_tool_request([tool("a")], None, "no")


def test_no_tools_are_no_request() -> None:
    for tools in (None, [], ()):
        for choice in (None, "auto", "none"):
            assert read_tool_request(tools, choice) is None


def test_the_same_tools_are_the_same_text_in_any_order() -> None:
    tools = [tool("b"), tool("a"), tool("c")]
    tools[0]["function"]["strict"] = True  # type: ignore[index]
    swapped = [
        {"function": {key: each["function"][key] for key in reversed(each["function"])}, "type": "function"}  # type: ignore[index,call-overload]
        for each in (tools[2], tools[0], tools[1])
    ]
    texts = []
    for given in (tools, swapped):
        request = read_tool_request(given)
        assert request is not None
        texts.append(json.dumps(request.for_template()))
    assert texts[0] == texts[1]
    assert canonical_tools(swapped) == [swapped[2], swapped[1], swapped[0]]


def test_parameters_keep_their_order() -> None:
    request = read_tool_request([tool("a", zebra={"type": "string"}, ant={"type": "string"})])
    assert request is not None
    assert list(request.for_template()[0]["function"]["parameters"]["properties"]) == ["zebra", "ant"]


def test_the_choice_does_not_change_what_the_template_reads() -> None:
    choices = [None, "none", "required", {"type": "function", "function": {"name": "b"}}]
    requests = [read_tool_request([tool("b"), tool("a")], choice) for choice in choices]
    shown = [request.for_template() for request in requests if request is not None]
    assert len(shown) == 4 and all(each == shown[0] for each in shown)
    names = [[each.name for each in request.callable_tools] for request in requests if request is not None]
    assert names == [["a", "b"], [], ["a", "b"], ["b"]]
