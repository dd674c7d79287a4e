"""What is trained when: the recipes of the text, the ways of reading and the share of copying exercises."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from kvmosaic.lab.eval.text.documents import Example, Recipe, TextSource
from kvmosaic.lab.eval.text.recipes import (
    ChainRecipe,
    OrderRecipe,
    StoryRecipe,
    chain_example,
    order_example,
    story_example,
)
from training.batches import Reading, Row, Writer
from training.layout import Strategy, place
from training.tokenizer import SPECIAL, VOCABULARY

QUESTION_TOKENS = 224


@dataclass(frozen=True)
class Stage:
    """What is trained from a step on. Shares are of all prompts; what is left is drawn from `recipe`."""

    start: int  # the first step
    recipe: Recipe
    drill: float = 0.0  # only the names tell the documents apart
    pronoun_drill: float = 0.0  # the same with pronouns
    chains: float = 0.0  # questions over two hops
    stories: float = 0.0  # documents that begin in the middle of a story
    orders: float = 0.0  # documents that contradict each other
    needles: float = 0.0  # many short documents
    cuts: float = 0.0  # one long text, cut after every so many tokens
    copying: float = 0.0  # random tokens to be copied
    gaps: float = 0.0  # share of prompts with extra distances
    edges: float = 0.1  # share of prompts with white space at the edges of segments
    turns: float = 0.0  # share of prompts with questions after other questions


PLAIN = Recipe(sentences=(1, 3), questions=16, repeated=True, pronouns=0, joined=0, fillers=0)
FULL = Recipe(sentences=(1, 5), questions=16, repeated=True)
DRILL = replace(PLAIN, documents=(3, 6), sentences=(1, 2), same_kind=1.0, same_relations=True)
PRONOUN_DRILL = replace(DRILL, documents=(2, 5), sentences=(2, 3), pronouns=0.6, joined=0.2)
NEEDLES = replace(FULL, documents=(8, 14), sentences=(1, 2), same_kind=0.5)
CUT_LENGTHS = (24, 32, 48, 64)
ALL_TASKS = Stage(
    0,
    replace(FULL, documents=(1, 8), sentences=(2, 6)),
    drill=0.04,
    pronoun_drill=0.05,
    chains=0.45,
    stories=0.12,
    orders=0.14,
    needles=0.05,
    cuts=0.05,
    gaps=0.05,
    edges=0.15,
    turns=0.03,
)
STAGES: dict[str, tuple[Stage, ...]] = {
    # from nothing, in ordinary causal order only
    "causal": (
        Stage(0, replace(PLAIN, documents=(1, 2), same_kind=0.3), copying=0.25),
        Stage(200, replace(PLAIN, documents=(1, 3)), drill=0.3, copying=0.1),
        Stage(700, replace(FULL, documents=(1, 5), pronouns=0.1), drill=0.4, chains=0.1, stories=0.05, copying=0.03),
        Stage(1200, replace(FULL, documents=(1, 5), pronouns=0.2), drill=0.25, chains=0.25, stories=0.15, orders=0.05),
        replace(ALL_TASKS, start=1500),
    ),
    # from a reader that has learned to look up, in all three ways of reading, or in causal order only
    "reader": (ALL_TASKS,),
    "converted": (ALL_TASKS,),
}


def stage_at(step: int, stages: tuple[Stage, ...]) -> Stage:
    """The last stage that has started."""
    return [stage for stage in stages if stage.start <= step][-1]


def draw_row(random: Random, source: TextSource, writer: Writer, stage: Stage, ways: tuple[Strategy, ...]) -> Row:
    """The next prompt as a row."""
    shares = {
        "copying": stage.copying,
        "drill": stage.drill,
        "pronoun_drill": stage.pronoun_drill,
        "chains": stage.chains,
        "stories": stage.stories,
        "orders": stage.orders,
        "needles": stage.needles,
        "cuts": stage.cuts,
    }
    [task] = random.choices([*shares, "plain"], [*shares.values(), 1 - sum(shares.values())])
    if task in ("stories", "orders", "cuts"):  # at shared positions, nothing tells which document came first
        ways = tuple(way for way in ways if way != "shared")
    reading = draw_reading(random, stage, ways)
    if task == "copying":
        return copying_row(random, reading)
    if task == "cuts":
        reading = replace(reading, cut=random.choice(CUT_LENGTHS), gap=0)
    examples: dict[str, Callable[[], Example]] = {
        "drill": lambda: source.example(DRILL),
        "pronoun_drill": lambda: source.example(PRONOUN_DRILL),
        "chains": lambda: chain_example(source, ChainRecipe()),
        "stories": lambda: story_example(source, StoryRecipe()),
        "orders": lambda: order_example(source, OrderRecipe()),
        "needles": lambda: source.example(NEEDLES),
    }
    example = examples.get(task, lambda: source.example(stage.recipe))()
    return writer.row(example, reading, QUESTION_TOKENS)


def draw_reading(random: Random, stage: Stage, ways: tuple[Strategy, ...]) -> Reading:
    """Draws the strategy, whether documents see the system text, chat or raw form, and what else the stage mixes in."""
    strategy = random.choice(ways)
    return Reading(
        strategy,
        sees_system=strategy == "causal" or random.random() > 0.15,
        chat=random.random() > 0.35,
        edges=random.random() < stage.edges,
        gap=1500 if random.random() < stage.gaps else 0,
        turns=random.random() < stage.turns,
    )


def copying_row(random: Random, reading: Reading) -> Row:
    """Documents of random tokens; each "question" starts a run of eight tokens that has to be completed."""

    def draw(count: int) -> list[int]:
        return [random.randrange(len(SPECIAL), VOCABULARY) for _ in range(count)]

    documents = [draw(random.randint(16, 40)) for _ in range(random.randint(1, 2))]
    blocks: list[tuple[list[int], int]] = []
    for _ in range(8):
        document = random.choice(documents)
        start = random.randint(0, len(document) - 10)
        blocks.append((document[start : start + 10], 2))
    system = draw(3)
    positions = place(3, [len(one) for one in documents], reading.strategy, reading.sees_system)
    context = [system, *documents]
    segments = [index for index, segment in enumerate(context) for _ in segment]
    flat = [token for segment in context for token in segment]
    return Row(
        flat,
        positions.local,
        positions.moved,
        segments,
        blocks,
        positions.question,
        reading,
        [],
        [],
        [],
        learn_text=False,
    )
