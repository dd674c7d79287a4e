"""Checks of a model that is loaded: tokens of texts, and what keys and values have to do with positions.

Texts must become the tokens that llama.cpp itself would make of them: the tokenizer is transformers', built from the
vocabulary of the file. Positions are measured on one token at two of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import UnsupportedModel
from kvmosaic.llama.library import NO_FAULTS, LlamaContext, LlamaFile, Rows, ShiftFaults
from kvmosaic.llama.state import LayerRows, MemoryState, parse

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
    "<s> <unk> [INST] <think>",  # no end of another family: llama.cpp takes it for one whatever the file says
)
_CONVERSATION = [
    {"role": "user", "content": "Where does the ferry go?"},
    {"role": "assistant", "content": "To the island."},
    {"role": "user", "content": "When?"},
]
_MAX_CONTROL = 64
"""Control tokens that are tried, in one text."""
_FAR = 37
_SAME = 1e-3
"""Largest difference of what is the same, as a share of the largest number."""


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


def token_differences(file: LlamaFile, tokenizer: Any) -> tuple[TokenDifference, ...]:
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


@dataclass(frozen=True, slots=True)
class PositionFacts:
    """How keys and values depend on the position of their token."""

    faults: ShiftFaults = NO_FAULTS
    reason: str = ""
    """Why cached tokens cannot be composed; empty when they can."""


def measure_positions(file: LlamaFile) -> PositionFacts:
    """Computes a token at position 0 and at another one. It sees itself alone, so only a rotation can differ.

    Raises:
        UnsupportedModel: llama.cpp saves the sequences of this model in another form.
        ModelError: llama.cpp cannot run it.
    """
    context = file.context(num_cells=32, num_sequences=3, num_threads=1, max_rows=2, cache_type="f32")
    try:
        context.forward([Rows([0], 0, 0), Rows([0], min(_FAR, file.max_positions - 1), 1)])
        here, there = (parse(context.save(sequence)).memories for sequence in range(2))
        if not any(memory.keys for memory in here):
            raise UnsupportedModel(f"{file.path.name} keeps no keys and values in llama.cpp: there is nothing to cache")
        pairs = list(zip(here, there, strict=True))
        unrotated = tuple(tuple(map(_same, one.keys, other.keys)) for one, other in pairs)
        if not all(all(map(_same, one.values, other.values)) for one, other in pairs):
            return PositionFacts(reason="its values depend on the position")
        if all(all(layers) for layers in unrotated):
            return PositionFacts(reason="its keys are not rotated, so what a token sees depends on distances otherwise")
        if not context.can_shift:
            return PositionFacts(reason="llama.cpp cannot shift its keys")
        return PositionFacts(ShiftFaults(unrotated if any(map(any, unrotated)) else (), _scales(context, here)))
    finally:
        context.close()


def _scales(context: LlamaContext, before: tuple[MemoryState, ...]) -> tuple[tuple[NDArray[np.float32], ...], ...]:
    """By what a shift multiplies each number of a key: measured on a shift by nothing."""
    context.shift(0, 1)
    context.shift(0, -1)
    context.forward([Rows([0], 0, 2)])
    after = parse(context.save(0)).memories
    found = tuple(tuple(map(_scale, memory.keys, other.keys)) for memory, other in zip(after, before, strict=True))
    return found if any(np.any(scale != 1) for layers in found for scale in layers) else ()


def _scale(after: LayerRows, before: LayerRows) -> NDArray[np.float32]:
    numbers, others = after.rows.view(np.float32)[0], before.rows.view(np.float32)[0]
    is_zero = others == 0
    scale = np.where(is_zero, 1, numbers / np.where(is_zero, 1, others)).astype(np.float32)
    changed = np.abs(scale - 1) > _SAME
    return np.where(changed, np.median(scale[changed]) if changed.any() else 1, 1).astype(np.float32)


def _same(one: LayerRows, other: LayerRows) -> bool:
    numbers, others = one.rows.view(np.float32), other.rows.view(np.float32)
    return bool(np.abs(numbers - others).max() <= _SAME * np.abs(numbers).max())
