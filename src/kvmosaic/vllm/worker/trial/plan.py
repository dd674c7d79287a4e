"""Trial plan: the tokens of a check, their positions and blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvmosaic.engine.self_check import ordinary_tokens
from kvmosaic.vllm.operations import Move, RepairedRun

NUM_TOKENS = 192
HEAD_TOKENS = 17
"""Tokens of the runs at many positions."""
TAIL_TOKENS = 64
MAX_CONTEXT = 1024
"""Max position up to which a run also has as many tokens before it; more where a layer has a longer window."""
POSITIONS = (1, 7, 37, 64, 129, 300, 500, 700, 1000, 1800, 3000, 4200, 6000, 9000, 17_000, 33_000, 66_000, 131_000)


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """Runs of one text, each in blocks of its own.

    text      0 ───────────────────────────────────────── T       at position 0
    tail                              start ───────────── T       the same tokens in the same blocks, computed later
    head      0 ─── h                                             at position 0, and at many others:
              position p    up to `context`   │ the text's first block, again and again │ . . . head │
                            further out       │ head │
    moved                                                         the first head's keys and values, for position p
    after     one more token after a moved head
    """

    tokens: tuple[int, ...]
    head: int
    tail: int
    """The first token of the tail."""
    positions: tuple[int, ...]
    """Positions of the heads; the first is 0."""
    context: int
    """The last position with as many tokens before it."""
    block_size: int
    text_blocks: tuple[int, ...]
    first_blocks: tuple[int, ...]
    """Blocks of the head at position 0."""
    head_blocks: tuple[tuple[int, ...], ...]
    """Blocks of the other heads that are computed at once."""
    moved_blocks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tokens: tuple[int, ...],
        positions: tuple[int, ...],
        *,
        block_size: int,
        num_blocks: int,
        max_runs: int,
        context: int = MAX_CONTEXT,
    ) -> TrialPlan | str:
        """A plan for these tokens, or why a cache of `num_blocks` blocks has no room for it."""
        head, tail = min(HEAD_TOKENS, len(tokens)), len(tokens) - min(TAIL_TOKENS, len(tokens) // 3)
        of_text, of_head = -(-len(tokens) // block_size), -(-(block_size - 1 + head + 1) // block_size)
        free = num_blocks - 1 - of_text - 2 * of_head  # block 0 is vLLM's null block
        at_once = min(free // of_head, max(max_runs - 1, 1), max(len(positions) - 1, 1))
        if at_once < 1:
            needed = 1 + of_text + 3 * of_head
            return f"a cache of {num_blocks} blocks has no room for the check at start, which takes {needed}"
        blocks = iter(range(1, num_blocks))

        def take(number: int) -> tuple[int, ...]:
            return tuple(next(blocks) for _ in range(number))

        return cls(
            tokens=tokens,
            head=head,
            tail=tail,
            positions=positions,
            context=context,
            block_size=block_size,
            text_blocks=take(of_text),
            first_blocks=take(of_head),
            moved_blocks=take(of_head),
            head_blocks=tuple(take(of_head) for _ in range(at_once)),
        )

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks that are written."""
        heads = (block for blocks in self.head_blocks for block in blocks)
        return (*self.text_blocks, *self.first_blocks, *self.moved_blocks, *heads)

    @property
    def text_run(self) -> RepairedRun:
        """The whole text."""
        return RepairedRun(self.text_blocks, 0, self.tokens, 0)

    @property
    def tail_run(self) -> RepairedRun:
        """The tail of the text, with the rest before it."""
        return RepairedRun(self.text_blocks, self.tail, self.tokens[self.tail :], self.tail)

    def head_runs(self) -> list[list[RepairedRun]]:
        """The heads, as many at once as there are blocks for, each batch with the one at position 0 before them.

        Runs of one forward are computed alike, so they differ by their positions alone.
        """
        first, others = self._head(self.first_blocks, 0), self.positions[1:]
        at_once = len(self.head_blocks)
        groups = [others[start : start + at_once] for start in range(0, len(others), at_once)] or [()]
        return [
            [first, *(self._head(blocks, position) for blocks, position in zip(self.head_blocks, group, strict=False))]
            for group in groups
        ]

    @property
    def moved_head(self) -> RepairedRun:
        """The head with the most tokens before it."""
        position = max(position for position in self.positions if position <= self.context)
        return self._head(self.head_blocks[0], position)

    def move_to(self, run: RepairedRun) -> Move:
        """Moves the first head to the position of another one, into blocks of its own."""
        return Move(self.first_blocks, 0, self.moved_blocks, run.start % self.block_size, self.head, 0, run.position)

    def behind(self, run: RepairedRun) -> RepairedRun:
        """One token after a moved head."""
        blocks = (*self._context(run.start), *self.moved_blocks)
        after = self.head % len(self.tokens)
        return RepairedRun(blocks, run.start + self.head, self.tokens[after : after + 1], run.position + self.head)

    def _head(self, blocks: tuple[int, ...], position: int) -> RepairedRun:
        start = position if position <= self.context else 0
        return RepairedRun((*self._context(start), *blocks), start, self.tokens[: self.head], position)

    def _context(self, start: int) -> tuple[int, ...]:
        return self.text_blocks[:1] * (start // self.block_size)


def far_positions(last: int, windows: Iterable[int] = ()) -> tuple[int, ...]:
    """Position 0, and others near and far, up to the last one at which a run may begin.

    Args:
        last: that one.
        windows: of the model's layers; around the end of each, a run has tokens that a window has left and others.
    """
    ends = {window - HEAD_TOKENS // 2 for window in windows}
    return (0, *sorted({each for each in {*POSITIONS, *ends} if 0 < each < last} | ({last} if last > 0 else set())))


def trial_tokens(model_config: Any, num_tokens: int) -> tuple[int, ...]:
    """Tokens of an ordinary text in the model's vocabulary."""
    try:
        from vllm.tokenizers.registry import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(model_config)
        return tuple(ordinary_tokens(tokenizer, int(model_config.get_vocab_size()), num_tokens))
    except Exception:  # none was requested, or one that only vLLM's front end can load
        return tuple(ordinary_tokens(None, int(model_config.get_vocab_size()), num_tokens))
