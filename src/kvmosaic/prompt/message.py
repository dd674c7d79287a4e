"""Messages: validation of a conversation before rendering."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvmosaic.errors import InvalidMessages

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_MESSAGE_CHARACTERS = 2**25
MAX_CALL_VALUES = 2**16
"""Values in the arguments of all tool calls of a conversation: each text among them takes a kilobyte while rendered."""
_MAX_DEPTH = 32
_KEY = re.compile(r"[\w .$/@:-]{1,256}")
_EXTRA_KEYS = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Validates a conversation and returns it with every content as one text.

    A content is a text, or a list of text parts `{"type": "text", "text": ...}`, which are joined by line breaks; only
    the last message must have one, since an aborted answer stays in the conversation.

    Raises:
        InvalidMessages: no messages, an unknown role, nothing to answer, or a part that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidMessages(
            f'messages must be a list of {{"role": ..., "content": ...}}, got {type(messages).__name__}'
        )
    if not messages:
        raise InvalidMessages("there are no messages; send at least one with the role 'user'")
    if len(messages) > MAX_MESSAGES:
        raise InvalidMessages(f"{len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    read = [_read_message(message, index) for index, message in enumerate(messages)]
    role, content = read[-1]["role"], read[-1]["content"]
    if not content.strip() and role != "tool" and not (role == "assistant" and read[-1].get("tool_calls")):
        raise InvalidMessages(f"message {len(read) - 1} ({role}), the last one, has no content; write something")
    num_values = sum(_num_values(message["tool_calls"]) for message in read if "tool_calls" in message)
    if num_values > MAX_CALL_VALUES:
        raise InvalidMessages(
            f"the tool calls of these messages hold {num_values} values; at most {MAX_CALL_VALUES} are allowed: leave "
            "out earlier turns"
        )
    return read


def is_system(message: Mapping[str, Any]) -> bool:
    """Whether a message comes from the operator of the system, not from its user."""
    return message["role"] in ("system", "developer")


def is_tool_result(message: Mapping[str, Any]) -> bool:
    """Whether a message is the result of a tool, in a conversation for a template without tools as well."""
    return message["role"] == "tool" or "tool_call_id" in message


def _read_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidMessages(f'message {index} must be {{"role": ..., "content": ...}}, got {message!r:.80}')
    role = message.get("role")
    if role not in ROLES:
        raise InvalidMessages(f"message {index} has the role {role!r:.80}; choose one of {', '.join(ROLES)}")
    content = _read_content(message.get("content"), index)
    if len(content) > MAX_MESSAGE_CHARACTERS:
        raise InvalidMessages(
            f"message {index} ({role}) has {len(content)} characters; at most {MAX_MESSAGE_CHARACTERS} are allowed"
        )
    extra = {key: _plain(message[key], index) for key in _EXTRA_KEYS if message.get(key) is not None}
    if isinstance(calls := extra.get("tool_calls"), list):
        extra["tool_calls"] = [_with_read_arguments(call, index) for call in calls]
    return {"role": role, "content": content, **extra}


def _with_read_arguments(call: object, index: int) -> object:
    """A tool call with its arguments as a mapping, as templates expect them, if they are the JSON of one.

    Arguments that a model wrote in another form, or with keys that no message may have, stay a text.
    """
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    if not isinstance(read, dict):
        return call
    with suppress(InvalidMessages):
        return {**call, "function": {**function, "arguments": _plain(read, index)}}
    return call


def _num_values(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_values, parts))


def _plain(value: object, index: int, depth: int = 0) -> object:
    """A copy of plain lists, mappings, texts and numbers, with text keys only."""
    if value is None or isinstance(value, str | int | float):
        return value
    if depth >= _MAX_DEPTH:
        raise InvalidMessages(f"message {index} is nested deeper than {_MAX_DEPTH} levels; flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise InvalidMessages(
                    f"message {index} has the key {key!r:.80}; a key has up to 256 letters, digits, spaces "
                    "or any of _ . $ / @ : -"
                )
        return {key: _plain(item, index, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_plain(item, index, depth + 1) for item in value]
    raise InvalidMessages(
        f"message {index} holds a {type(value).__name__}; only texts, numbers, lists and mappings go in"
    )


def _read_content(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidMessages(f"the content of message {index} must be a text, got {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in ("text", "input_text") else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidMessages(f"message {index} has a part of type {kind!r:.80}; only text parts can be read")
        texts.append(text)
    return "\n".join(texts)
