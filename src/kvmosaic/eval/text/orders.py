"""Prompts whose documents contradict each other, so that the answer depends on their order.

document 1   The Silver Heron carries tea.
document 2   The Silver Heron carries salt.
question     In the last document, what does the Silver Heron carry?        salt
"""

from dataclasses import dataclass, replace

from kvmosaic.eval.text.documents import Example, Fact, Question, Recipe, TextSource
from kvmosaic.eval.text.values import draw_value

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
