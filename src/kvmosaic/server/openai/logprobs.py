"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvmosaic.api.fields import Reply
from kvmosaic.sampling import Logprob

LOWEST = -9999.0
"""OpenAI's value for a token with a probability near zero; JSON has no infinity."""


class TopLogprob(Reply):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """The chosen token, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log probabilities of a choice."""

    content: list[TokenLogprob]


class TextLogprobs(Reply):
    """Log probabilities of a choice of /v1/completions, one entry per token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TokenBytes:
    """Bytes of single tokens: a token may be part of a character, which has no text, but its bytes are known."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._bytes_by_letter = _byte_letters() if "ByteLevel" in str(decoder) else {}

    def of(self, token_id: int, text: str) -> list[int]:
        """Returns the bytes of a token that decodes to `text`."""
        if "�" not in text or self._tokenizer is None:
            return list(text.encode())
        written = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", written):
            return [int(match[1], 16)]
        if self._bytes_by_letter and all(letter in self._bytes_by_letter for letter in written):
            return [self._bytes_by_letter[letter] for letter in written]
        return list(text.encode())


def chat_logprobs(
    entries: Iterable[tuple[int, Mapping[int, Logprob]]], number: int, token_bytes: TokenBytes
) -> list[TokenLogprob]:
    """Returns one entry per chosen token, with the `number` most likely alternatives."""
    result = []
    for token_id, candidates in entries:
        top = [_top(other, candidate, token_bytes) for other, candidate in _ranked(candidates, number)]
        chosen = _top(token_id, candidates[token_id], token_bytes)
        result.append(TokenLogprob(**dict(chosen), top_logprobs=top))
    return result


def text_logprobs(entries: Iterable[tuple[int, Mapping[int, Logprob]]], number: int, offset: int = 0) -> TextLogprobs:
    """Returns the shape of /v1/completions; `offset` is the position of the first token in the text."""
    result = TextLogprobs(tokens=[], token_logprobs=[], top_logprobs=[] if number else None, text_offset=[])
    for token_id, candidates in entries:
        chosen = candidates[token_id]
        text = chosen.decoded_token or ""
        result.tokens.append(text)
        result.token_logprobs.append(_finite(chosen.logprob))
        result.text_offset.append(offset)
        offset += len(text)
        if result.top_logprobs is not None:
            shown = [*_ranked(candidates, number), (token_id, chosen)]
            result.top_logprobs.append({other.decoded_token or "": _finite(other.logprob) for _, other in shown})
    return result


def with_first(found: TextLogprobs, text: str) -> TextLogprobs:
    """Puts the first token of a prompt before the others; nothing predicts it."""
    found.tokens.insert(0, text)
    found.token_logprobs.insert(0, None)
    found.text_offset.insert(0, 0)
    if found.top_logprobs is not None:
        found.top_logprobs.insert(0, None)
    return found


def _ranked(candidates: Mapping[int, Logprob], number: int) -> list[tuple[int, Logprob]]:
    likely = [item for item in candidates.items() if (item[1].rank or number + 1) <= number]
    return sorted(likely, key=lambda item: (-item[1].logprob, item[1].rank or 0))[:number]


def _top(token_id: int, candidate: Logprob, token_bytes: TokenBytes) -> TopLogprob:
    text = candidate.decoded_token or ""
    return TopLogprob(token=text, logprob=_finite(candidate.logprob), bytes=token_bytes.of(token_id, text))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _byte_letters() -> dict[str, int]:
    """Returns the characters of bytes in byte-level vocabularies: printable ones as they are, others shifted."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(moved)}
