"""Invented names, split into training names and held-out names by a hash of the name itself.

Real first and family names ("Anna", "Miller") are ordinary words and occur in both splits; a full name made of two of
them occurs in one.
"""

import hashlib
from random import Random
from typing import Literal

from kvmosaic.eval.text import words

Split = Literal["train", "held_out"]

ONSETS = """Mar Del Tor Bel Kan Lo Ren Sal Vel Dra Fen Gor Hal Jor Kel Lin Mor Nel Os Pel Quin Ros Sten Tal Ul Var Wen
Yar Zan Bri Cor Dun El Fa Gri Hol Is Ju Kra Lum""".split()
MIDDLES = "la vi ra ko mi de lo ne sa ti ru be no da".split()
PERSON_ENDS_F = "la na ra ia da sa lin wen ne tha mira ella".split()
PERSON_ENDS_M = "vin ko ren do mir tan rik los bert nar sel ford".split()
FAMILY_ENDS = "wick ley man sen over strom dale mer nov ski ard ton berg low hurst din".split()
TOWN_ENDS = "bury ford ham stad ville wick port mouth field burg by haven ton dorf minster bridge".split()
RIVER_ENDS = "a e in an er el ow une is".split()
CONSONANTS = "b c d f g h j k l m n p r s t v w x z br ch dr gr kh kl ph pr sh st th tr".split()
VOWELS = "a e i o u y ai ee ou".split()
WORD_ONSETS = "bla cro da fe gli ho ka lu me no pra qua ri ste tu vo wi ze".split()
WORD_ENDS = "ble ckle dor fin ga lsh mp nt pper rk sko tter vel x zo mel".split()
REAL_FIRST_NAMES = frozenset(words.FIRST_NAMES_F + words.FIRST_NAMES_M)
REAL_LAST_NAMES = frozenset(words.LAST_NAMES)


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
            rest = [VOWELS, CONSONANTS] * self.random.randint(2, 3)
            return self._draw([letters.capitalize() for letters in CONSONANTS], *rest)
        if drawn < 0.37:
            return self._draw(ONSETS, MIDDLES, ends)
        return self._draw(ONSETS, ends)

    def first_name(self, female: bool) -> str:
        """One word, such as "Marla"."""
        if self.random.random() < 0.3:
            return self.random.choice(words.FIRST_NAMES_F if female else words.FIRST_NAMES_M)
        return self._invented(PERSON_ENDS_F if female else PERSON_ENDS_M)

    def last_name(self) -> str:
        """A family name, such as "Denwick"."""
        if self.random.random() < 0.25:
            return self.random.choice(words.LAST_NAMES)
        return self._invented(FAMILY_ENDS)

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
        return self._invented(TOWN_ENDS)

    def river(self) -> str:
        """Such as "Quinan"."""
        return self._draw(ONSETS, RIVER_ENDS)

    def word(self) -> str:
        """A lower-case word that does not exist."""
        if self.random.random() < 0.4:
            return self._draw(WORD_ONSETS, MIDDLES, WORD_ENDS)
        return self._draw(WORD_ONSETS, WORD_ENDS)

    def pair(self) -> str:
        """Two ordinary words that make a name, such as "Silver Heron"."""
        return self._draw(words.ADJECTIVES, words.NOUNS, separator=" ")

    def company(self) -> str:
        """Such as "Corlow Tools"."""
        return f"{self._invented(FAMILY_ENDS)} {self._plain(words.COMPANY_LAST)}"

    def machine(self) -> str:
        """Such as "the KR-20 press" or "the Lumdo crane"."""
        kind = self._plain(words.MACHINES)
        if self.random.random() < 0.4:
            letters = "".join(self.random.choice("ABCDEFGHKLMNPRSTVXZ") for _ in range(2))
            return f"the {self._draw([letters], ['-'], [str(n) for n in range(10, 100)])} {kind}"
        return f"the {self._invented(PERSON_ENDS_M)} {kind}"

    def product(self) -> str:
        """Such as "the Veltan kettle"."""
        return f"the {self._invented(PERSON_ENDS_M)} {self._plain(words.PRODUCTS)}"

    def ship(self) -> str:
        """Such as "the Silver Heron"."""
        return f"the {self.pair() if self.random.random() < 0.6 else self._invented(PERSON_ENDS_F)}"

    def museum(self) -> str:
        """Such as "the Halport Museum"."""
        stem = self.pair() if self.random.random() < 0.2 else self._invented(TOWN_ENDS)
        return f"the {stem} {self._plain(words.MUSEUMS)}"

    def building(self) -> str:
        """Such as "the Denwick Tower"."""
        stem = self.pair() if self.random.random() < 0.2 else self._invented(FAMILY_ENDS)
        return f"the {stem} {self._plain(words.BUILDINGS)}"

    def school(self) -> str:
        """Such as "Halport School"."""
        return f"{self._invented(TOWN_ENDS)} {self._plain(words.SCHOOLS)}"

    def book(self) -> str:
        """Such as "the book Hidden Key"."""
        return f"the book {self.pair() if self.random.random() < 0.7 else self._invented(PERSON_ENDS_F)}"

    def animal(self) -> str:
        """One first name."""
        return self.first_name(self.random.random() < 0.5)

    def plant(self) -> str:
        """Such as "the Halport lily"."""
        return f"the {self._invented(TOWN_ENDS)} {self._plain(words.PLANTS)}"

    def project(self) -> str:
        """Such as "Project Amber Tide"."""
        return f"Project {self.pair() if self.random.random() < 0.4 else self._invented(PERSON_ENDS_F)}"

    def festival(self) -> str:
        """Such as "the Halport Regatta"."""
        stem = self.pair() if self.random.random() < 0.3 else self._invented(TOWN_ENDS)
        return f"the {stem} {self._plain(words.FESTIVALS)}"

    def _plain(self, options: list[str]) -> str:
        return self.random.choice(options).replace("_", " ")
