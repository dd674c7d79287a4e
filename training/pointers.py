"""Position of each word of an answer in its document, and a loss that makes one head attend to it.

Left to itself the reader never learned to use attention above its second layer. This loss asks two query heads of one
layer, at the place before each answer token, to attend to the place that the token is copied from; how the heads use
it is learned from the answers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LAYER = 4
HOP_LAYER = 3  # the layer below finds the name that leads to the answer
HEADS = 2  # the query heads of the layer's first key head
PER_ROW = 48  # room for pointers in a row of a batch
WEIGHT = 0.3  # of the loss beside that of the answers


@dataclass(frozen=True)
class Pointers:
    """N places in question blocks and the context tokens to look at; weight zero marks unused room."""

    places: Tensor  # [N] flat indexes of the tokens before the answer tokens
    columns: Tensor  # [N] index of the context token in its row
    weights: Tensor  # [N]


def find_source(document: list[int], answer: list[int], first: int) -> list[int]:
    """For each answer token the row index it is copied from, or -1; the document starts at `first`.

    An answer that occurs twice, or not as the same tokens, has no source. Only the first token may differ,
    as it is at the start of a text, where it has no space before it.
    """
    for skip in (0, 1):
        part = answer[skip:]
        if not part:
            break
        places = [i for i in range(len(document) - len(part) + 1) if document[i : i + len(part)] == part]
        if len(places) == 1:
            start = places[0] - skip
            return [first + start + i if start + i >= 0 else -1 for i in range(len(answer))]
    return [-1] * len(answer)


def make_pointers(pointed: list[tuple[int, int, float]], rows: int, unused: int) -> Pointers:
    """Pointers of fixed number from (place, column, weight); `unused` is a place that exists in every batch."""
    room = rows * PER_ROW
    pointed = pointed[:room]
    padded = pointed + [(unused, 0, 0.0)] * (room - len(pointed))
    return Pointers(
        torch.tensor([place for place, _, _ in padded]),
        torch.tensor([column for _, column, _ in padded]),
        torch.tensor([weight for _, _, weight in padded]),
    )


def pointer_loss(weights: Tensor, pointers: Pointers, length: int) -> Tensor:
    """Mean negative log weight of the right place, from log attention weights [B, heads, questions, length]."""
    row = pointers.places // length
    place = pointers.places % length - (length - weights.shape[2])
    picked = weights[row, :, place, pointers.columns].mean(1)
    return -(picked * pointers.weights).sum() / pointers.weights.sum().clamp_min(1)
