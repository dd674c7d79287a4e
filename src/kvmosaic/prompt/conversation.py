"""Conversations: messages and tools rendered through a chat template, with the origin of every character."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any

from kvmosaic.errors import InvalidMessages, InvalidTools, TooMuchWork
from kvmosaic.prompt.chat_template.marks import MarkPlace, Marks, map_texts
from kvmosaic.prompt.message import is_system
from kvmosaic.prompt.text_pieces import TextPiece, foreign, merged, template
from kvmosaic.prompt.tokenizer import Tokenizer, control_tokens
from kvmosaic.tools import canonical_tools, shows_tools
from kvmosaic.tools.request import name_of

_SCHEMAS = "{{ tools | tojson }}"
_OWN_OPTIONS = ("tokenize", "return_dict", "documents", "return_tensors", "sanitize_control_tokens", "padding")
_CLOCK = "strftime_now"
"""The function by which templates ask for the time."""
_OTHER_TIME = "{%- macro strftime_now(format) -%}\N{WATCH}{%- endmacro -%}"
"""In front of a template: takes the place of its clock. No time is written like this."""
_NO_CONTENT = re.compile(r"""(?<!\w)(\w+(?:\.content|\[['"]content['"]\])) is (not )?none\b""")
"""How templates ask whether a message has no content; transformers leaves such a content out, which is not none."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
Documents = list[dict[str, str]] | None


class TemplateRefusal(InvalidMessages):
    """The chat template raises an error."""


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
    texts = set(map(str.lower, _texts(tools)))
    together = "\0".join(texts)
    if any(token in together for token in lowered):
        return True
    beginnings = {token[:length] for token in lowered for length in range(1, len(token))}
    ends = {token[-length:] for token in lowered for length in range(1, len(token))}
    longest = max(map(len, lowered), default=0)
    return any(
        text[-length:] in beginnings or text[:length] in ends
        for text in texts
        for length in range(1, min(longest, len(text) + 1))
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


def _with_empty_content(question: re.Match[str]) -> str:
    """A template's question for no content, as one for an empty content."""
    return f"({question[1]})" if question[2] else f"(not {question[1]})"


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as texts of JSON."""
    calls = copy.deepcopy(message.get("tool_calls"))
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls} if calls else message


class _MarkedTexts:
    """Texts replaced by marks for rendering: each with its mark and its message (None: a tool)."""

    def __init__(self) -> None:
        self.marks = Marks()
        self.values: list[str] = []
        self.owners: list[int | None] = []

    def message(self, message: dict[str, Any], number: int) -> dict[str, Any]:
        """A message with its texts replaced by marks."""
        content = self.mark(number, message["content"], padded=True, always=True)
        mark = partial(self.mark, number)
        rest = {key: map_texts(value, mark) for key, value in message.items() if key not in ("role", "content")}
        return {"role": message["role"], "content": content, **rest}

    def mark(self, owner: int | None, text: str, *, padded: bool = False, always: bool = False) -> str:
        """The mark of a text; names, ids and types, which decide what a template does, stay unmarked."""
        if not text or (not always and _PLAIN_NAME.fullmatch(text)):
            return text  # a plain name contains no control token
        self.values.append(text)
        self.owners.append(owner)
        return self.marks.mark(padded=padded)


class Conversation:
    """A checked conversation and the template that renders it.

    Contents are rendered as marks and substituted afterwards. So a content cannot change what the template writes, and
    the template's own text is known exactly. The result is compared with an ordinary rendering; templates that
    edit contents (cut out old reasoning, trim line breaks) are followed. Tools are rendered in this way too if a text
    in them could write a control token; others are passed to the template unchanged.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> None:
        """Takes checked messages (`read_messages`) and options for the template.

        Raises:
            InvalidMessages: an option that belongs to the rendering itself.
        """
        taken = sorted(set(options) & set(_OWN_OPTIONS))
        if taken:
            raise InvalidMessages(f"the option {taken[0]!r} cannot be given to the chat template; leave it out")
        self.messages = list(messages)
        self._tokenizer = tokenizer
        self._options = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        tools = self._options.get("tools")
        if isinstance(tools, list | tuple):
            self._options["tools"] = canonical_tools(schemas_of(tools, tokenizer))
        if any(message.get("tool_calls") for message in self.messages):
            self.messages = self._with_rendered_calls()

    @property
    def has_tools(self) -> bool:
        """Whether there are tools."""
        return bool(self._options.get("tools"))

    @property
    def hidden_tools(self) -> list[Any]:
        """The tools of a template that shows none."""
        is_hidden = self.has_tools and self.template_source and not shows_tools(self.template_source)
        return list(self._options["tools"]) if is_hidden else []

    def without_tools(self) -> Conversation:
        """The same conversation without tools."""
        other = copy.copy(self)
        other._options = {name: value for name, value in self._options.items() if name != "tools"}
        return other

    def with_split_message(self, number: int, texts: Sequence[str]) -> Conversation:
        """The same conversation with a message replaced by several of the same role."""
        message, other = self.messages[number], copy.copy(self)
        parts = [{**message, "content": text} for text in texts]
        other.messages = [*self.messages[:number], *parts, *self.messages[number + 1 :]]
        return other

    def check_tools(self) -> None:
        """Checks that the template shows tools, if there are any.

        Raises:
            InvalidTools: it does not.
            InvalidMessages: it rejects the conversation.
        """
        tools = self._options.get("tools")
        if not isinstance(tools, list | tuple) or not any(map(name_of, tools)):
            return
        if shows_tools(self.template_source):
            without = self._render(self.messages, None, {"tools": None})
            if self._render(self.messages, None) != without:
                return
        raise InvalidTools(
            "the chat template of this model does not show tools, so it cannot call them; leave tools out, or load a "
            "model with a template for them"
        )

    def _with_rendered_calls(self) -> list[dict[str, Any]]:
        """The messages with tool calls as the template takes them: arguments as a mapping, or as a text of JSON."""
        if self._has_source and _NO_CONTENT.search(self.template_source):
            self._options["chat_template"] = _NO_CONTENT.sub(_with_empty_content, self.template_source)
        try:
            self._render(self.messages, None)
        except InvalidMessages:
            texts = [_with_text_arguments(message) for message in self.messages]
            with suppress(InvalidMessages):
                self._render(texts, None)
                return texts
        return self.messages

    @property
    def last_answer(self) -> int | None:
        """Index of the last answer that a later message follows; None in a first turn."""
        roles = [message["role"] for message in self.messages]
        asked = max((number for number, role in enumerate(roles) if role != "assistant"), default=0)
        return max((number for number, role in enumerate(roles[:asked]) if role == "assistant"), default=None)

    def first_turn(self) -> Conversation | None:
        """The conversation up to its first question; None if that is all of it, or there is none."""
        asked = next((number for number, message in enumerate(self.messages) if message["role"] == "user"), None)
        if asked is None or asked + 1 == len(self.messages):
            return None
        options = {name: value for name, value in self._options.items() if name != "continue_final_message"}
        return Conversation(self._tokenizer, self.messages[: asked + 1], {**options, "add_generation_prompt": True})

    @property
    def has_clock(self) -> bool:
        """Whether the template may write the time or date."""
        return _CLOCK in self.template_source and self._has_source

    @property
    def _has_source(self) -> bool:
        """Whether the template is one text, which can be changed."""
        return not isinstance(getattr(self._tokenizer, "chat_template", ""), dict)

    def at_another_time(self) -> Conversation:
        """The same conversation, rendered by the same template with something else on its clock."""
        other = copy.copy(self)
        other._options = {**self._options, "chat_template": _OTHER_TIME + self.template_source}
        return other

    @property
    def template_source(self) -> str:
        """The template's source, to see which names it uses."""
        return str(self._options.get("chat_template") or getattr(self._tokenizer, "chat_template", None) or "")

    def pieces(self, documents: Documents = None) -> tuple[TextPiece, ...]:
        """Renders the conversation; `documents` count as the template's own text.

        Raises:
            InvalidMessages: the template rejects the conversation, or there is no template.
        """
        texts = _MarkedTexts()
        marks, owners = texts.marks, texts.owners
        marked = [texts.message(message, number) for number, message in enumerate(self.messages)]
        items = marks.split(self._render(marked, documents, self._marked_tools(texts)))
        if any(marks.is_in(item) for item in items if isinstance(item, str)):
            raise InvalidMessages(
                "the chat template takes contents apart (it cuts them or changes their letters), so they cannot be "
                "distinguished from its own text; pass another template with chat_template=..."
            )
        shown = {owners[item.index] for item in items if not isinstance(item, str)}
        for number, message in enumerate(self.messages):
            if is_system(message) and message["content"].strip() and number not in shown:
                raise TemplateRefusal(
                    f"the chat template leaves message {number} ({message['role']}) out; give its text to the user's "
                    "message, or pass another template with chat_template=..."
                )
        written = self._written(items, texts, documents)
        return merged(
            template(text) if isinstance(item, str) else foreign(text, owners[item.index])
            for item, text in zip(items, written, strict=True)
        )

    def _marked_tools(self, texts: _MarkedTexts) -> dict[str, Any]:
        """Marks for the texts of tools, as a template option; empty if they cannot write a control token."""
        tools = self._options.get("tools")
        if not tools or not could_write(tools, control_tokens(self._tokenizer).values()):
            return {}
        # Equal texts share one mark: templates check whether a parameter's name is among the required ones.
        return {"tools": mark_tools(tools, cache(partial(texts.mark, None, padded=True)))}

    def _written(self, items: list[str | MarkPlace], texts: _MarkedTexts, documents: Documents) -> list[str]:
        """The text of every item, as the template would write it, if known."""
        direct = [item if isinstance(item, str) else item.fill(texts.values[item.index]) for item in items]
        try:
            ordinary = self._render(self.messages, documents)
        except InvalidMessages:
            return direct
        if "".join(direct) == ordinary:
            return direct
        edited = self._edited(items, direct, texts, documents)
        trimmed = [text if isinstance(item, str) else text.rstrip() for item, text in zip(items, edited, strict=True)]
        return next((found for found in (edited, trimmed) if "".join(found) == ordinary), direct)

    def _edited(
        self, items: list[str | MarkPlace], direct: list[str], marked: _MarkedTexts, documents: Documents
    ) -> list[str]:
        """Contents as a template edits them: rendered with a mark after each real content.

        Read from the front: the template's text is known, and what follows up to the mark is the content, however
        edited. The mark cannot be forged, so no content is taken for the template's text.
        """
        marks, owners = marked.marks, marked.owners
        ending = [
            {**message, "content": message["content"] + marks.end_mark(number)} if message["content"] else message
            for number, message in enumerate(self.messages)
        ]
        try:
            rendered = self._render(ending, documents)
        except InvalidMessages:
            return direct
        texts, position = [], 0
        for item, text in zip(items, direct, strict=True):
            owner = None if isinstance(item, str) else owners[item.index]
            end_mark = "" if owner is None else marks.end_mark(owner)
            end = rendered.find(end_mark, position) if end_mark else -1
            if end >= 0:
                text = rendered[position:end]
            elif not rendered.startswith(text, position):
                return direct
            texts.append(text)
            position += len(text) + (len(end_mark) if end >= 0 else 0)
        return texts if position == len(rendered) and not any(map(marks.is_in, texts)) else direct

    def _render(
        self, messages: list[dict[str, Any]], documents: Documents, instead: Mapping[str, Any] | None = None
    ) -> str:
        options = {**self._options, **(instead or {})}
        try:
            text = self._tokenizer.apply_chat_template(messages, documents=documents, tokenize=False, **options)
        except TooMuchWork:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise TemplateRefusal(
                f"the chat template refuses this conversation: {error}; change the messages, or pass another template "
                "with chat_template=..."
            ) from error
        assert isinstance(text, str)
        return text
