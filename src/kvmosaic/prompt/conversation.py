"""Conversations: messages rendered through a chat template, every character marked as the template's or somebody's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvmosaic.errors import InvalidMessages
from kvmosaic.prompt.marks import Marks, Place, map_texts
from kvmosaic.prompt.pieces import Piece, foreign, merged, template
from kvmosaic.prompt.tokenizer import Tokenizer

_OWN_OPTIONS = ("tokenize", "return_dict", "documents", "return_tensors", "sanitize_control_tokens", "padding")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
Documents = list[dict[str, str]] | None


class Conversation:
    """A checked conversation and the template that renders it.

    Contents are rendered as marks, never as themselves, and put in afterwards. So a content cannot change what the
    template writes, and the text of the template is known to the character. The result is compared with an ordinary
    rendering; templates that edit contents (cut out old reasoning, trim line breaks) are followed.
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

    @property
    def last_answer(self) -> int | None:
        """The number of the last answer that somebody went on from; None in a first turn."""
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
    def template_source(self) -> str:
        """The template's source, to see which names it knows."""
        return str(self._options.get("chat_template") or getattr(self._tokenizer, "chat_template", None) or "")

    def pieces(self, documents: Documents = None) -> tuple[Piece, ...]:
        """Renders the conversation; what is given as documents counts as the template's own text.

        Raises:
            InvalidMessages: the template refuses the conversation, or there is no template.
        """
        marks, values, owners = Marks(), list[str](), list[int]()
        marked = [_marked(message, number, marks, values, owners) for number, message in enumerate(self.messages)]
        items = marks.split(self._render(marked, documents))
        if any(marks.is_in(item) for item in items if isinstance(item, str)):
            raise InvalidMessages(
                "the chat template takes contents apart (it cuts them or changes their letters), so they cannot be "
                "told from its own text; pass another template with chat_template=..."
            )
        texts = self._texts(items, values, owners, marks, documents)
        return merged(
            template(text) if isinstance(item, str) else foreign(text, owners[item.index])
            for item, text in zip(items, texts, strict=True)
        )

    def _texts(
        self, items: list[str | Place], values: list[str], owners: list[int], marks: Marks, documents: Documents
    ) -> list[str]:
        """The text of every item: as the template would write it, if that can be told."""
        direct = [item if isinstance(item, str) else item.fill(values[item.index]) for item in items]
        try:
            ordinary = self._render(self.messages, documents)
        except InvalidMessages:
            return direct
        if "".join(direct) == ordinary:
            return direct
        edited = self._edited(items, direct, owners, marks, documents)
        trimmed = [text if isinstance(item, str) else text.rstrip() for item, text in zip(items, edited, strict=True)]
        return next((texts for texts in (edited, trimmed) if "".join(texts) == ordinary), direct)

    def _edited(
        self, items: list[str | Place], direct: list[str], owners: list[int], marks: Marks, documents: Documents
    ) -> list[str]:
        """What a template that edits contents makes of them: rendered with a mark behind each real content.

        Read from the front: the template's text is known, and what follows up to the mark is the content, however
        edited. The mark cannot be forged, so nobody's content is taken for the template's text.
        """
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
            end_mark = "" if isinstance(item, str) else marks.end_mark(owners[item.index])
            end = rendered.find(end_mark, position) if end_mark else -1
            if end >= 0:
                text = rendered[position:end]
            elif not rendered.startswith(text, position):
                return direct
            texts.append(text)
            position += len(text) + (len(end_mark) if end >= 0 else 0)
        return texts if position == len(rendered) and not any(map(marks.is_in, texts)) else direct

    def _render(self, messages: list[dict[str, Any]], documents: Documents) -> str:
        try:
            text = self._tokenizer.apply_chat_template(messages, documents=documents, tokenize=False, **self._options)
        except Exception as error:  # a template is a program of its own: it may raise anything
            raise InvalidMessages(
                f"the chat template refuses this conversation: {error}; change the messages, or pass another template "
                "with chat_template=..."
            ) from error
        assert isinstance(text, str)
        return text


def _marked(message: dict[str, Any], number: int, marks: Marks, values: list[str], owners: list[int]) -> dict[str, Any]:
    """A message with marks for its texts; each marked text is added to `values` and its message to `owners`."""

    def mark(text: str, *, padded: bool = False) -> str:
        # Names, ids and types decide what a template does, and cannot contain control tokens.
        if not text or (not padded and _PLAIN_NAME.fullmatch(text)):
            return text
        values.append(text)
        owners.append(number)
        return marks.mark(padded=padded)

    rest = {key: map_texts(value, mark) for key, value in message.items() if key not in ("role", "content")}
    return {"role": message["role"], "content": mark(message["content"], padded=True), **rest}
