"""Requests of Anthropic's API that tests of the server send."""

from __future__ import annotations

from typing import Any

QUESTION = {"type": "text", "text": "Where does the ferry go?"}
MARK = {"type": "ephemeral"}


def document(text: str, **fields: Any) -> dict[str, Any]:
    """A document block."""
    return {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}, **fields}


def user(*content: Any) -> dict[str, Any]:
    """A message of the user: one text, or blocks."""
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Fields of a greedy request."""
    greedy = {"temperature": 0, **fields.pop("extra_body", {})}
    said = list(messages) or [user(QUESTION["text"])]
    return {"model": "reader", "max_tokens": 8, "messages": said, **fields, "extra_body": greedy}


def plain(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same as JSON, without the client."""
    made = body(*messages, **fields)
    return {**made.pop("extra_body"), **made}


def prompt_tokens(usage: Any) -> int:
    """All tokens of a prompt."""
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)
