"""A layout as one dense mask, for tests and inspection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmosaic.layout.span import Layout, Visibility

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """What every token of a prompt sees, T tokens in prompt order.

    token_ids: [T]
    positions: [T], the position of each token when it is computed
    mask: [T, T], True where the row token sees the column token
    distances: [T, T], how far the column's key is moved for the row; 0 where the mask is False
    factors, biases: [T, T], what the row's scores of that key are multiplied by, and then increased by
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    distances: NDArray[np.int64]
    factors: NDArray[np.float64]
    biases: NDArray[np.float64]

    @property
    def question_positions(self) -> NDArray[np.int64]:
        """[T], the position of each token as seen by the last token."""
        positions: NDArray[np.int64] = self.positions + self.distances[-1]
        return positions

    @property
    def is_one_forward(self) -> bool:
        """Whether one dense forward with `question_positions` and `mask` is equivalent: all distances agree."""
        relative = self.question_positions[None, :] - self.question_positions[:, None]
        computed = self.positions[None, :] + self.distances - self.positions[:, None]
        return bool(((relative == computed) | ~self.mask).all())


def dense(layout: Layout) -> DenseLayout:
    """Expands a layout to positions, a boolean mask and distances (numpy, no torch).

    Repaired tokens are separate tokens, between chunks and question.
    """
    import numpy as np  # deferred: everything imports layouts, and a command line should start fast

    offsets = np.cumsum([0] + [span.num_tokens for span in layout.spans])
    num_tokens = int(offsets[-1])
    mask = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
    distances = np.zeros((num_tokens, num_tokens), dtype=np.int64)
    factors, biases = np.ones((num_tokens, num_tokens)), np.zeros((num_tokens, num_tokens))
    positions = np.zeros(num_tokens, dtype=np.int64)
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    for index, span in enumerate(layout.spans):
        rows = slice(offsets[index], offsets[index + 1])
        positions[rows] = span.positions or span.start + np.arange(span.num_tokens)
        token_ids[rows] = span.token_ids
        mask[rows, rows] = np.tri(span.num_tokens, dtype=np.bool_)
        for view in span.views:
            columns = slice(offsets[view.span], offsets[view.span + 1])
            numbers = np.arange(layout.spans[view.span].num_tokens)
            seen = view.visibility or Visibility()
            shown = np.isin(numbers, seen.hidden, invert=True)[None, :]
            if seen.ends:
                shown = shown & (numbers[None, :] < np.array(seen.ends)[:, None])
            mask[rows, columns] |= shown
            distances[rows, columns] = np.where(shown, view.distance, distances[rows, columns])
            factors[rows, columns], biases[rows, columns] = seen.weight.factor, seen.weight.bias
    return DenseLayout(token_ids, positions, mask, distances, factors, biases)
