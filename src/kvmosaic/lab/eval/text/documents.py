"""Generated documents with questions whose answers are words of the documents.

Relations: what documents say about a kind of thing, how they say it and how it is asked, and the values it can have.

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
from random import Random

from kvmosaic.lab.eval.text.names import WORDS, NameSource, Split

LISTS = {name: WORDS[name] for name in WORDS["values"]}
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
            return names.thing("company")
        case "river":
            return names.river()
        case "street":
            if random.random() < 0.25:
                return f"{names.town()} {random.choice(WORDS['street_last'])}"
            return f"{random.choice(WORDS['street_first'])} {random.choice(WORDS['street_last'])}"
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
            word = random.choice(WORDS["times_in_words"])
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


UNKNOWN = "not in the documents"


@dataclass(frozen=True)
class Recipe:
    """What the generated prompts look like. The curriculum and the evaluation each use their own."""

    documents: tuple[int, int] = (1, 6)
    sentences: tuple[int, int] = (2, 6)
    questions: int = 8
    repeated: bool = False  # whether facts are asked a second time when there are too few
    same_kind: float = 0.7  # how often all documents are about the same kind of thing
    pronouns: float = 0.4  # how often a later sentence does not repeat the full name
    joined: float = 0.15  # how often two sentences become one with "and"
    fillers: float = 0.2  # how often a document has a sentence that says nothing
    echoes: float = 0.06  # how often a name is made from a stem that the prompt already has
    same_relations: bool = False  # whether all documents of one kind say the same things
    unknown: float = 0.0  # how often a question has no answer in the documents


@dataclass(frozen=True)
class Fact:
    """A relation with its value."""

    relation: Relation
    value: str


@dataclass(frozen=True)
class Entity:
    """A thing that a document is about."""

    kind: Kind
    name: str
    noun: str  # "he", "she", "it" or "the ship"
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Document:
    """A short text, with the name it is about as title or without a title."""

    title: str | None
    text: str


@dataclass(frozen=True)
class NeededWords:
    """Words of a document that an answer needs."""

    document: int
    text: str


@dataclass(frozen=True)
class Question:
    """A question and its only right answer."""

    text: str
    answer: str
    document: int  # the index of the document with the answer; -1 for none
    bridge: NeededWords | None = None  # the name that leads from the question to the document with the answer
    needs: tuple[int, ...] = ()  # the documents that must be read together, where one alone is not enough


@dataclass(frozen=True)
class Example:
    """One prompt."""

    system: str | None
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


POSSESSIVES = {"he": "his", "she": "her", "it": "its"}
OBJECTS = {"he": "him", "she": "her", "it": "it"}


def capital(text: str) -> str:
    """The text with a capital at the start."""
    return text[0].upper() + text[1:]


class TextSource:
    """Draws examples; the same seed, split and recipes give the same examples."""

    def __init__(self, seed: int, split: Split = "train") -> None:
        self.random = Random(f"{split}-{seed}")
        self.names = NameSource(self.random, split)
        self.kinds = load_kinds()

    def example(self, recipe: Recipe) -> Example:
        """The next prompt."""
        random = self.random
        self.names.start_prompt(recipe.echoes)
        count = random.randint(*recipe.documents)
        same = random.random() < recipe.same_kind
        kind = random.choice(self.kinds)
        entities: list[Entity] = []
        taken: set[str] = set()
        said = self.relations(kind, recipe) if recipe.same_relations else None
        while len(entities) < count:
            entity = (
                self.entity(kind, recipe, taken, said)
                if same
                else self.entity(random.choice(self.kinds), recipe, taken)
            )
            entities.append(entity)
            taken.add(entity.name)
        documents = tuple(self.document(entity, recipe) for entity in entities)
        return Example(self.system(), documents, self._questions(entities, recipe))

    def system(self) -> str | None:
        """A system text, or none."""
        return None if self.random.random() < 0.08 else self.random.choice(WORDS["systems"])

    def relations(self, kind: Kind, recipe: Recipe) -> list[Relation]:
        """What the documents of a prompt say about one kind of thing."""
        count = min(self.random.randint(*recipe.sentences), len(kind.relations))
        return self.random.sample(kind.relations, count)

    def entity(self, kind: Kind, recipe: Recipe, taken: set[str], said: list[Relation] | None = None) -> Entity:
        """A thing with a name that is not taken, and what there is to say about it."""
        random = self.random
        noun = random.choice(kind.nouns)
        name = ""
        while not name or name in taken:
            name = self.names.person(noun == "she") if kind.name == "person" else self.names.thing(kind.name)
        relations = said or self.relations(kind, recipe)
        facts = tuple(Fact(relation, draw_value(relation.value_kind, self.names)) for relation in relations)
        return Entity(kind, name, noun, facts)

    def document(self, entity: Entity, recipe: Recipe) -> Document:
        """A document that says everything about a thing."""
        random = self.random
        title = capital(entity.name.removeprefix("the ")) if random.random() < 0.6 else None
        pronoun_first = title is not None and random.random() < recipe.pronouns * 0.25
        sentences: list[str] = []
        starts_with_subject = False
        for index, fact in enumerate(entity.facts):
            short = random.random() < recipe.pronouns if index else pronoun_first
            template = random.choice(fact.relation.sentences)
            while not index and template.startswith("{v}"):
                template = random.choice(fact.relation.sentences)
            joined = starts_with_subject and template.startswith("{S} ") and random.random() < recipe.joined
            starts_with_subject = template.startswith("{S} ") and not joined
            if joined:
                rest = self.sentence(entity, fact, template.removeprefix("{S} "), short)
                sentences[-1] = f"{sentences[-1].removesuffix('.')} and {rest}"
            else:
                sentences.append(self.sentence(entity, fact, template, short))
        if random.random() < recipe.fillers:
            sentences.insert(random.randint(1, len(sentences)), random.choice(WORDS["fillers"]))
        return Document(title, " ".join(sentences))

    def sentence(self, entity: Entity, fact: Fact, template: str, short: bool, first_names: bool = True) -> str:
        """One sentence; a short one does not repeat the full name."""
        name, noun = entity.name, entity.noun
        possessive = f"{name}'s"
        subject = target = name
        own = POSSESSIVES.get(noun, "its")
        if short:
            is_person = noun in OBJECTS and entity.kind.name == "person"
            if is_person and first_names and self.random.random() < 0.3:
                subject = target = self.random.choice(name.split())
                possessive = f"{subject}'s"
            elif noun in OBJECTS:
                subject, target, possessive = noun, OBJECTS[noun], own
            else:
                subject = target = noun
                possessive = f"{noun}'s"
        return template.format(
            S=capital(subject),
            s=subject,
            o=target,
            P=capital(possessive),
            g=own,
            v=fact.value,
            a=with_article(fact.value),
        )

    def _questions(self, entities: list[Entity], recipe: Recipe) -> tuple[Question, ...]:
        random = self.random
        pairs = [(index, fact) for index, entity in enumerate(entities) for fact in entity.facts]
        random.shuffle(pairs)
        if recipe.repeated:
            pairs += pairs
        questions = [self._question(entities, index, fact, recipe) for index, fact in pairs[: recipe.questions]]
        return tuple(questions)

    def _question(self, entities: list[Entity], index: int, fact: Fact, recipe: Recipe) -> Question:
        entity = entities[index]
        if self.random.random() < recipe.unknown:
            return self._unknown(entities, entity, recipe)
        return Question(self.ask(entity, fact.relation), fact.value, index)

    def ask(self, entity: Entity, relation: Relation, name: str = "") -> str:
        """A question for a relation of a thing, which is called by its own name or by another."""
        name = name or entity.name
        own = POSSESSIVES.get(entity.noun, "its")
        return capital(self.random.choice(relation.questions).format(n=name, p=f"{name}'s", g=own))

    def _unknown(self, entities: list[Entity], entity: Entity, recipe: Recipe) -> Question:
        """A question about something the documents do not say, or about something they do not name."""
        if self.random.random() < 0.5:
            entity = self.entity(entity.kind, recipe, {other.name for other in entities})
            return Question(self.ask(entity, entity.facts[0].relation), UNKNOWN, -1)
        said = {fact.relation.value_kind for fact in entity.facts}
        unsaid = [relation for relation in entity.kind.relations if relation.value_kind not in said]
        relation = self.random.choice(unsaid) if unsaid else None
        if relation is None:
            fact = self.random.choice(entity.facts)
            return Question(self.ask(entity, fact.relation), fact.value, entities.index(entity))
        return Question(self.ask(entity, relation), UNKNOWN, -1)
