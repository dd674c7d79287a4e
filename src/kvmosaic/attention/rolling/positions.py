"""Positions of a rolling KV cache: within the model's trained range, and in its slots. Whole numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig


def sink_distance(num_tokens: int, sink_size: int, window_size: int) -> int:
    """How far the sinks are moved to be right before the window (StreamingLLM positions).

        stream     0 1 2 3 | evicted: 4 … 103 | 104 … 1127    keys keep the rotation of these positions
        seen at    0 1 2 3 |                    4 … 1027      within the trained range

    The window and the query after it are equally far apart in both. Only the sinks are moved closer, by the number of
    evicted tokens. That is the `distance` of a `Piece`: the query is rotated back by it, no key is rotated. A
    token at stream position p is at p - distance in the model's window.

    Args:
        num_tokens: tokens of the stream so far, including the newest chunk.
        sink_size: first tokens, which are never evicted.
        window_size: newest tokens, which stay.

    Raises:
        InvalidConfig: a negative number.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al., 2023.
    """
    if min(num_tokens, sink_size, window_size) < 0:
        raise InvalidConfig(
            f"{num_tokens} tokens with {sink_size} sinks and a window of {window_size}: none of them may be negative"
        )
    return max(0, num_tokens - sink_size - window_size)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a chunk with consecutive slots in the cache."""

    source: int
    """The first of them in the chunk."""
    target: int
    """Its slot in the cache."""
    length: int


@dataclass(frozen=True, slots=True)
class WindowShift:
    """Tokens of the window, `start` to `stop`: the first `by` are evicted, the others move left by as much."""

    start: int
    stop: int
    by: int

    @property
    def num_moved(self) -> int:
        """Tokens that move."""
        return self.stop - self.start - self.by


@dataclass(frozen=True, slots=True)
class Places:
    """Slots of the chunks of one stream; chunk i is the tokens i * chunk_size … (i + 1) * chunk_size - 1.

        tokens   0 … sink_size - 1 | evicted | the newest window_size
        cache       [ sink         |        window ]

    Slots depend on the number of a chunk only, so writing it again goes to the same slots.
    """

    sink_size: int
    window_size: int
    chunk_size: int

    @property
    def total_size(self) -> int:
        """Tokens in a full cache."""
        return self.sink_size + self.window_size

    @property
    def num_kept(self) -> int:
        """Tokens of a chunk after the sinks that fit into the window: its newest."""
        return min(self.chunk_size, self.window_size)

    def num_tokens(self, index: int) -> int:
        """Tokens of the stream up to and including chunk `index`; 0 for -1."""
        return (index + 1) * self.chunk_size

    def size(self, index: int) -> int:
        """Tokens in the cache when chunk `index` is the newest."""
        return min(self.num_tokens(index), self.total_size)

    def is_full_before(self, index: int) -> bool:
        """Whether the cache is full before chunk `index` is written."""
        return self.num_tokens(index - 1) >= self.total_size

    def is_behind_sinks(self, index: int) -> bool:
        """Whether no token of chunk `index` is a sink."""
        return self.num_tokens(index - 1) >= self.sink_size

    @property
    def newest_run(self) -> Run:
        """The run of a chunk that is written to a full cache: the same for all of them."""
        return Run(self.chunk_size - self.num_kept, self.total_size - self.num_kept, self.num_kept)

    def runs(self, index: int) -> tuple[Run, ...]:
        """Runs of chunk `index`, after the window has been shifted for it; the window oldest to newest."""
        first, end = self.num_tokens(index - 1), self.num_tokens(index)
        runs = []
        if first < self.sink_size:
            runs.append(Run(0, first, min(end, self.sink_size) - first))
        if end > self.sink_size:
            length = min(end - max(first, self.sink_size), self.window_size)
            runs.append(Run(self.chunk_size - length, min(end, self.total_size) - length, length))
        return tuple(runs)

    def shift(self, index: int) -> WindowShift | None:
        """The shift of the window before chunk `index` is first written; None if no token has to move."""
        if self.is_full_before(index):
            shift = WindowShift(self.sink_size, self.total_size, self.chunk_size)
        else:
            overflow = max(0, self.num_tokens(index) - self.total_size)
            shift = WindowShift(self.sink_size, self.num_tokens(index - 1), overflow)
        return shift if shift.by > 0 and shift.num_moved > 0 else None

    def ring_end(self, index: int) -> int:
        """Right edge of chunk `index` when the window is a ring: token t at (t - sink_size) % window_size in it."""
        end = self.num_tokens(index)
        if end <= self.total_size or not self.is_behind_sinks(index):
            return min(end, self.total_size)
        return self.sink_size + (end - 1 - self.sink_size) % self.window_size + 1
