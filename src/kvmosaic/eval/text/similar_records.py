"""Similar records: documents of one kind that differ in a few letters and digits, and questions about one or two.

A language has a file in `similar/`. Each of its kinds has the sentence of every record, sentences that make it longer
(`more`), questions about a value that name the record by another one, and for each value the alternatives of its parts.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

LANGUAGES = ("en", "de", "es", "fr", "ru", "zh")
MAX_RECORDS = 12
NUM_COMPANIONS = 3
_PLACE = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class SimilarRecords:
    """A system text, records, a question, its answers, the records that it is about, and what only others have."""

    system: str
    records: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    needs: tuple[int, ...]
    others: tuple[str, ...]
    companions: tuple[str, ...]
    """More records, about which nothing is asked."""


def similar_records(chance: Random, language: str, count: int, num_more: int, num_asked: int) -> SimilarRecords:
    """Draws `count` records with `num_more` more sentences each, and a question about `num_asked` of them."""
    texts = _texts(language)
    kind = chance.choice(texts["kind"])
    rows = _rows(chance, kind, count + NUM_COMPANIONS)
    text = ("" if language == "zh" else " ").join([kind["record"], *kind["more"][:num_more]])
    records = tuple(text.format(**row) for row in rows)
    rows = rows[:count]
    asked, question = chance.choice(list(kind["questions"].items()))
    needs = tuple(chance.sample(range(count), num_asked))
    questions = [question.format(**rows[number]) for number in needs]
    answers = tuple(rows[number][asked] for number in needs)
    others = tuple(row[asked] for number, row in enumerate(rows) if number not in needs)
    both = questions[0] if num_asked == 1 else texts["both"].format(first=questions[0], second=questions[1])
    return SimilarRecords(texts["system"], records[:count], both, answers, needs, others, records[count:])


@cache
def _texts(language: str) -> dict[str, Any]:
    path = Path(__file__).parent / "similar" / f"{language}.toml"
    texts = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind in texts["kind"]:
        for name, parts in kind["values"].items():
            kind["values"][name] = ["".join(each) for each in product(*(part.split("|") for part in parts))]
    return texts


def _rows(chance: Random, kind: dict[str, Any], count: int) -> list[dict[str, str]]:
    """The values of each record; what a question names or asks for is unique, and no part of another value."""
    asked = set(kind["questions"]) | set(_PLACE.findall(" ".join(kind["questions"].values())))
    columns = {}
    for name, alternatives in kind["values"].items():
        values = list(alternatives)
        chance.shuffle(values)
        if name in asked:
            chosen: dict[str, str] = {}
            for value in values:
                folded = value.casefold()
                if not any(folded in other or other in folded for other in chosen):
                    chosen[folded] = value
            values = list(chosen.values())
        columns[name] = [values[number % len(values)] for number in range(count)]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
