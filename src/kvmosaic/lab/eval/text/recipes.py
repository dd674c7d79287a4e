"""Prompts whose questions need more than one document: chains of two, contradictions, and stories in pieces.

document 1   The Silver Heron sails under Marla Denwick. ...
document 2   Marla Denwick lives in Tolbury. ...
question     Where does the captain of the Silver Heron live?                Tolbury

document 1   The Silver Heron carries tea.
document 2   The Silver Heron carries salt.
question     In the last document, what does the Silver Heron carry?        salt

document 1   Marla Denwick works as a baker.
document 2   She lives in Tolbury. She plays the violin.
question     Where does Marla Denwick live?                         Tolbury

Similar records are documents of one kind that differ in a few letters and digits. A language has a file in `similar/`:
each of its kinds has the sentence of every record, sentences that make it longer (`more`), questions about a value that
name the record by another one, and for each value the alternatives of its parts.
"""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from kvmosaic.lab.eval.text.documents import (
    Document,
    Entity,
    Example,
    Fact,
    Kind,
    NeededWords,
    Question,
    Recipe,
    Relation,
    TextSource,
    capital,
    draw_value,
)

TARGETS = ("person", "company", "town")


@dataclass(frozen=True)
class Chain:
    """A thing, and the thing that one of its facts names."""

    first: Entity
    link: Relation
    second: Entity


@dataclass(frozen=True)
class ChainRecipe:
    """What prompts of two hops look like."""

    chains: tuple[int, int] = (2, 3)
    sentences: tuple[int, int] = (1, 3)
    extra: float = 0.5  # how often the first thing of a chain has a fact besides the link
    same_relations: float = 0.6  # how often all chains say the same things, so that only the names lead to the answer
    questions: int = 16
    one_hop: float = 0.4  # share of questions that one document answers


def chain_example(source: TextSource, recipe: ChainRecipe) -> Example:
    """The next prompt of two hops."""
    random = source.random
    source.names.start_prompt(0.03)
    kinds = {kind.name: kind for kind in source.kinds}
    kind, link = _draw_link(source)
    target = kinds[link.value_kind]
    said = _draw_relations(source, target, recipe) if random.random() < recipe.same_relations else None
    chains: list[Chain] = []
    taken: set[str] = set()
    for _ in range(random.randint(*recipe.chains)):
        if said is None and random.random() < 0.5:
            kind, link = _draw_link(source)
            target = kinds[link.value_kind]
        second = source.entity(target, Recipe(), taken, said or _draw_relations(source, target, recipe))
        taken.add(second.name)
        first = source.entity(kind, Recipe(), taken, [link])
        taken.add(first.name)
        facts = [Fact(link, second.name)]
        if random.random() < recipe.extra:
            other = random.choice([relation for relation in kind.relations if relation != link])
            facts.insert(random.randint(0, 1), Fact(other, draw_value(other.value_kind, source.names)))
        chains.append(Chain(Entity(kind, first.name, first.noun, tuple(facts)), link, second))
    entities = [entity for chain in chains for entity in (chain.first, chain.second)]
    random.shuffle(entities)
    look = Recipe(pronouns=0.3, joined=0.1, fillers=0.1)
    documents: tuple[Document, ...] = tuple(source.document(entity, look) for entity in entities)
    return Example(source.system(), documents, _questions(source, recipe, chains, entities))


def _draw_link(source: TextSource) -> tuple[Kind, Relation]:
    links = [
        (kind, relation)
        for kind in source.kinds
        for relation in kind.relations
        if relation.description and relation.value_kind in TARGETS
    ]
    return source.random.choice(links)


def _draw_relations(source: TextSource, kind: Kind, recipe: ChainRecipe) -> list[Relation]:
    count = min(source.random.randint(*recipe.sentences), len(kind.relations))
    return source.random.sample(kind.relations, count)


def _questions(
    source: TextSource, recipe: ChainRecipe, chains: list[Chain], entities: list[Entity]
) -> tuple[Question, ...]:
    random = source.random
    two: list[Question] = []
    one: list[Question] = []
    for chain in chains:
        start, end = entities.index(chain.first), entities.index(chain.second)
        called = chain.link.description.format(n=chain.first.name)
        for fact in chain.second.facts:
            text = source.ask(chain.second, fact.relation, called)
            two.append(Question(text, fact.value, end, NeededWords(start, chain.second.name), (start, end)))
            one.append(Question(source.ask(chain.second, fact.relation), fact.value, end))
        one += [Question(source.ask(chain.first, fact.relation), fact.value, start) for fact in chain.first.facts]
    drawn: list[Question] = []
    while len(drawn) < recipe.questions:
        for part, share in ((one, recipe.one_hop), (two, 1 - recipe.one_hop)):
            drawn += random.sample(part, min(len(part), round(recipe.questions * share)))
        if len(drawn) < recipe.questions and len(drawn) >= len(one) + len(two):
            drawn += drawn
    drawn = drawn[: recipe.questions]
    random.shuffle(drawn)
    return tuple(drawn)


FIRST = ("In the first document,", "According to the first document,", "Before all else,")
LAST = ("In the last document,", "According to the last document,", "In the end,")


@dataclass(frozen=True)
class OrderRecipe:
    """What prompts of ordered documents look like."""

    documents: tuple[int, int] = (2, 3)
    sentences: tuple[int, int] = (1, 3)
    questions: int = 16


def order_example(source: TextSource, recipe: OrderRecipe) -> Example:
    """The next prompt of documents about one thing."""
    random = source.random
    source.names.start_prompt(0.0)
    kind = random.choice(source.kinds)
    look = Recipe(sentences=recipe.sentences, pronouns=0.3, joined=0.1, fillers=0.1)
    entity = source.entity(kind, look, set())
    count = random.randint(*recipe.documents)
    columns = [_values(source, fact.relation.value_kind, count) for fact in entity.facts]
    versions = [
        replace(
            entity,
            facts=tuple(Fact(fact.relation, column[i]) for fact, column in zip(entity.facts, columns, strict=True)),
        )
        for i in range(count)
    ]
    questions: list[Question] = []
    for index, openings in ((0, FIRST), (count - 1, LAST)):
        for fact in versions[index].facts:
            asked = source.ask(entity, fact.relation)
            text = f"{random.choice(openings)} {asked[0].lower()}{asked[1:]}"
            questions.append(Question(text, fact.value, index, needs=tuple(range(count))))
    random.shuffle(questions)
    documents = tuple(source.document(version, look) for version in versions)
    return Example(source.system(), documents, tuple((questions * recipe.questions)[: recipe.questions]))


def _values(source: TextSource, kind: str, count: int) -> list[str]:
    """Different values of one kind."""
    values: list[str] = []
    while len(values) < count:
        value = draw_value(kind, source.names)
        if value not in values:
            values.append(value)
    return values


@dataclass(frozen=True)
class StoryRecipe:
    """What prompts of stories look like."""

    stories: tuple[int, int] = (1, 3)
    facts: tuple[int, int] = (3, 6)
    pieces: tuple[int, int] = (2, 3)
    same_kind: float = 0.7
    same_relations: float = 0.5  # how often the stories of one kind say the same things
    titles: float = 0.3  # how often the first piece has the name as title
    questions: int = 16


NAMED = Recipe(pronouns=0.0, joined=0.0, fillers=0.0)


def story_example(source: TextSource, recipe: StoryRecipe) -> Example:
    """The next prompt of stories, whose pieces are in order."""
    random = source.random
    source.names.start_prompt(0.03)
    kind = random.choice(source.kinds)
    same_kind, same = random.random() < recipe.same_kind, random.random() < recipe.same_relations
    look = replace(NAMED, sentences=recipe.facts)
    said = source.relations(kind, look)
    documents: list[Document] = []
    questions: list[Question] = []
    taken: set[str] = set()
    for _ in range(random.randint(*recipe.stories)):
        if not same_kind:
            kind = random.choice(source.kinds)
        entity = source.entity(kind, look, taken, said if same and same_kind else source.relations(kind, look))
        taken.add(entity.name)
        pieces = _cut(list(entity.facts), random.randint(*recipe.pieces), source)
        first = len(documents)
        for number, facts in enumerate(pieces):
            documents.append(_piece(source, entity, facts, number, recipe))
            questions += [
                Question(
                    source.ask(entity, fact.relation),
                    fact.value,
                    first + number,
                    needs=tuple(range(first, first + number + 1)) if number else (),
                )
                for fact in facts
            ]
    random.shuffle(questions)
    return Example(source.system(), tuple(documents), tuple((questions * 3)[: recipe.questions]))


def _cut(facts: list[Fact], count: int, source: TextSource) -> list[list[Fact]]:
    count = min(count, len(facts))
    cuts = sorted(source.random.sample(range(1, len(facts)), count - 1))
    return [facts[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(facts)], strict=True)]


def _piece(source: TextSource, entity: Entity, facts: list[Fact], number: int, recipe: StoryRecipe) -> Document:
    random = source.random
    if number == 0:
        named = source.document(replace(entity, facts=tuple(facts[:1])), NAMED).text
        rest = [_short(source, entity, fact) for fact in facts[1:]]
        title = capital(entity.name.removeprefix("the ")) if random.random() < recipe.titles else None
        return Document(title, " ".join([named, *rest]))
    return Document(None, " ".join(_short(source, entity, fact) for fact in facts))


def _short(source: TextSource, entity: Entity, fact: Fact) -> str:
    """A sentence that calls the thing "she" or "the ship"."""
    template = source.random.choice(fact.relation.sentences)
    return source.sentence(entity, fact, template, short=True, first_names=False)


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
