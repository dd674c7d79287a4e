"""Words of prompts, read from token ids: names, and which documents have the words of a question."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

_BROKEN = "\ufffd"
_WORD = re.compile(rf"[\w{_BROKEN}]+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Thai, Lao, Burmese, Khmer, Japanese, Chinese."""
_SPACES = ("\u2581", "\u0120")
"""How vocabularies write a space at the beginning of a token: SentencePiece, byte-level."""


class WordFinder:
    """Reads words from token ids, each token's text once: a chunk has ids, and not always a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def names(self, token_ids: Sequence[int]) -> list[bool]:
        """By token, whether it belongs to a word with a digit or a capital letter."""
        texts = [self._text(token_id) for token_id in token_ids]
        ends = list(accumulate(map(len, texts)))
        found = [False] * len(texts)
        for word in _WORD.finditer("".join(texts)):
            first, last = bisect_right(ends, word.start()), bisect_left(ends, word.end())
            text = self._decoded(token_ids[first : last + 1]) if _BROKEN in word[0] else word[0]
            if any(letter.isdigit() or letter.isupper() for letter in text):
                found[first : last + 1] = [True] * (last + 1 - first)
        return found

    def weights(self, question: Sequence[int], documents: Sequence[Sequence[int]]) -> list[float]:
        """By document, the weight of the question's words in it; see `ChunkSignals.words`."""
        asked, count = self._words(question), len(documents)
        found = [asked & self._words(token_ids) for token_ids in documents]
        numbers = Counter(word for words in found for word in words)
        weights = {word: math.log((count + 1) / (n + 0.5)) for word, n in numbers.items() if 2 * n <= count}
        return [sum(weights.get(word, 0.0) for word in words) for words in found]

    def _words(self, token_ids: Sequence[int]) -> set[str]:
        """Words in lower case; of scripts without spaces, pairs of letters."""
        words = set(_WORD.findall(self._decoded(token_ids).lower()))
        unspaced = {word for word in words if _UNSPACED.search(word)}
        return words - unspaced | {one + other for word in unspaced for one, other in pairwise(word)}

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._decoded([token_id])
            written = str(self._tokenizer.convert_ids_to_tokens(int(token_id)))
            if written.startswith(_SPACES) and not text[:1].isspace():
                text = f" {text}"  # a decoder drops the space of a first token
            self._texts[token_id] = text
        return text

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
