"""Tokenizer check: do texts become the tokens that llama.cpp itself would make of them?

The tokenizer is transformers', built from the vocabulary of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

_TEXTS = (
    "The ferry doesn't leave at 7:30; WE'LL wait.",
    " leading, double  and trailing blanks   ",
    "lines\nand\r\n\nparagraphs\n\n\n\tand tabs\t\t.",
    "12345678 3.14159 1,000,000 v2.4-rc1 \u0661\u0662\u0663",
    "naïve café, Ωμέγα, Привет, e\u0301 \ufb01 \u00a0\u200b",
    "渡し船は島へ行きます。中文没有空格，한국어는 있다.",
    "العربية עברית हिन्दी ไทย",
    "🎉 👩‍🚀 🇫🇷 ✅",
    'def f(x: int) -> dict:\n    return {"a_b": x**2}  # ok\n\n\nif __name__ == "__main__":\n\tf(1)',
    "https://example.org/a?b=c&d=%20 name@example.org <b>#tag</b> $x^2$ \\frac{1}{2} ___ ====",
    "aaaaaaaaaaaaaaaaaaaaaaaa BBBBBBBBBBBB !!!!!!!! ........",
    "<s> </s> <|endoftext|> <unk> [INST] <think>",
)
_CONVERSATION = [
    {"role": "user", "content": "Where does the ferry go?"},
    {"role": "assistant", "content": "To the island."},
    {"role": "user", "content": "When?"},
]
_MAX_CONTROL = 64
"""Control tokens that are tried, in one text."""


class TokenDifference(NamedTuple):
    """A text that becomes other tokens."""

    text: str
    found: list[int]
    """Tokens of the tokenizer in use."""
    expected: list[int]
    """Those of llama.cpp."""

    def __str__(self) -> str:
        pairs = zip(self.found, self.expected, strict=False)
        place = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        found, expected = (_from(tokens, place) for tokens in (self.found, self.expected))
        return f"{self.text[:60]!r} becomes {found} from token {place} on, in llama.cpp {expected}"


class TextTokenizer(Protocol):
    """Makes tokens of a text as llama.cpp does."""

    def tokenize(self, text: str) -> list[int]:
        """Tokens of a text with control tokens, and those around it."""


def token_differences(file: TextTokenizer, tokenizer: Any) -> tuple[TokenDifference, ...]:
    """The texts that become other tokens in a transformers tokenizer than in llama.cpp."""
    pairs = ((text, list(tokenizer.encode(text)), file.tokenize(text)) for text in _texts(tokenizer))
    return tuple(TokenDifference(*pair) for pair in pairs if pair[1] != pair[2])


def _texts(tokenizer: Any) -> Iterator[str]:
    yield from _TEXTS
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    yield "a".join(added[:_MAX_CONTROL])
    if not getattr(tokenizer, "chat_template", None):
        return
    try:
        yield tokenizer.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=True)
    except Exception:  # a template may refuse such a conversation; it raises again when it is used
        return


def _from(tokens: Sequence[int], place: int) -> str:
    shown = ", ".join(map(str, tokens[place : place + 8]))
    return f"[{shown}{', …' if len(tokens) > place + 8 else ''}]"
