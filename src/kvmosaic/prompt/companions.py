"""Companions: texts that documents see when they are computed, and that no prompt contains.

A document that is computed right after the system text is the first one, for the model. In a prompt there are others
before it, and models bind what they read to *which one it is in the order*: four first ones are mixed up, the more the
more alike they are (Feng and Steinhardt, arXiv 2310.17191). So document k of a prompt is computed after k other texts,
best documents of its own kind (`benchmarks/companions.py`). And which documents are of one kind.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

from kvmosaic.errors import InvalidConfig

BUNDLED, STORED = "prose", "stored"
NUM_COMPANIONS = 3
"""How many of them documents see, at most: more helped no further."""
MAX_COMPANIONS = 24
"""To choose from: those that are like the documents of a prompt."""
MAX_STORED_CHARACTERS = 4_000
"""Of a tenant's stored documents: the first short ones, so that copies stay as they are whatever it stores later."""
MAX_COMPANION_CHARACTERS = 20_000


def read_companions(given: str | Sequence[str]) -> tuple[str, ...]:
    """The texts of a setting or a request.

    Args:
        given: texts; or the path of a file of texts with empty lines between them; or "prose", the bundled paragraph;
            or "stored", the paragraph where a tenant has stored nothing.

    Returns:
        The texts; none for the bundled paragraph, whose language is that of the documents.

    Raises:
        InvalidConfig: no text, too many or too long ones, or a file that cannot be read.
    """
    if given in (BUNDLED, STORED):
        return ()
    texts = _read(Path(given)) if isinstance(given, str) else given
    limit = MAX_COMPANION_CHARACTERS
    if not isinstance(texts, tuple | list) or not 1 <= len(texts) <= MAX_COMPANIONS:
        count = len(texts) if isinstance(texts, tuple | list) else repr(texts)[:80]
        raise InvalidConfig(f"companions are 1 to {MAX_COMPANIONS} texts, got {count}; three of a kind are enough")
    for text in texts:
        if not isinstance(text, str) or not 1 <= len(text.strip()) <= limit:
            raise InvalidConfig(f"a companion is a text of 1 to {limit} characters, got {text!r:.80}")
    return tuple(texts)


def _read(path: Path) -> list[str]:
    try:
        if path.stat().st_size > 8 * MAX_COMPANIONS * MAX_COMPANION_CHARACTERS:
            raise InvalidConfig(f"{str(path)!r:.200} is too large for companions; name a file of a few short texts")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidConfig(
            f"companions are {BUNDLED!r}, {STORED!r} or a file of texts with empty lines between them; "
            f"{str(path)!r:.200} cannot be read: {why}"
        ) from None
    return [part.strip() for part in text.split("\n\n") if part.strip()]


_SCRIPTS: Final = {
    "ja": re.compile("[\u3040-\u30ff]"),
    "zh": re.compile("[\u4e00-\u9fff]"),
    "ru": re.compile("[\u0400-\u04ff]"),
    "ar": re.compile("[\u0600-\u06ff]"),
    "hi": re.compile("[\u0900-\u097f]"),
}
_SHARE: Final = {"ja": 0.1, "zh": 0.3}
"""Of the characters that must be of a script: Japanese also has Chinese ones."""
_WORDS: Final = {
    "en": frozenset("the of and is was that with for are it this by from".split()),
    "de": frozenset("der die und das ist nicht mit von den dem des ein eine auf sich wird".split()),
    "es": frozenset("el los las del que una por con es se para su al como".split()),
    "fr": frozenset("le les des et est une dans du pour qui sur au par il".split()),
    "pt": frozenset("os do da em um uma não que dos das ao na se com".split()),
}
_LOOKED_AT = 400
"""Characters of a document."""
_WORD = re.compile(r"[^\W\d_]+")


@cache
def paragraphs() -> Mapping[str, str]:
    """By language, English first: the same explanation, in prose.

    On SmolLM2-135M and XQuAD, an empty space of that length, random tokens, or the document itself in its place did not
    help, and paragraphs full of names and numbers helped less.
    """
    path = Path(__file__).parent.parent / "bundled" / "companions.json"
    return dict[str, str](json.loads(path.read_text(encoding="utf-8")))


def paragraph_for(documents: Iterable[str]) -> str:
    """The paragraph in the language of most documents, in any order; in English where none is recognized."""
    found, known = Counter(_language(text[:_LOOKED_AT]) for text in documents), paragraphs()
    return known[max(known, key=lambda language: found[language])]


def _language(text: str) -> str:
    """One of ten languages, by script and frequent words; empty: another one, code, or too short to say."""
    if max(text, default="") >= "\u0400":  # of another script, or at least a quotation mark
        for language, script in _SCRIPTS.items():
            if len(script.findall(text)) > _SHARE.get(language, 0.4) * len(text):
                return language
    words = set(_WORD.findall(text.lower()))
    counts = {language: len(known & words) for language, known in _WORDS.items()}
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > max(1, 0.05 * len(words)) else ""


TokenIds = Sequence[int]
Companion = tuple[int, ...]
Likeness = Literal["", "apart", "met"]
"""Of documents: they differ; some are alike, and none has met another; or they have, as companions of their kind."""

_MIN_SHARE, _MIN_PAIRS = 0.36, 8
_COMPARED = 128
"""Tokens that are compared, at the start and at the end of each document."""
_NEIGHBOURS = 32
"""How far apart in a prompt documents are compared."""
SHORT_TOKENS, SHORT_DOCUMENT = 256, 96
"""Of all documents of a prompt, and of one on average: read apart, many short ones are mixed up."""


def are_short(lengths: Sequence[int]) -> bool:
    """Whether documents of so many tokens are read in full by default, although they differ."""
    return sum(lengths) <= max(SHORT_TOKENS, SHORT_DOCUMENT * len(lengths))


def alike_pairs(documents: Sequence[TokenIds], texts: Sequence[object] = ()) -> Iterator[tuple[int, int]]:
    """The numbers of two documents that are alike, in start and end: many of their pairs of tokens are the same.

    Records of one kind have 34% to 95% of these pairs in common in six languages (`kvmosaic eval --tasks similar`),
    paragraphs of one article 0% to 32% (XQuAD), source files of one project 0% to 28%. The same text twice, by the
    texts if they are given, is no such pair.
    """
    known, texts, count = [_Form(ids) for ids in documents], texts or documents, len(documents)
    for first in range(count):
        for second in range(first + 1, min(first + 1 + _NEIGHBOURS, count)):
            if texts[first] != texts[second] and known[first].is_like(known[second]):
                yield first, second


def like_one_before(documents: Sequence[TokenIds], texts: Sequence[object] = ()) -> set[int]:
    """The numbers of documents that are like one before them; see `alike_pairs`."""
    return {later for _, later in alike_pairs(documents, texts)}


def alike_companions(documents: Sequence[TokenIds], companions: Iterable[Companion]) -> Iterator[Companion]:
    """The companions that are like one of the documents, or are one of them."""
    known = [_Form(ids) for ids in documents]
    for companion in companions:
        form = _Form(companion)
        if any(form.is_like(other) for other in known):
            yield companion


def likeness_of(documents: Sequence[TokenIds], companions: Iterable[Companion]) -> Likeness:
    """Whether documents are alike, and have met others of their kind."""
    pair = next(alike_pairs(documents), None)
    if pair is None:
        return ""
    return "met" if any(alike_companions([documents[pair[0]]], companions)) else "apart"


class _Form:
    """Which tokens follow one another in a document."""

    def __init__(self, ids: TokenIds) -> None:
        self._ids = ids
        self._start = frozenset(pairwise(ids[:_COMPARED]))

    def is_like(self, other: _Form) -> bool:
        return _have_in_common(self._start, other._start) and _have_in_common(self._end, other._end)

    @cached_property
    def _end(self) -> frozenset[tuple[int, int]]:
        return frozenset(pairwise(self._ids[-_COMPARED:]))


def _have_in_common(one: frozenset[tuple[int, int]], other: frozenset[tuple[int, int]]) -> bool:
    return len(one & other) >= _MIN_SHARE * max(min(len(one), len(other)), _MIN_PAIRS)
