"""Prompts whose questions need two documents: one names a thing, the other describes it.

document 1   The Silver Heron sails under Marla Denwick. ... document 2   Marla Denwick lives in Tolbury. ... question
Where does the captain of the Silver Heron live?       Tolbury
"""

from dataclasses import dataclass

from kvmosaic.eval.text.documents import Document, Entity, Example, Fact, NeededWords, Question, Recipe, TextSource
from kvmosaic.eval.text.relations import Kind, Relation
from kvmosaic.eval.text.values import draw_value

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
