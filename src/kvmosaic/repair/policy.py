"""Repair policies: which tokens of cached chunks a request recomputes with everything before them visible.

A chunk was computed without the chunks before it. Recomputing all of its tokens in place gives ordinary causal
attention; recomputing a few of them recovers most of it for a few percent of the time. A policy chooses these few.
"""

from __future__ import annotations

import math
import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, SupportsIndex, get_args, runtime_checkable

from kvmosaic.errors import InvalidRepair

_ROUNDING = 1e-6
Signal = Literal["deviation", "attention", "names", "words", "alike"]
MEASURED: frozenset[Signal] = frozenset({"deviation", "attention"})
"""Signals that are measured by running the model."""
_DEVIATION_PART = 0.5
MAX_COUNT = 2**20


@dataclass(frozen=True, slots=True)
class ChunkSignals:
    """What a policy knows of one chunk of a prompt.

    An exact chunk saw everything before it: none of its tokens needs to be recomputed.
    """

    num_tokens: int
    is_exact: bool = False
    deviation: Sequence[float] = ()
    """By token: squared distance between the second layer's cached keys and those computed when the token sees
    everything before it. Empty unless requested."""
    attention: Sequence[float] = ()
    """By token: attention of the question to it, as a share summed over the question's tokens, averaged over heads and
    the later half of the layers. Empty unless requested."""
    names: Sequence[bool] = ()
    """By token: whether it belongs to a word with a digit or a capital letter. Empty unless requested."""
    words: float = 0.0
    """Weight of the question's words in it: a sum over words that at most half of the chunks have, more for rarer
    words. Zero unless requested."""
    is_like_one_before: bool = False
    """Whether it is like one of the chunks before it, and another text. False unless requested."""

    @property
    def num_open(self) -> int:
        """Tokens that may be chosen."""
        return 0 if self.is_exact else self.num_tokens


@runtime_checkable
class RepairPolicy(Protocol):
    """Protocol of a repair policy; `kvmosaic.repair` has ten implementations, and others may be passed."""

    @property
    def signals(self) -> frozenset[Signal]:
        """What must be measured before it can choose; measuring costs time."""

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """For every chunk of a prompt, in order: the indexes of its tokens to recompute, without repetition."""


@dataclass(frozen=True, slots=True)
class NoRepair:
    """No repair: nothing is recomputed, and documents do not see each other."""

    signals: ClassVar[frozenset[Signal]] = frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [() for _ in chunks]

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class FullRepair:
    """Full recomputation, as ordinary causal attention over the whole prompt; no cached chunk is read."""

    signals: ClassVar[frozenset[Signal]] = frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [range(chunk.num_open) for chunk in chunks]

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of every chunk, which act as attention sinks of their chunk (EPIC, LegoLink)."""

    tokens: int = 16
    signals: ClassVar[frozenset[Signal]] = frozenset()

    def __post_init__(self) -> None:
        _check_count(self.tokens, f"first(k) computes 1 to {MAX_COUNT} tokens of each chunk")

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [range(min(self.tokens, chunk.num_open)) for chunk in chunks]

    def __str__(self) -> str:
        return f"first({self.tokens})"


@dataclass(frozen=True, slots=True)
class Names:
    """Words with a digit or a capital letter: names, numbers and dates, in which records of one kind differ."""

    signals: ClassVar[frozenset[Signal]] = frozenset({"names"})

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [[token for token in range(chunk.num_open) if chunk.names[token]] for chunk in chunks]

    def __str__(self) -> str:
        return "names"


@dataclass(frozen=True, slots=True)
class Alike:
    """All tokens of the chunks that are like one before them: these see it, as in an ordinary prompt."""

    signals: ClassVar[frozenset[Signal]] = frozenset({"alike"})

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [range(chunk.num_open * chunk.is_like_one_before) for chunk in chunks]

    def __str__(self) -> str:
        return "alike"


@dataclass(frozen=True, slots=True)
class KeyDeviation:
    """The tokens whose keys deviate most from those with everything before them visible (CacheBlend)."""

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"deviation"})

    def __post_init__(self) -> None:
        _check_fraction("deviation", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return highest_scored(chunks, [chunk.deviation for chunk in chunks], self.fraction)

    def __str__(self) -> str:
        return f"deviation({_text(self.fraction)})"


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """The tokens with the most attention from the question (ProphetKV)."""

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"attention"})

    def __post_init__(self) -> None:
        _check_fraction("query", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return highest_scored(chunks, [chunk.attention for chunk in chunks], self.fraction)

    def __str__(self) -> str:
        return f"query({_text(self.fraction)})"


@dataclass(frozen=True, slots=True)
class AskedDocuments:
    """All tokens of the chunks with most of the question's words, and at least half as many as the first of them."""

    documents: int = 3
    signals: ClassVar[frozenset[Signal]] = frozenset({"words"})

    def __post_init__(self) -> None:
        _check_count(self.documents, f"documents(k) computes 1 to {MAX_COUNT} documents")

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`; ties go to the earlier chunk."""
        found = nlargest(self.documents, ((chunk.words, -number) for number, chunk in enumerate(chunks) if chunk.words))
        chosen = {-number for words, number in found if words >= found[0][0] / 2}
        return [range(chunk.num_open if number in chosen else 0) for number, chunk in enumerate(chunks)]

    def __str__(self) -> str:
        return f"documents({self.documents})"


@dataclass(frozen=True, slots=True)
class Combined:
    """The tokens with attention from the question, and those with wrong keys (both signals, as in QCFuse).

    A token's score is the root of its share of all attention, plus half the root of its share of all deviation. One
    finds what the question asks for, the other what must be recomputed for it. (Products, and sums without roots, were
    worse: few tokens have nearly all of either signal.)
    """

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"deviation", "attention"})

    def __post_init__(self) -> None:
        _check_fraction("combined", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        asked_in_all = sum(sum(chunk.attention) for chunk in chunks) or 1.0
        far_in_all = sum(sum(chunk.deviation) for chunk in chunks) or 1.0
        scores = [
            [
                math.sqrt(asked / asked_in_all) + _DEVIATION_PART * math.sqrt(far / far_in_all)
                for asked, far in zip(chunk.attention, chunk.deviation, strict=True)
            ]
            for chunk in chunks
        ]
        return highest_scored(chunks, scores, self.fraction)

    def __str__(self) -> str:
        return f"combined({_text(self.fraction)})"


def _text(number: float) -> str:
    """The shortest text that parses back to this number."""
    return repr(float(number)).removesuffix(".0")


def _check_count(count: object, what: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_COUNT:
        raise InvalidRepair(f"{what}, got {count!r}")


def _check_fraction(name: str, fraction: object) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise InvalidRepair(
            f"{name}(fraction) computes this share of the chunks' tokens: above 0, at most 1, got {fraction!r}"
        )


def budget_of(chunks: Sequence[ChunkSignals], fraction: float) -> int:
    """A fraction of all chunks' tokens: rounded down, but at least one if any may be chosen."""
    num_open = sum(chunk.num_open for chunk in chunks)
    share = fraction * sum(chunk.num_tokens for chunk in chunks)
    return min(num_open, max(1, int(share + _ROUNDING)))  # 0.29 of 100 is 29, though 0.29 * 100 is a little less


def highest_scored(
    chunks: Sequence[ChunkSignals], scores: Sequence[Sequence[float]], fraction: float
) -> list[Sequence[int]]:
    """For every chunk the indexes of its chosen tokens, ascending; ties go to the earlier token."""
    budget = budget_of(chunks, fraction)
    ranked = nlargest(
        budget,
        (
            (scores[number][token], -number, -token)
            for number, chunk in enumerate(chunks)
            for token in range(chunk.num_open)
        ),
    )
    chosen: list[list[int]] = [[] for _ in chunks]
    for _, number, token in ranked:
        chosen[-number].append(-token)
    return [sorted(tokens) for tokens in chosen]


def checked_choice(chunks: Sequence[ChunkSignals], chosen: Sequence[Sequence[int]], policy: object) -> list[list[int]]:
    """A policy's choice, sorted and without exact chunks.

    Raises:
        InvalidRepair: the wrong number of lists, or an index outside its chunk.
    """
    if len(chosen) != len(chunks):
        raise InvalidRepair(f"{policy} chose tokens for {len(chosen)} chunks, and the prompt has {len(chunks)}")
    checked: list[list[int]] = []
    for number, (chunk, tokens) in enumerate(zip(chunks, chosen, strict=True)):
        numbers = [_checked_token(token, number, chunk, policy) for token in tokens]
        checked.append(sorted(set(numbers)) if chunk.num_open else [])
    return checked


def _checked_token(token: SupportsIndex, number: int, chunk: ChunkSignals, policy: object) -> int:
    index = -1 if isinstance(token, bool) or not hasattr(token, "__index__") else operator.index(token)
    if not 0 <= index < chunk.num_tokens:
        raise InvalidRepair(
            f"{policy} chose token {token!r:.80} of chunk {number}; its tokens are 0 to {chunk.num_tokens - 1}"
        )
    return index


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


DEFAULT_REPAIR = "first(8)"
ASKED_REPAIR, MANY_ASKED_REPAIR, UNMEASURED_REPAIR, FEW_DOCUMENTS = "query(0.05)", "query(0.3)", "documents(3)", 6
"""The defaults of documents that have met companions: few, more, and where attention cannot be measured. Without, facts
of one kind in them are mixed up."""
MAX_POLICY_CHARACTERS = 100
FORMS = "none, first(k), names, alike, documents(k), deviation(fraction), query(fraction), combined(fraction), full"
_SIGNALS = frozenset(get_args(Signal))
_FORM = re.compile(r"([a-z]+)(?:\(([^()]*)\))?")
_POLICIES: Mapping[str, tuple[Callable[..., RepairPolicy], int]] = MappingProxyType(
    {
        "none": (NoRepair, 0),
        "first": (FirstTokens, 1),
        "names": (Names, 0),
        "alike": (Alike, 0),
        "documents": (AskedDocuments, 1),
        "deviation": (KeyDeviation, 1),
        "query": (QueryAttention, 1),
        "combined": (Combined, 1),
        "full": (FullRepair, 0),
    }
)


def repair_policy(policy: str | RepairPolicy) -> RepairPolicy:
    """The policy of a text, such as "first(16)", or the given policy itself.

    Raises:
        InvalidRepair: neither of them, or numbers outside their range.
    """
    if not isinstance(policy, str):
        if not isinstance(policy, RepairPolicy) or isinstance(policy, type):
            raise InvalidRepair(f"repair must be one of {FORMS}, or a RepairPolicy; got {policy!r:.80}")
        _check_members(policy)
        return policy
    form = _FORM.fullmatch(policy.strip().lower()) if len(policy) <= MAX_POLICY_CHARACTERS else None
    if form is None or form[1] not in _POLICIES:
        raise InvalidRepair(f"repair is {policy[:80]!r}; choose one of {FORMS}")
    make, most = _POLICIES[form[1]]
    numbers = [_number(part, policy) for part in form[2].split(",")] if form[2] and form[2].strip() else []
    if len(numbers) > most:
        raise InvalidRepair(f"repair is {policy!r} with {len(numbers)} numbers; the forms are {FORMS}")
    return make(*numbers)


def _check_members(policy: RepairPolicy) -> None:
    """Raises InvalidRepair if a user's own policy lacks a member or names an unknown signal."""
    name = type(policy).__name__
    try:
        str(policy)
        signals = frozenset(policy.signals)
    except Exception as error:
        raise InvalidRepair(f"the repair policy {name} has no text or no set of signals: {error!r:.200}") from error
    if unknown := sorted(map(repr, signals - _SIGNALS)):
        raise InvalidRepair(
            f"the repair policy {name} asks for the signals {', '.join(unknown)[:80]}; there are "
            f"{', '.join(sorted(_SIGNALS))}"
        )


def _number(text: str, policy: str) -> int | float:
    try:
        return int(text) if re.fullmatch(r"\s*\d{1,12}\s*", text) else float(text)
    except ValueError:
        raise InvalidRepair(f"repair is {policy!r}, and {text.strip()!r} is no number; the forms are {FORMS}") from None
