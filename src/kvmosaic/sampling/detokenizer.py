"""Incremental detokenizer: text from token ids as they are sampled, never half a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_BROKEN = "�"
_MAX_HELD = 3
"""Half a UTF-8 character has at most 3 bytes, each shown as one replacement character."""
_PATIENCE = 16
"""Max tokens to wait for whole text; after that the text counts as broken."""
_WINDOW = 16
_LONGEST_WINDOW = 64
PART_TOKENS = 2**14
"""Max tokens decoded at once; takes some milliseconds."""


class Decoder(Protocol):
    """The part of a transformers tokenizer that this module needs."""

    @property
    def all_special_ids(self) -> Collection[int]:
        """Special ids, which are omitted from the text."""

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> object:
        """Decodes ids to text."""


def decode_all(
    tokenizer: Decoder | None,
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    part_tokens: int = PART_TOKENS,
) -> str:
    """Decodes a list of ids; empty text without a tokenizer.

    A long list is decoded in parts of `part_tokens`: one call for all of it would keep the interpreter's lock. Each
    part is decoded after some tokens of the previous one; if the boundary is ambiguous, the list is decoded as a whole.
    """
    if tokenizer is None or not token_ids:
        return ""

    def decode(begin: int, end: int) -> str:
        text = tokenizer.decode(
            list(token_ids[begin:end]), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    texts = [decode(0, part_tokens)]
    for begin in range(part_tokens, len(token_ids), part_tokens):
        before = decode(begin - _WINDOW, begin)
        both = decode(begin - _WINDOW, begin + part_tokens)
        if before.endswith(_BROKEN) or not before or not both.startswith(before) or not texts[-1].endswith(before):
            return decode(0, len(token_ids))
        texts.append(both.removeprefix(before))
    return "".join(texts)


class Detokenizer:
    """Decodes one answer's token ids, one id at a time.

        ids      [ ...done... | window of a few tokens | ]
        text of the window:     [ emitted | held ]

    Each id decodes only a short window, so a long answer costs linear time. The window begins at a token where the text
    was whole, with some tokens before the new one, because decoders depend on neighbours (a leading space, `##`).
    Text that ends in half a character is held back until the rest is there. The concatenated pieces are the text of all
    ids decoded at once.
    """

    def __init__(self, tokenizer: Decoder | None, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = frozenset(tokenizer.all_special_ids) if tokenizer and skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._emitted = 0
        self._whole_ends: list[int] = []
        self._held = ""

    def append(self, token_id: int) -> str:
        """Takes the next id and returns the text that is final now; often a word, sometimes nothing."""
        if self._tokenizer is None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        broken = len(text) - len(text.rstrip(_BROKEN))
        whole_end = self._whole_ends[-1] if self._whole_ends else 0
        if len(self._window) - whole_end > _PATIENCE:
            broken = min(broken, _MAX_HELD)
        certain = len(text) - broken
        new = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        self._held = text[self._emitted :]
        if not broken:
            self._whole_ends.append(len(self._window))
        if len(self._window) > (_LONGEST_WINDOW if broken else _WINDOW):
            self._shorten()
        return new

    def flush(self) -> str:
        """Returns held-back text: half a character at the end of an answer, as the replacement character."""
        held, self._held = self._held, ""
        self._emitted += len(held)
        return held

    def _shorten(self) -> None:
        """Drops old tokens from the window, up to a token where the text was whole."""
        half = _WINDOW // 2
        ends = [end for end in self._whole_ends if end <= len(self._window) - half]
        start = ends[-1] if ends else 0
        if not start and len(self._window) > _LONGEST_WINDOW:
            start = len(self._window) - half
        if start:
            self._window = self._window[start:]
            self._whole_ends = [end - start for end in self._whole_ends if end > start]
            self._emitted = len(self._decode(self._window)) - len(self._held)

    def _decode(self, token_ids: list[int]) -> str:
        return decode_all(self._tokenizer, token_ids, skip_special_tokens=self._skip_special_tokens)
