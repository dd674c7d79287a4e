"""Prompts made from the blocks of a trace, as token ids and as texts.

A block becomes words: the first one identifies it, the others are the same in all blocks. A word is one token id.

    block 8302, 512 tokens    "lqs a b c …"                   a part of the system text that does not change
    block 14332, 512 tokens   "2026-03-05 awq a b c …"        one that changes: a line that begins with a date
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase

from kvmosaic.bench.trace.replay import Variant
from kvmosaic.bench.trace.trace import BLOCK_TOKENS, Trace, TraceBlock, TraceRequest
from kvmosaic.prompt import Prompt, PromptEncoder, PromptOptions, Segment, SegmentKind
from kvmosaic.prompt.preamble import preamble_rule, with_preamble

_NUM_DATES = 84
_NUM_FILLERS = 20
"""Words of one letter each, so that with any tokenizer long blocks have as many tokens per word as short ones."""
_MAX_DOCUMENTS = 10**6
_AUTO = preamble_rule("auto")
_COMPANION = (0,) * 8


@dataclass(frozen=True, slots=True)
class RequestTexts:
    """The texts of one request."""

    system: str
    documents: tuple[str, ...]
    rest: str

    @property
    def joined(self) -> str:
        """One ordinary text."""
        return "\n\n".join(part for part in (self.system, *self.documents, self.rest) if part)


class PromptWriter:
    """Writer of prompts with the shape and the repetitions of a trace.

    The same blocks give the same tokens, at any scale. A block of a system text *changes* if other requests with the
    same blocks before it go on differently, wherever in the trace; the first block of a text never does. The writer
    begins a line with a date there, as applications do.
    """

    def __init__(self, trace: Trace, block_tokens: int = BLOCK_TOKENS) -> None:
        """Numbers the blocks of a trace.

        Args:
            trace: what is written.
            block_tokens: words of a full block; all others are scaled by the same factor, to at least one word.
        """
        self.block_tokens = block_tokens
        self._scale = block_tokens / BLOCK_TOKENS
        self._numbers: dict[int, int] = {}
        self._changing = _ChangingBlocks(request.system for request in trace.requests)
        num_words = block_tokens
        for request in trace.requests:
            for block in (*request.system, *request.documents, *request.rest):
                self._numbers.setdefault(block.id, _NUM_FILLERS + len(self._numbers))
                num_words = max(num_words, self._length(block, 1))
        self._fillers = tuple(itertools.islice(itertools.cycle(range(_NUM_FILLERS)), num_words))
        self._encoders = {
            preamble: PromptEncoder(
                None, PromptOptions(preamble=rule, max_prompt_chunks=_MAX_DOCUMENTS), vocab_size=self.vocab_size
            )
            for preamble, rule in (("all", "all"), ("first", block_tokens), ("auto", "all"))
        }

    @property
    def vocab_size(self) -> int:
        """Number of words: fillers, one per block of the trace, and dates."""
        return _NUM_FILLERS + len(self._numbers) + _NUM_DATES

    def words(self) -> Iterator[str]:
        """All words, by token id."""
        return map(self._word, range(self.vocab_size))

    def prompt(self, request: TraceRequest, variant: Variant) -> Prompt:
        """The prompt of a request, as token ids."""
        documents, rest = [self._words((block,)) for block in request.documents], self._words(request.rest)
        system = self._system(request)
        if variant.is_plain or not (system or documents):
            return Prompt.plain((*system, *itertools.chain(*documents), *rest))
        segments = [Segment(SegmentKind.CHUNK, words) for words in documents]
        if system and variant.preamble == "auto" and documents:
            head = with_preamble([Segment(SegmentKind.SYSTEM, text=self._system_text(request)), *segments], _AUTO)
            segments = [*_split_words(system, head[: len(head) - len(segments)]), *segments]
        elif system:
            segments.insert(0, Segment(SegmentKind.SYSTEM, system))
        prompt = Prompt((*segments, Segment(SegmentKind.QUESTION, rest)), companions=(_COMPANION,))
        return self._encoders[variant.preamble].encode(prompt)

    def lengths(self, request: TraceRequest) -> tuple[int, int]:
        """Tokens of the system text, and of all documents together."""
        return len(self._system(request)), len(self._words(request.documents))

    def num_tokens(self, request: TraceRequest) -> int:
        """Tokens of the whole prompt."""
        return sum(self.lengths(request)) + len(self._words(request.rest))

    def texts(self, request: TraceRequest) -> RequestTexts:
        """The same prompt as texts; the first block of a system text is its first line."""
        documents = tuple(self._text(self._words((block,))) for block in request.documents)
        return RequestTexts(self._system_text(request), documents, self._text(self._words(request.rest)))

    def _system(self, request: TraceRequest) -> tuple[int, ...]:
        num_stable = self._changing.first_in(request.system)
        return (*self._words(request.system[:num_stable]), *self._words(request.system[num_stable:], is_dated=True))

    def _system_text(self, request: TraceRequest) -> str:
        num_stable = self._changing.first_in(request.system)
        lines = (
            self._text(self._words((block,), is_dated=index >= num_stable))
            for index, block in enumerate(request.system)
        )
        return "\n".join(lines)

    def _words(self, blocks: Iterable[TraceBlock], *, is_dated: bool = False) -> tuple[int, ...]:
        words: list[int] = []
        for block in blocks:
            number = self._numbers[block.id]
            first = (self.vocab_size - 1 - number % _NUM_DATES, number) if is_dated else (number,)
            words += first
            words += self._fillers[: self._length(block, len(first)) - len(first)]
        return tuple(words)

    def _length(self, block: TraceBlock, at_least: int) -> int:
        return max(round(block.num_tokens * self._scale), at_least)

    def _text(self, words: Sequence[int]) -> str:
        return " ".join(map(self._texts_of_words.__getitem__, words))

    @cached_property
    def _texts_of_words(self) -> list[str]:
        return list(self.words())

    def _word(self, number: int) -> str:
        date = self.vocab_size - 1 - number
        if date < _NUM_DATES:
            return f"2026-{1 + date % 12:02}-{1 + date % 28:02}"
        letters = ""
        while number >= 0:
            letters = ascii_lowercase[number % 26] + letters
            number = number // 26 - 1
        return letters


class _ChangingBlocks:
    """Tree of the system texts of a trace: where texts that begin alike go on differently."""

    def __init__(self, texts: Iterable[Sequence[TraceBlock]]) -> None:
        self._children: dict[tuple[int, int], int] = {}
        """(node, block) -> node; node 0 is the beginning of all texts."""
        self._num_children = [0]
        for text in texts:
            node = 0
            for block in text:
                after = self._children.get((node, block.id))
                if after is None:
                    after = self._children[node, block.id] = len(self._num_children)
                    self._num_children[node] += 1
                    self._num_children.append(0)
                node = after

    def first_in(self, text: Sequence[TraceBlock]) -> int:
        """Index of the first block of a text that changes, at least 1; the number of its blocks if none does."""
        node = 0
        for index, block in enumerate(text):
            if index and self._num_children[node] > 1:
                return index
            node = self._children[node, block.id]
        return len(text)


def _split_words(words: tuple[int, ...], parts: Sequence[Segment]) -> list[Segment]:
    """The segments of a split text as token ids: a word is one."""
    segments, start = [], 0
    for part in parts:
        end = start + len((part.text or "").split())
        segments.append(Segment(part.kind, words[start:end]))
        start = end
    assert start == len(words), "a system text has as many words as tokens"
    return segments
