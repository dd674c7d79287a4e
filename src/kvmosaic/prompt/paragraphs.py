"""The bundled companion in ten languages, and which of them documents are written in.

After an English paragraph, German documents were twice as far from full attention as after a German one (SmolLM2-135M).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

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
