"""Passages of one long text, found by the labels before them."""

from __future__ import annotations

import re

_MAX_TITLE_CHARACTERS = 200


def numbered_passages(text: str, word: str) -> tuple[str, list[str]]:
    """Returns the text before "WORD 1:" at the start of a line, and the text after each "WORD n:", n = 1, 2, ….

    A number that is not the next one belongs to the text. Empty passages are left out.
    """
    ends: list[tuple[int, int]] = []
    for match in re.finditer(rf"^{re.escape(word)} (\d{{1,9}}):", text, re.MULTILINE):
        if int(match[1]) == len(ends) + 1:
            ends.append(match.span())
    if not ends:
        return text, []
    starts = [start for start, _ in ends[1:]] + [len(text)]
    passages = [text[end:start].strip() for (_, end), start in zip(ends, starts, strict=True)]
    return text[: ends[0][0]].strip(), [passage for passage in passages if passage]


def labelled_passages(text: str, label: str) -> list[str]:
    """The text cut before each label at the start of a line; the labels stay. Empty passages are left out."""
    passages = re.split(rf"^(?={re.escape(label)})", text, flags=re.MULTILINE)
    return [passage.strip() for passage in passages if passage.strip()]


def titled(passage: str) -> tuple[str | None, str]:
    """The first line as the title, and the rest.

    There is no title if that line is long, or if nothing or an empty line follows it.
    """
    title, _, text = passage.partition("\n")
    is_title = len(title) <= _MAX_TITLE_CHARACTERS and bool(text.partition("\n")[0].strip())
    return (title.strip(), text.strip()) if is_title else (None, passage)
