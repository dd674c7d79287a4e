"""Unknown fields of request bodies: left out with a warning, unless they look like a field that matters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from kvmosaic.api.errors import ApiError
from kvmosaic.api.validation_message import path_of

MAX_UNKNOWN = 64
"""Maximum number of different unknown fields of one body; the same field in each of many messages counts once."""
MAX_NAME_CHARACTERS = 64
_LIKENESS = 0.8
_MATTERING = (
    *(
        "documents",
        "cache_salt",
        "find_documents",
        "preamble",
        "companions",
        "position_strategy",
        "chunk_context",
        "repair",
        "adapter",
    ),
    *("messages", "prompt", "input", "system", "instructions", "text", "title", "sees", "position_offset"),
    *("cache_control", "prompt_cache_breakpoint", "tools", "tool_choice", "response_format", "structured_outputs"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p", "top_k", "seed", "stop"),
    *("stop_sequences", "window_tokens", "priority", "n"),
)
"""Fields whose loss changes who shares a cache, what the model reads, or what it answers."""
_MEANT = {"salt": "cache_salt", "docs": "documents"}
_MEANT_IN_DOCUMENTS = {"content": "text", "contents": "text", "page_content": "text"}
"""Other words for such fields, in our Python API and in other libraries."""


def without_unknown_fields(faults: Sequence[Mapping[str, Any]], body: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns a copy of a body without its unknown fields, and a warning for each; without warnings there are none.

    Args:
        faults: all that pydantic found wrong with the body.
        body: the parsed body; stays as it is.

    Raises:
        ApiError: 400: a name is nearly that of a field that matters, or there are too many unknown fields.
    """
    paths = [path for fault in faults if (path := _unknown(fault, body))]
    shown = {_shown(path): path for path in paths}
    if len(shown) > MAX_UNKNOWN:
        raise ApiError(400, f"the body has more than {MAX_UNKNOWN} different unknown fields; remove them")
    for path in shown.values():
        _check_likeness(path)
    if not shown:
        return body, ()
    pruned = copy.deepcopy(body)
    for path in paths:
        _remove(pruned, path)
    return pruned, tuple(f"unknown field {name!r} was ignored" for name in shown)


def _unknown(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of an unknown field of the body; empty for any other fault."""
    if fault["type"] != "extra_forbidden" or fault["loc"][0] != "body":
        return []
    path = path_of(fault, body)
    return path if path and path[-1] == fault["loc"][-1] else []


def _shown(path: Sequence[str | int]) -> str:
    """A path with * for each place in a list, cut to what fits a header."""
    return ".".join("*" if isinstance(part, int) else part[:MAX_NAME_CHARACTERS] for part in path)


def _check_likeness(path: Sequence[str | int]) -> None:
    name = str(path[-1])
    if len(name) > MAX_NAME_CHARACTERS:
        return
    is_in_document = len(path) == 3 and path[0] == "documents"
    meant = _MEANT.get(name) or (_MEANT_IN_DOCUMENTS.get(name) if is_in_document else None)
    if meant is None:
        plain = {_plain(known): known for known in _MATTERING}
        found = get_close_matches(_plain(name), plain, n=1, cutoff=_LIKENESS)
        meant = plain[found[0]] if found else None
    if meant is not None:
        where = ".".join(map(str, path))
        told = f"did you mean {meant!r}?" if meant != name else "it does not go with the others, or not in this place"
        raise ApiError(400, f"unknown field {where!r}; {told}", param=where)


def _plain(name: str) -> str:
    """A name without case, underscores and dashes."""
    return "".join(character for character in name.lower() if character.isalnum())


def _remove(body: Any, path: Sequence[str | int]) -> None:
    *way, last = path
    for part in way:
        body = body[part]
    body.pop(last, None)
