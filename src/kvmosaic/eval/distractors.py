"""Sampling of documents for a question: the needed ones at random positions among random others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

USUAL_DOCUMENTS = 3
"""Default number of documents of a prompt."""


def draw_documents(needed: Sequence[int], total: int, count: int, seed: int, name: str) -> list[int]:
    """Numbers of `count` of `total` documents, in the order of the prompt; fewer if there are not so many.

    The result depends only on the arguments, so that a question has the same documents in every run.

    Args:
        needed: documents that are among them, each once; if they are more than `count`, the first ones.
        total: documents there are.
        count: documents of a prompt.
        seed: another seed draws other documents and positions.
        name: of the question.
    """
    chance = Random(f"{seed}:{name}")  # noqa: S311 - a draw that can be repeated, and no secret
    kept = list(dict.fromkeys(needed))[:count]
    num_others = min(count, total) - len(kept)
    others: list[int] = []
    while len(others) < num_others:
        number = chance.randrange(total)
        if number not in kept and number not in others:
            others.append(number)
    drawn = others
    for number in kept:
        drawn.insert(chance.randrange(len(drawn) + 1), number)
    return drawn
