"""Relations: what documents say about a kind of thing, how they say it and how it is asked.

The files in `relations/` hold one block per kind of thing and one paragraph per relation:

    kind ship                 the kind; NameSource has a method of this name
    noun it the_ship          what later sentences call it ("he she" for people)
    @ cargo = goods           a relation and the kind of its value (values.py)
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
