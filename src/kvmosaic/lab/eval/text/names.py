"""Invented names, split into training names and held-out names by a hash of the name itself.

Real first and family names ("Anna", "Miller") are ordinary words and occur in both splits; a full name made of two of
them occurs in one.
"""

import hashlib
import tomllib
from pathlib import Path
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]

_LINES = {"fillers", "systems"}
_ENTRIES: dict[str, str] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
WORDS = {name: text.splitlines() if name in _LINES else text.split() for name, text in _ENTRIES.items()}
"""Lists of words, and of sentences."""
REAL_FIRST_NAMES = frozenset(WORDS["first_names_f"] + WORDS["first_names_m"])
REAL_LAST_NAMES = frozenset(WORDS["last_names"])
_THINGS = {
    "company": (0.0, "family_ends", "{stem} {noun}", "company_last"),
    "product": (0.0, "person_ends_m", "the {stem} {noun}", "products"),
    "ship": (0.6, "person_ends_f", "the {stem}", ""),
    "museum": (0.2, "town_ends", "the {stem} {noun}", "museums"),
    "building": (0.2, "family_ends", "the {stem} {noun}", "buildings"),
    "school": (0.0, "town_ends", "{stem} {noun}", "schools"),
    "book": (0.7, "person_ends_f", "the book {stem}", ""),
    "plant": (0.0, "town_ends", "the {stem} {noun}", "plants"),
    "project": (0.4, "person_ends_f", "Project {stem}", ""),
    "festival": (0.3, "town_ends", "the {stem} {noun}", "festivals"),
}
"""By kind: how often the stem is a pair of words, else its last letters; how it is said; and the list of its nouns."""


def is_held_out(stem: str) -> bool:
    """Whether a name belongs to the held-out split; about one name in eight does."""
    return hashlib.sha256(stem.lower().encode()).digest()[0] < 32


class NameSource:
    """Draws names of one split. Every stem drawn passes the hash test, so the splits never share a name."""

    def __init__(self, random: Random, split: Split) -> None:
        self.random = random
        self.split = split
        self.stems: list[str] = []  # the stems of the current prompt
        self.echoes = 0.0

    def start_prompt(self, echoes: float) -> None:
        """Forgets the stems of the last prompt; `echoes` is how often an invented stem is used again in this one."""
        self.stems = []
        self.echoes = echoes

    def _draw(self, *parts: list[str], separator: str = "") -> str:
        while True:
            stem = separator.join(self.random.choice(part) for part in parts)
            if is_held_out(stem) == (self.split == "held_out"):
                self.stems.append(stem)
                return stem

    def _invented(self, ends: list[str]) -> str:
        words_only = [stem for stem in self.stems if stem.isalpha()]
        if words_only and self.random.random() < self.echoes:
            return self.random.choice(words_only)
        drawn = self.random.random()
        if drawn < 0.1:
            rest = [WORDS["vowels"], WORDS["consonants"]] * self.random.randint(2, 3)
            return self._draw([letters.capitalize() for letters in WORDS["consonants"]], *rest)
        if drawn < 0.37:
            return self._draw(WORDS["onsets"], WORDS["middles"], ends)
        return self._draw(WORDS["onsets"], ends)

    def first_name(self, female: bool) -> str:
        """One word, such as "Marla"."""
        if self.random.random() < 0.3:
            return self.random.choice(WORDS["first_names_f"] if female else WORDS["first_names_m"])
        return self._invented(WORDS["person_ends_f"] if female else WORDS["person_ends_m"])

    def last_name(self) -> str:
        """A family name, such as "Denwick"."""
        if self.random.random() < 0.25:
            return self.random.choice(WORDS["last_names"])
        return self._invented(WORDS["family_ends"])

    def person(self, female: bool | None = None) -> str:
        """First and family name."""
        if female is None:
            female = self.random.random() < 0.5
        while True:
            first, last = self.first_name(female), self.last_name()
            name = f"{first} {last}"
            if first not in REAL_FIRST_NAMES or last not in REAL_LAST_NAMES:
                return name
            if is_held_out(name) == (self.split == "held_out"):
                self.stems.append(name)
                return name

    def town(self) -> str:
        """Such as "Tolbury"."""
        return self._invented(WORDS["town_ends"])

    def river(self) -> str:
        """Such as "Quinan"."""
        return self._draw(WORDS["onsets"], WORDS["river_ends"])

    def word(self) -> str:
        """A lower-case word that does not exist."""
        if self.random.random() < 0.4:
            return self._draw(WORDS["word_onsets"], WORDS["middles"], WORDS["word_ends"])
        return self._draw(WORDS["word_onsets"], WORDS["word_ends"])

    def pair(self) -> str:
        """Two ordinary words that make a name, such as "Silver Heron"."""
        return self._draw(WORDS["adjectives"], WORDS["nouns"], separator=" ")

    def machine(self) -> str:
        """Such as "the KR-20 press" or "the Lumdo crane"."""
        kind = self._plain(WORDS["machines"])
        if self.random.random() < 0.4:
            letters = "".join(self.random.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(2))
            return f"the {self._draw([letters], ['-'], [str(n) for n in range(10, 100)])} {kind}"
        return f"the {self._invented(WORDS['person_ends_m'])} {kind}"

    def animal(self) -> str:
        """One first name."""
        return self.first_name(self.random.random() < 0.5)

    def thing(self, kind: str) -> str:
        """The name of something of this kind, such as "the Halport Museum"."""
        if kind not in _THINGS:
            name: str = getattr(self, kind)()
            return name
        share, ends, pattern, nouns = _THINGS[kind]
        stem = self.pair() if share and self.random.random() < share else self._invented(WORDS[ends])
        return pattern.format(stem=stem, noun=self._plain(WORDS[nouns]) if nouns else "")

    def _plain(self, options: list[str]) -> str:
        return self.random.choice(options).replace("_", " ")
