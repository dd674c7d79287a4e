"""Separators: splitting a text into segments before tokenization."""

from __future__ import annotations

import re

from kvmosaic.errors import EmptySegment, InvalidPrompt, InvalidSeparator

MAX_TEXT_CHARACTERS = 2**25
MAX_SEPARATOR_CHARACTERS = 256
_INLINE = re.compile(r"(?<=[^\s#\\])[ \t]*##(?!#)")


def read_separator(separator: str | None) -> str | None:
    """The separator of settings and options; an empty text, like None, never splits.

    Raises:
        InvalidSeparator: a separator that cannot split anything.
    """
    if separator is None or separator == "":
        return None
    check_separator(separator)
    return separator


def split_text(text: str, separator: str | None) -> list[str]:
    r"""Splits a text at its separators; None or an empty separator returns it unsplit.

    A backslash right before a separator makes it ordinary text: `\##` stays `##`. To end a part with a backslash,
    double it: `\\##` is a backslash and a border. Other backslashes are unchanged.

    Raises:
        InvalidPrompt: not a text, or longer than 2**25 characters.
        InvalidSeparator: a separator without a visible character, with a backslash, or too long.
    """
    check_text(text)
    separator = read_separator(separator)
    if separator is None:
        return [text]
    parts, current, last = [], [], 0
    for match in re.finditer(r"(?<!\\)(\\*+)" + re.escape(separator), text):
        num_backslashes = len(match[1])
        current.append(text[last : match.start()] + "\\" * (num_backslashes // 2))
        last = match.end()
        if num_backslashes % 2:
            current.append(separator)
        else:
            parts.append("".join(current))
            current = []
    parts.append("".join(current) + text[last:])
    return parts


def escape_separator(text: str, separator: str | None = "##") -> str:
    r"""Escapes a text so that no separator in it is a border: `a ## b` becomes `a \## b`."""
    border = read_separator(separator)
    if border is None:
        return text
    return re.sub(r"(?<!\\)(\\*+)" + re.escape(border), lambda match: match[1] * 2 + "\\" + border, text)


def named_parts(text: str, separator: str | None) -> tuple[str, list[str], str] | str:
    """The system text, the chunks and the question; or the whole text when it has fewer than two separators.

    Raises:
        EmptySegment: a part without text.
    """
    parts = split_text(text, separator)
    if not separator or len(parts) < 3:
        if not text.strip():
            raise EmptySegment("the prompt is empty; write a question")
        return (separator or "").join(parts)
    stripped = [part.strip() for part in parts]
    for index, part in enumerate(stripped):
        if not part:
            name = "system text" if index == 0 else f"text of chunk {index}"
            name = "question" if index == len(parts) - 1 else name
            raise EmptySegment(
                f"the {name} is empty (part {index + 1} of {len(parts)}); write something there, remove a separator, "
                f"or write \\{separator} where {separator!r} is meant as text"
            )
    return stripped[0], stripped[1:-1], stripped[-1]


def told_separators(prompt: object) -> str:
    """A warning where an ordinary prompt has ## inside its lines, as documents are separated elsewhere; or empty."""
    if not isinstance(prompt, str) or len(_INLINE.findall(prompt)) < 2:
        return ""
    return (
        "this text has '##' inside its lines and is one ordinary prompt; if they separate documents, use "
        "Prompt.from_text(text), or LLM(..., chunk_separator='##')"
    )


def check_text(text: object) -> None:
    """Raises InvalidPrompt unless this is a text of at most 2**25 characters."""
    if not isinstance(text, str):
        raise InvalidPrompt(f"a prompt's text must be a str, got {type(text).__name__}")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InvalidPrompt(f"the text has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are allowed")
    check_unicode(text, InvalidPrompt)


def check_unicode(text: str, error: type[InvalidPrompt]) -> None:
    """Raises `error` if a text holds an unpaired surrogate, which is no character and cannot be tokenized."""
    try:
        text.encode()
    except UnicodeEncodeError as found:
        raise error(
            f"character {found.start} of the text is the lone surrogate {text[found.start]!r}; decode the source with "
            "errors='replace', or remove it"
        ) from None


def check_separator(separator: object) -> None:
    """Raises InvalidSeparator unless this can split text."""
    if not isinstance(separator, str) or not separator.strip():
        raise InvalidSeparator(
            f"a separator must contain a visible character, got {separator!r}; '' or None never splits"
        )
    if len(separator) > MAX_SEPARATOR_CHARACTERS:
        raise InvalidSeparator(
            f"the separator has {len(separator)} characters; at most {MAX_SEPARATOR_CHARACTERS} are allowed"
        )
    if "\\" in separator:
        raise InvalidSeparator(
            f"the separator {separator!r} contains a backslash, which escapes separators; leave it out"
        )
