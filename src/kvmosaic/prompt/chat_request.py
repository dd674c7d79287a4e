"""Chat request preprocessing: separators, marked parts, roles unknown to a template, and template variables."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.document import Document
from kvmosaic.prompt.message import is_system, read_messages
from kvmosaic.prompt.preamble import is_marked
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
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


_HOW_TO_CALL = """\
You can call the functions below. To call one, answer with nothing but a JSON object of this form:
{"name": "<function>", "arguments": {<its arguments>}}
The next message then has the result. Where no function helps, answer in plain text. The functions:"""


def with_told_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[Mapping[str, Any]]:
    """A conversation for a template without tools: the system text begins with them, calls and results are text.

    Raises:
        InvalidMessages: see `read_messages`.
    """
    told = "\n".join([_HOW_TO_CALL, *(json.dumps(tool["function"], ensure_ascii=False) for tool in tools), ""])
    turns = _told_turns(messages)
    if not is_system(turns[0]):
        turns.insert(0, {"role": "system", "content": ""})
    turns[0] = {**turns[0], "content": [{"type": "text", "text": told}, *content_parts(turns[0])]}
    return turns


def _told_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with calls and results as text."""
    return [_told_turn(message, read) for message, read in zip(messages, read_messages(messages), strict=True)]


def _told_turn(message: Mapping[str, Any], read: Mapping[str, Any]) -> Mapping[str, Any]:
    if read["role"] == "tool":
        call_id = message.get("tool_call_id") or ""
        return {"role": "user", "content": message.get("content") or "(no result)", "tool_call_id": call_id}
    if not (calls := read.get("tool_calls")):
        return message
    written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
    return {"role": read["role"], "content": "\n".join(filter(None, [read["content"], *written]))}


def known_roles(template: str | None, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with 'system' for 'developer' where the template treats them alike."""
    known = "developer" if "developer" in (template or "") else "system"
    return [{**message, "role": known} if message.get("role") == "developer" else {**message} for message in messages]


def other_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Forms of a conversation for a template that refuses it, each with what was done.

    A template may take one system message at the start, or none, or no two messages of the user in a row; or neither
    calls nor results of tools.
    """
    yield from _forms(messages)
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        yield from _forms(_told_turns(messages), "calls and results of tools are written as text")


def _forms(messages: Sequence[Mapping[str, Any]], done: str = "") -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    num_first = next((number for number, each in enumerate(messages) if not is_system(each)), len(messages))
    first = [_joined(messages[:num_first])] if num_first else []
    forms = {
        "": list(messages),
        "system messages were joined, or begin the user's next message": [*first, *_by_user(messages[num_first:])],
        "the system message begins the user's message": _by_user([*first, *messages[num_first:]]),
    }
    for told, form in forms.items():
        for also, turns in (("", form), ("neighbouring messages of the user were joined", _in_turns(form))):
            if what := "; ".join(filter(None, (done, told, also))):
                yield f"the model's chat template refuses the conversation as it was sent: {what}", turns


def _in_turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with neighbouring messages of the user as one."""
    turns = list[Mapping[str, Any]]()
    for message in messages:
        if turns and turns[-1]["role"] == message["role"] == "user":
            turns[-1] = _joined([turns[-1], message])
        else:
            turns.append(message)
    return turns


def _by_user(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The conversation with the texts of system messages in front of the user's next message, or as one of the user."""
    told, waiting = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for message in messages:
        if is_system(message):
            waiting.append(message)
        elif message["role"] == "user":
            told.append({**_joined([*waiting, message]), "role": "user"} if waiting else message)
            waiting = []
        else:
            told.append(message)
    return [*told, {**_joined(waiting), "role": "user"}] if waiting else told


def _joined(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One message with the texts of all, an empty line between them, and with what else the last one says."""
    between = {"type": "text", "text": ""}
    parts = [part for message in messages for part in (between, *content_parts(message))][1:]
    return {**messages[-1], "content": parts}


def check_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Checks that only the template's own variables are set: no other template, special tokens or tokenization.

    Raises:
        InvalidMessages: another name.
    """
    taken = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages", "salt", "preamble", "self"}
    taken |= set(getattr(tokenizer, "special_tokens_map", ()))
    for name in variables:
        if name in taken or not name.isidentifier():
            raise InvalidMessages(
                f"chat_template_kwargs cannot set {name!r:.80}; it sets variables of the template only"
            )


def take_marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[Document, ...]]:
    """Extracts marked text parts from a conversation, as documents.

        system   [instructions | handbook* | manual*]         *: marked with `cache_control` or
        user     [letter* | question]                            `prompt_cache_breakpoint`

        system text: instructions, handbook     documents: manual, letter     question: question

    Marks count in system and user messages, earlier ones included: what was a document in the first turn of a
    conversation is the same document in the second. The first marked part of the system messages ends the preamble,
    as it ends the cached prefix in other APIs; marked parts after it are documents. So are the marked parts of the
    user's messages, except that the last part of a message stays if every part is marked. Unmarked parts stay in their
    message, so nothing changes its role.

    Returns:
        The conversation without the documents, and the documents in order.

    Raises:
        InvalidMessages, InvalidDocument: a marked part without text.
    """
    kept: list[Mapping[str, Any]] = []
    documents: list[Document] = []
    has_system_end = False
    for index, message in enumerate(messages):
        parts = message.get("content")
        is_read = "role" in message and is_system(message)
        if not _is_parts(parts) or not (is_read or message.get("role") == "user"):
            kept.append(message)
            continue
        assert isinstance(parts, Sequence)
        marked = [number for number, part in enumerate(parts) if is_marked(part)]
        if is_read and marked and not has_system_end:
            has_system_end = True
            marked = marked[1:]
        if not is_read and len(marked) == len(parts):
            marked = marked[:-1]
        documents += [_document(parts[number], index) for number in marked]
        taken = set(marked)
        rest = [part for number, part in enumerate(parts) if number not in taken]
        if rest:
            kept.append({**message, "content": rest} if marked else message)
    return kept, tuple(documents)


def _is_parts(content: object) -> bool:
    return isinstance(content, Sequence) and not isinstance(content, str | bytes) and len(content) > 0


def _document(part: Mapping[str, Any], message: int) -> Document:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidMessages(
            f"message {message} has a marked part of type {part.get('type')!r:.80}; only text is read"
        )
    return Document(text)
