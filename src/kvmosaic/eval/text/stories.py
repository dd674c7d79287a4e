"""Prompts whose documents are pieces of stories: only the first piece of a story has the name.

document 1   Marla Denwick works as a baker.
document 2   She lives in Tolbury. She plays the violin.
question     Where does Marla Denwick live?                         Tolbury
"""

from dataclasses import dataclass, replace

from kvmosaic.eval.text.documents import Document, Entity, Example, Fact, Question, Recipe, TextSource, capital


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
