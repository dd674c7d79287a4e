"""Documents read in place: which tokens of a composed prompt vLLM computes as the request's own, and what they read.

    the prompt    system s s s | document a a a a | text t t | document b b b | question q q
    own tokens    s s s                             t t                          q q          what vLLM knows of it
    reads               a, seen from t on ──────────┘          b, seen from q on ┘            where they are stored

Repaired tokens of documents are own tokens, too: they are computed with the request, and read what is before them.
No torch, no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from kvmosaic.layout import Layout
from kvmosaic.vllm.contract import Repair
from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest
from kvmosaic.vllm.scheduler.chunk_prompts import PromptPiece, repaired_runs


@dataclass(frozen=True, slots=True)
class InPlacePlan:
    """Own tokens of a composed prompt, as runs of the whole prompt, and the pieces of documents that they read."""

    runs: tuple[tuple[int, int], ...]
    """(start, stop) in the whole prompt."""
    shifts: tuple[tuple[int, int], ...]
    """See `InPlaceRequest.shifts`."""
    pieces: tuple[PromptPiece, ...]
    """Pieces of documents; last, if it is stored, the system text, of which the end is moved into its own blocks."""
    first_readers: tuple[int, ...]
    """By piece of a document: the own tokens from this index on see it."""

    @classmethod
    def of(cls, layout: Layout, pieces: Sequence[PromptPiece], repair: Repair) -> InPlacePlan:
        """The plan of a layout, whose chunks are stored where `pieces` say."""
        positions, repaired = layout.positions(), repaired_runs(layout, repair)
        stored = {piece.span: piece for piece in pieces}
        runs: list[tuple[int, int]] = []
        shifts: list[tuple[int, int]] = []
        read: list[tuple[int, PromptPiece]] = []
        begin = own = 0
        for index, span in enumerate(layout.spans):
            end = span.num_in_prompt
            computed = repaired.get(index, ()) if span.is_chunk else filter(len, (range(end),))
            at = 0
            for run in (*computed, range(end, end)):
                if at < run.start:
                    read.append((own, _part(stored[index], at, run.start)))
                if run:
                    shift = positions.get(index, span.start) + run.start - own
                    if shift != (shifts[-1][1] if shifts else 0):
                        shifts.append((own, shift))
                    runs.append((begin + run.start, begin + run.stop))
                    own += len(run)
                at = run.stop
            begin += end
        # with its own prompt, which no document shares, it is computed as the request's own
        shared = {piece.prompt for _, piece in read} if layout.spans[0].segment.kind == "system" else set()
        system = [piece for piece in (stored.get(0),) if piece is not None and piece.prompt in shared]
        read_pieces = (*(piece for _, piece in read), *system)
        return cls(tuple(runs), tuple(shifts), read_pieces, tuple(first for first, _ in read))

    @property
    def num_read(self) -> int:
        """Number of pieces that are read in place: the first ones."""
        return len(self.first_readers)

    @property
    def num_before_documents(self) -> int:
        """Number of own tokens before the first that sees a document."""
        return min(self.first_readers, default=self.num_own)

    @property
    def num_own(self) -> int:
        """Number of own tokens."""
        return sum(stop - start for start, stop in self.runs)

    def own_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The own tokens among those of the whole prompt."""
        return list(chain.from_iterable(token_ids[start:stop] for start, stop in self.runs))

    def marks(self, names: Sequence[Any]) -> list[tuple[int, tuple[Any, ...]]]:
        """What the keys and values of own tokens depend on beside tokens: (own index from which on, what).

        Args:
            names: by chunk prompt, a name of its tokens and of all that it saw.
        """
        marks: list[tuple[int, tuple[Any, ...]]] = [(index, ("shift", shift)) for index, shift in self.shifts]
        for first, piece in zip(self.first_readers, self.pieces, strict=False):
            run = (piece.offset, piece.stop - piece.start, piece.distance)
            marks.append((first, ("read", names[piece.prompt], *run)))
        return marks

    def request(
        self,
        own_blocks: tuple[int, ...],
        held: Sequence[Sequence[Any]],
        block_size: int,
        num_computed: int,
        num_scheduled: int,
    ) -> InPlaceRequest:
        """The request of a step.

        Args:
            own_blocks: blocks of its own tokens.
            held: by piece, the blocks that hold it.
            block_size: tokens per block.
            num_computed: own tokens before this step.
            num_scheduled: own tokens that it computes.
        """
        reads = tuple(
            DocumentRead(
                first,
                tuple(block.block_id for block in blocks),
                piece.offset % block_size,
                piece.stop - piece.start,
                piece.offset,
                piece.distance,
            )
            for first, piece, blocks in zip(self.first_readers, self.pieces, held, strict=False)
        )
        return InPlaceRequest(own_blocks, self.shifts, reads, num_computed, num_scheduled)


def _part(piece: PromptPiece, start: int, stop: int) -> PromptPiece:
    return replace(piece, start=piece.start + start, stop=piece.start + stop, offset=piece.offset + start)
