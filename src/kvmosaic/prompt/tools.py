"""Tools that a conversation names: descriptions that are text of their writers, as messages and documents are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any


def schemas_of(tools: Iterable[Any]) -> list[Any]:
    """Tools as JSON schemas; functions are described by their signature and docstring, as transformers does it.

    Raises:
        Exception: whatever transformers raises about a function that it cannot describe.
    """
    return [_schema_of(tool) if callable(tool) else tool for tool in tools]


def could_write(tools: Any, tokens: Collection[str]) -> bool:
    """Whether a text in tools holds one of these tokens, or could complete one together with its neighbours.

    In any case of letters, since a template may change it.
    """
    lowered = {token.lower() for token in tokens if token}
    firsts, lasts = {token[0] for token in lowered}, {token[-1] for token in lowered}
    return any(
        _could_write(text, token)
        for text in map(str.lower, _texts(tools))
        if text and (text[0] in lasts or not firsts.isdisjoint(text))
        for token in lowered
    )


def mark_tools(value: Any, mark: Callable[[str], str]) -> Any:
    """Changes every text inside tools, names of parameters included."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key) if isinstance(key, str) else key: mark_tools(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_tools(item, mark) for item in value]
    return value


def _schema_of(function: Callable[..., Any]) -> Any:
    from transformers.utils import get_json_schema  # only where a function is given

    return get_json_schema(function)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _could_write(text: str, token: str) -> bool:
    if token in text:
        return True
    return any(text.endswith(token[:length]) or text.startswith(token[-length:]) for length in range(1, len(token)))
