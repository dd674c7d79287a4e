"""Chat request preprocessing: separators in messages, roles unknown to a template, and template variables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.segment import Prompt
from kvmosaic.prompt.separator import named_parts


def take_separated(
    messages: Sequence[Mapping[str, Any]], separator: str | None
) -> tuple[list[Mapping[str, Any]], tuple[Document, ...]]:
    """Extracts documents from user messages with separators, earlier turns included.

    The part before the first separator is the system text of a conversation without one, otherwise a document as well.
    """
    if not separator:
        return list(messages), ()
    rest: list[Mapping[str, Any]] = []
    texts: list[str] = []
    system = None if any(is_system(message) for message in messages) else ""
    for message in messages:
        parts: object = ""
        if message["role"] == "user":
            parts = named_parts("\n".join(part["text"] for part in content_parts(message)), separator)
        if isinstance(parts, tuple):
            first, bodies, question = parts
            if system == "":
                system = first
            else:
                texts.append(first)
            texts += bodies
            message = {**message, "content": question}
        rest.append(message)
    if system:
        rest.insert(0, {"role": "system", "content": system})
    return rest, tuple(map(Document, texts))


def separated_prompt(text: str, separator: str | None, documents: Sequence[Document], salt: str = "") -> Prompt:
    """The prompt of a text over the given documents, followed by the parts of the text between its separators."""
    parts = named_parts(text, separator)
    system, bodies, question = (None, [], parts) if isinstance(parts, str) else parts
    return Prompt.from_documents((*documents, *map(Document, bodies)), question, system=system, salt=salt)


def content_parts(message: Mapping[str, Any]) -> list[Any]:
    """Message content as a list of parts."""
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def known_roles(template: str | None, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with 'system' for 'developer' where the template treats them alike."""
    if "developer" in (template or ""):
        return list(messages)
    return [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Checks that only the template's own variables are set: no other template, special tokens or tokenization.

    Raises:
        InvalidMessages: another name.
    """
    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages", "salt", "self"}
    taken |= set(getattr(tokenizer, "special_tokens_map", ()))
    for name in variables:
        if name in taken or not name.isidentifier():
            raise InvalidMessages(
                f"chat_template_kwargs cannot set {name!r:.80}; it sets variables of the template only"
            )
