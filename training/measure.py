"""Exact-match accuracy on held-out names, read by the training model."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvmosaic.lab.eval.text.documents import Example, TextSource
from training.batches import SHAPES, Reading, Row, Shape, Writer, collate
from training.model import Batch
from training.tokenizer import PAD, token_id


@dataclass
class Score:
    """How many questions were asked and answered right, and what the wrong answers were."""

    asked: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / max(1, self.asked)


def measure(
    answers: Callable[[Batch], Tensor],
    tokenizer: Tokenizer,
    draw: Callable[[TextSource], Example],
    reading: Reading,
    questions: int,
    seed: int = 1,
    shapes: tuple[Shape, ...] = SHAPES,
) -> Score:
    """Asks at least `questions` questions about held-out names.

    An answer counts when the most likely token is the right one at every place of the answer and its end, each time
    after the right tokens before it. That is the same as greedy decoding giving exactly the right answer.
    """
    source = TextSource(seed, "held_out")
    writer = Writer(tokenizer, Random(seed))
    waiting: dict[Shape, list[tuple[Example, Row]]] = defaultdict(list)
    score = Score()
    while score.asked < questions:
        example = draw(source)
        row = writer.row(example, reading, min(shape.questions for shape in shapes))
        fitting = [shape for shape in shapes if len(row.tokens) <= shape.context]
        if not fitting:
            continue
        waiting[fitting[0]].append((example, row))
        if len(waiting[fitting[0]]) == fitting[0].rows:
            _count(answers, tokenizer, waiting.pop(fitting[0]), fitting[0], score)
    return score


def _count(
    answers: Callable[[Batch], Tensor],
    tokenizer: Tokenizer,
    items: list[tuple[Example, Row]],
    shape: Shape,
    score: Score,
) -> None:
    batch, spans = collate([row for _, row in items], shape, Random(0), token_id(tokenizer, PAD), 0.0)
    with torch.no_grad():
        given = answers(batch)
    asked = [(example, index) for example, row in items for index in row.asked]
    for (_, first, count), (example, index) in zip(spans, asked, strict=True):
        score.asked += 1
        if torch.equal(given[first : first + count], batch.targets[first : first + count]):
            score.right += 1
        else:
            question = example.questions[index]
            said = tokenizer.decode(given[first : first + count].tolist(), skip_special_tokens=False)
            score.wrong.append(f"{question.text} expected {question.answer!r}, got {said!r}")


def score_example(
    answers: Callable[[Batch], Tensor], tokenizer: Tokenizer, example: Example, reading: Reading
) -> Score:
    """Asks all questions of one example, of any length."""
    row = Writer(tokenizer, Random(0)).row(example, reading, 10_000)
    shape = Shape(1, len(row.tokens), sum(len(block) for block, _ in row.blocks))
    score = Score()
    _count(answers, tokenizer, [(example, row)], shape, score)
    return score
