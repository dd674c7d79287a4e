"""What is trained when: the recipes of the text, the ways of reading and the share of copying exercises."""

from dataclasses import dataclass, replace
from random import Random

from training.batches import Reading, Row
from training.layout import STRATEGIES, place
from training.text import Recipe
from training.tokenizer import SPECIAL, VOCABULARY


@dataclass(frozen=True)
class Stage:
    """What is trained from a step on."""

    start: int  # the first step
    recipe: Recipe
    drill: float = 0.0  # share of prompts in which only the names tell the documents apart
    pronoun_drill: float = 0.0  # the same with pronouns
    copying: float = 0.0  # share of prompts that are random tokens to be copied
    gaps: float = 0.0  # share of prompts with extra distances
    edges: float = 0.1  # share of prompts with white space at the edges of segments
    turns: float = 0.0  # share of prompts with questions after other questions
    causal: int = 1  # how many times as often as each other way of reading a prompt is read causally


PLAIN = Recipe(sentences=(1, 3), questions=16, repeated=True, pronouns=0, joined=0, fillers=0)
FULL = Recipe(sentences=(1, 5), questions=16, repeated=True)
DRILL = replace(PLAIN, documents=(3, 6), sentences=(1, 2), same_kind=1.0, same_relations=True)
PRONOUN_DRILL = replace(DRILL, documents=(2, 5), sentences=(2, 3), pronouns=0.6, joined=0.2)
STAGES = (
    Stage(0, replace(PLAIN, documents=(1, 2), same_kind=0.3), copying=0.25),
    Stage(300, replace(PLAIN, documents=(1, 3)), copying=0.1),
    Stage(
        1200, replace(FULL, documents=(1, 5), sentences=(1, 4), pronouns=0.1, joined=0.05, fillers=0.1), copying=0.03
    ),
    Stage(1800, replace(FULL, documents=(1, 5), pronouns=0.2), gaps=0.05),
    Stage(2400, replace(FULL, documents=(1, 5), pronouns=0.2), drill=0.5, gaps=0.05),
    Stage(2600, replace(FULL, documents=(1, 6), pronouns=0.35), drill=0.4, gaps=0.1),
    Stage(
        4600,
        replace(FULL, documents=(1, 8), sentences=(2, 6)),
        drill=0.2,
        pronoun_drill=0.2,
        gaps=0.1,
        edges=0.2,
        turns=0.07,
        causal=2,
    ),
)


def stage_at(step: int, stages: tuple[Stage, ...] = STAGES) -> Stage:
    """The last stage that has started."""
    return [stage for stage in stages if stage.start <= step][-1]


def draw_recipe(random: Random, stage: Stage) -> Recipe:
    """The recipe of the next prompt."""
    drawn = random.random()
    if drawn < stage.drill:
        return DRILL
    return PRONOUN_DRILL if drawn < stage.drill + stage.pronoun_drill else stage.recipe


def draw_reading(random: Random, stage: Stage) -> Reading:
    """Draws the strategy, whether documents see the system text, chat or raw form, and what else the stage mixes in."""
    strategy = random.choices(STRATEGIES, [stage.causal if one == "causal" else 1 for one in STRATEGIES])[0]
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
        flat, positions.local, positions.moved, segments, blocks, positions.question, reading, [], [], learn_text=False
    )
