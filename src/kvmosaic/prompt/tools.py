"""Tools of a conversation: their descriptions are untrusted text, like messages and documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.tokenizer import Tokenizer

_SCHEMAS = "{{ tools | tojson }}"


def schemas_of(tools: Sequence[Any], tokenizer: Tokenizer) -> list[Any]:
    """Tools as JSON schemas; functions are described by signature and docstring, as in transformers.

    Raises:
        InvalidMessages: a function that transformers cannot describe.
    """
    if not any(map(callable, tools)):
        return list(tools)
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], tools=list(tools), chat_template=_SCHEMAS, tokenize=False
        )
    except Exception as error:  # its message names what is missing
        raise InvalidMessages(f"a tool cannot be described: {error}; give a JSON schema instead") from error
    return list(json.loads(text))


def could_write(tools: Any, tokens: Collection[str]) -> bool:
    """Whether a text in tools contains one of these tokens, or could complete one together with its neighbours.

    Case-insensitive, since a template may change the case.
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
    """Maps every text inside tools, names of parameters included."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key) if isinstance(key, str) else key: mark_tools(item, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mark_tools(item, mark) for item in value]
    return value


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
