"""Relations: what documents say about a kind of thing, how they say it and how it is asked, and the values it can have.

The files in `relations/` hold one block per kind of thing and one paragraph per relation:

    kind ship                 the kind; NameSource has a method of this name
    noun it the_ship          what later sentences call it ("he she" for people)
    @ cargo = goods           a relation and the kind of its value
    + {S} carries {v}.        a way to say it
    ? What does {n} carry?    a way to ask for it
    = the captain of {n}      what the value is called without its name

In sentences {S} is the name at the start of the sentence, {s} inside it, {o} as object, {P} "its" at the start, {g}
"his" or "her", {v} the value and {a} the value with an article. In questions {n} is the full name and {p} its
possessive.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from kvmosaic.eval.text import words
from kvmosaic.eval.text.names import NameSource

LISTS: dict[str, list[str]] = {
    "job": words.JOBS,
    "food": words.FOODS,
    "drink": words.DRINKS,
    "hobby": words.HOBBIES,
    "animal": words.ANIMALS,
    "instrument": words.INSTRUMENTS,
    "colour": words.COLOURS,
    "language": words.LANGUAGES,
    "weekday": words.WEEKDAYS,
    "month": words.MONTHS,
    "goods": words.GOODS,
    "cargo": words.CARGO,
    "sight": words.SIGHTS,
    "place": words.PLACES,
    "fuel": words.FUELS,
    "material": words.MATERIALS,
    "use": words.USES,
    "subject": words.SUBJECTS,
    "treasure": words.TREASURES,
    "fear": words.FEARS,
}
# Kinds of value that are sometimes replaced by a word that does not exist, so that only copying can be right.
OPEN_KINDS = {"job", "food", "drink", "hobby", "animal", "instrument", "goods", "cargo", "sight", "place", "subject"}
CURRENCIES = ["crowns", "coins", "dollars", "euros", "pounds", "francs", "marks"]


def draw_value(kind: str, names: NameSource) -> str:
    """One value of a kind, as written in the document and in the answer."""
    random = names.random
    if kind in LISTS:
        if kind in OPEN_KINDS and random.random() < 0.15:
            return names.word()
        return random.choice(LISTS[kind]).replace("_", " ")
    match kind:
        case "town":
            return names.town()
        case "person":
            return names.person()
        case "company":
            return names.company()
        case "river":
            return names.river()
        case "street":
            if random.random() < 0.25:
                return f"{names.town()} {random.choice(words.STREET_LAST)}"
            return f"{random.choice(words.STREET_FIRST)} {random.choice(words.STREET_LAST)}"
        case "year":
            return str(random.randint(1400, 1800) if random.random() < 0.2 else random.randint(1801, 2024))
        case "number":
            return str(random.randint(10, 999))
        case "count":
            return str(random.choice([random.randint(3, 99), random.randint(100, 999), random.randint(1000, 9999)]))
        case "price":
            return f"{random.choice([random.randint(2, 20), random.randint(20, 999)])} {random.choice(CURRENCIES)}"
        case "metres":
            return f"{random.randint(2, 140)} metres"
        case "weight":
            return f"{random.randint(2, 900)} {random.choice(['kilograms', 'grams', 'tons', 'pounds'])}"
        case "years":
            return f"{random.randint(2, 30)} {random.choice(['years', 'years', 'months', 'weeks'])}"
        case "time":
            word = random.choice(words.TIMES_IN_WORDS)
            return random.choice([f"{word} o'clock", f"half past {word}", f"{random.randint(5, 12)} am"])
        case _:
            raise ValueError(f"unknown kind of value {kind!r}; known lists: {sorted(LISTS)}")


def with_article(value: str) -> str:
    """The value with "a" or "an" in front."""
    return f"{'an' if value[0].lower() in 'aeiou' else 'a'} {value}"


FOLDER = Path(__file__).parent / "relations"


@dataclass(frozen=True)
class Relation:
    """Something that documents say about a thing, with ways to say it and to ask for it."""

    name: str
    value_kind: str
    sentences: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    description: str = ""  # what the value is called without its name; only for people, companies, towns


@dataclass(frozen=True)
class Kind:
    """A kind of thing and its relations."""

    name: str
    nouns: list[str]
    relations: list[Relation] = field(default_factory=list)


def parse_relations(text: str) -> list[Kind]:
    """Reads the blocks of one relations file."""
    kinds: list[Kind] = []
    nouns: list[str] = []
    name = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark, _, rest = line.partition(" ")
        if not line or mark == "#":
            continue
        if mark == "kind":
            name = rest
        elif mark == "noun":
            nouns = [noun.replace("_", " ") for noun in rest.split()]
            kinds.append(Kind(name, nouns))
        elif mark == "@":
            relation, _, value_kind = rest.partition(" = ")
            kinds[-1].relations.append(Relation(relation, value_kind))
        elif mark == "+":
            kinds[-1].relations[-1].sentences.append(rest)
        elif mark == "?":
            kinds[-1].relations[-1].questions.append(rest)
        elif mark == "=":
            kinds[-1].relations[-1] = replace(kinds[-1].relations[-1], description=rest)
        else:
            raise ValueError(f"line {number} starts with {mark!r}; expected kind, noun, @, +, ?, = or #")
    return kinds


@cache
def load_kinds() -> tuple[Kind, ...]:
    """All kinds of things, in a fixed order."""
    return tuple(kind for path in sorted(FOLDER.glob("*.txt")) for kind in parse_relations(path.read_text("utf-8")))
