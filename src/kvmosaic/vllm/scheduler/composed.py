"""Composed requests: the state of each from arrival to finish, its block hashes, and its report.

Its pieces are looked up in vLLM's prefix cache; at its admission, they and its repairs become operations on the blocks
that vLLM allocated to it. Of a request that reads documents in place, vLLM knows the own tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens

from kvmosaic.cache.keys import encode_tokens
from kvmosaic.layout import Layout, repair_positions
from kvmosaic.prompt import Segment
from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.operations import Move, RepairedRun
from kvmosaic.vllm.report import ChunkOutcome, ComposedReport
from kvmosaic.vllm.scheduler.block_store import BlockStore, WriteLog
from kvmosaic.vllm.scheduler.chunk_prompts import (
    ChunkPrompt,
    PromptPiece,
    first_private_block,
    recomputed_runs,
    repaired_runs,
)
from kvmosaic.vllm.scheduler.in_place import InPlacePlan
from kvmosaic.vllm.scheduler.tier_side import LoadedChunk
from kvmosaic.vllm.scheduler.trouble import Bypass


@dataclass(slots=True)
class SeenBlocks:
    """Blocks of a piece that were found cached, and the last step that was scheduled before that."""

    blocks: tuple[Any, ...]
    step: int
    num_steps: int
    """Steps scheduled when they were found. A later step that writes them makes this stale."""


@dataclass(slots=True)
class ComposedRequest:
    """A request's pieces, their cached blocks, and what the next step does for it.

    vLLM counts a block as cached as soon as the step that computes it is *scheduled*. Moves run before that step's
    forward, so a piece can be moved only if its blocks were found before the step was scheduled: `sightings`.
    """

    request: Any
    composition: Composition
    layout: Layout
    ordinary_hasher: Any
    bypass: Bypass | None = None
    """Why it is answered as an ordinary prompt; None: it is composed."""
    prompts: tuple[ChunkPrompt, ...] = ()
    hashes: tuple[tuple[Any, ...], ...] = ()
    """Block hashes of each chunk prompt."""
    pieces: tuple[PromptPiece, ...] = ()
    sightings: dict[int, SeenBlocks] = field(default_factory=dict)
    """By number of the piece."""
    prefix: SeenBlocks | None = None
    """Prefix cache hits of the request itself."""
    asked: dict[int, int] = field(default_factory=dict)
    """How often each chunk prompt was submitted for this request."""
    loaded: dict[int, LoadedChunk] = field(default_factory=dict)
    """The chunk prompts it waited for that came from a tier."""
    planned: list[tuple[PromptPiece, tuple[Any, ...]]] = field(default_factory=list)
    """Moves for the case that the request is admitted in this step: parts of pieces, and the blocks that hold them."""
    copied: str = ""
    """Why it gets copies of its documents, where reading them in place was chosen."""
    cache_format: str = ""
    """Format in eight bits in which its copies are kept; empty: none."""
    in_place: InPlacePlan | None = None
    """How it reads its documents where they are stored; None: it gets copies of them."""
    whole_prompt: list[int] = field(default_factory=list)
    """Token ids with the documents, if it reads them in place: its own are the others."""
    num_local: int = 0
    """Prefix cache hits when it was last scheduled."""
    num_offered: int | None = None
    """Tokens to be moved in after these, as last offered to vLLM; None: never."""
    num_cached: int = 0
    """Prefix cache hits of the prompt when the request arrived; for a bypass, when it was scheduled."""
    is_told: bool = False
    """Whether its report was sent already."""

    @property
    def position_shift(self) -> int:
        """How many positions before its index a token of the question or the answer is."""
        return 0 if self.bypass or self.in_place else self.composition.end - self.layout.last.start


def report_of(composed: ComposedRequest, max_positions: int | None = None) -> ComposedReport:
    """Reports what was reused, moved and computed, or why the request was bypassed.

    Args:
        composed: the request.
        max_positions: positions that the model was trained for, if known.
    """
    layout, repair = composed.layout, composed.composition.repair
    if composed.bypass is not None:
        return ComposedReport(layout, repair, prefix_tokens=composed.num_cached, bypass=composed.bypass.reason)
    outcomes, rest = [], None
    seen: set[int] = set()
    pieces = {piece.span: piece for piece in composed.pieces}
    for index, span in enumerate(layout.spans[:-1]):
        piece = pieces.get(index)
        if span.is_text and piece is not None:
            rest = _outcome(composed, piece.prompt)
        elif span.is_chunk:
            if piece is None:  # repaired as a whole
                outcomes.append(ChunkOutcome("computed"))
                continue
            outcomes.append(ChunkOutcome("same") if piece.prompt in seen else _outcome(composed, piece.prompt))
            seen.add(piece.prompt)
    return ComposedReport(
        layout,
        repair,
        tuple(outcomes),
        min(composed.num_cached, composed.composition.end),
        rest=rest,
        copied=composed.copied,
        cache_format=composed.cache_format,
        max_positions=max_positions,
        is_apart=composed.composition.leaves_repair_open,  # then they were compared when it arrived
    )


def _outcome(composed: ComposedRequest, prompt: int) -> ChunkOutcome:
    if prompt not in composed.asked:
        return ChunkOutcome("cached")
    if (loaded := composed.loaded.get(prompt)) is not None:
        return ChunkOutcome("cached", loaded.tier, loaded.seconds)
    return ChunkOutcome("computed" if composed.asked[prompt] else "awaited")


_SPACE = "kvmosaic-1"
_MARKS: dict[str, tuple[str, ...]] = {"system": ("system",), "chunk": (), "text": ("text",), "question": ("question",)}
"""By kind of a segment: what a block's hash covers beside its place. A text and the question see everything before."""


class ComposedHasher:
    """Hashes the blocks of one composed request, as vLLM's own hasher does for an ordinary one.

        block          0       1       2       3       4
                   │ s s s │ s a a │ a b b │ b b q │ q q q │
        hash           of an ordinary     private, each with the segments that begin in it
                       prompt's

    A block's hash covers its tokens, all blocks before it, and (from the first private one on) how it was composed, the
    length of the system text, and where texts, chunks and the question begin in it. So an ordinary prompt never hits
    approximate keys, and two composed prompts share their blocks as long as they begin alike.
    """

    def __init__(
        self, composition: Composition, layout: Layout, block_size: int, digest: Callable[[Any], bytes]
    ) -> None:
        self._block_size, self._digest = block_size, digest
        self._first_private = first_private_block(layout, block_size)
        repair = composition.repair
        self._method = (
            *(_SPACE, composition.position_strategy, composition.chunk_context),
            *(repair if isinstance(repair, int) else -1, composition.system),
            *map(encode_tokens, composition.companions),
        )
        starts = accumulate((span.num_in_prompt for span in layout.spans), initial=0)
        spans = list(zip(layout.spans, starts, strict=False))
        self._marks = [(start, _mark_of(span.segment)) for span, start in spans if not span.is_companion]
        if not isinstance(repair, int):
            for index, runs in repaired_runs(layout, repair).items():
                self._marks += [(spans[index][1] + run.start, ("repaired", str(len(run)))) for run in runs]
            self._marks.sort()

    def __call__(self, request: Any) -> list[BlockHash]:
        """Computes the missing hashes of full blocks."""
        return missing_hashes(request, self._block_size, self._digest, self._own_keys)

    def _own_keys(self, start: int, stop: int) -> tuple[Any, ...]:
        if start < self._first_private * self._block_size:
            return ()
        marks = ((*mark, at - start) for at, mark in self._marks if start <= at < stop)
        return (*self._method, *chain.from_iterable(marks))


def missing_hashes(
    request: Any, block_size: int, digest: Callable[[Any], bytes], own_keys: Callable[[int, int], tuple[Any, ...]]
) -> list[BlockHash]:
    """Hashes of the full blocks of a request that have none yet, as vLLM computes them.

    Args:
        request: vLLM's request.
        block_size: tokens per block.
        digest: vLLM's hash function.
        own_keys: from the first token of a block and the one after its last, what its hash covers in addition.
    """
    hashes: list[BlockHash] = []
    before = request.block_hashes[-1] if request.block_hashes else None
    for start in range(len(request.block_hashes) * block_size, request.num_tokens - block_size + 1, block_size):
        stop = start + block_size
        extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
        if own := own_keys(start, stop):
            extra = (*(extra or ()), *own)
        before = hash_block_tokens(digest, before, request.all_token_ids[start:stop], extra)
        hashes.append(before)
    return hashes


def _mark_of(segment: Segment) -> tuple[str, ...]:
    return ("part",) if segment.document_offset else _MARKS[segment.kind]


class ChunkLookup:
    """Finds cached blocks, and tracks in which step they were found and written.

    vLLM counts a block as cached as soon as the step that computes it is scheduled. Moves and repairs of a step run
    before its forward, so they read blocks that were found before that step only.
    """

    def __init__(self, store: Callable[[], BlockStore], block_size: int) -> None:
        self._store, self._block_size = store, block_size
        self.written = WriteLog(block_size)
        self.step = 0
        """Steps scheduled so far."""

    def look(self, composed: ComposedRequest, pieces: Iterable[int], step: int) -> None:
        """Finds the cached blocks of pieces; steps after `step` may read them."""
        for index in pieces:
            blocks = self._store().find(self._hashes(composed, composed.pieces[index]))
            sighting = composed.sightings.get(index)
            if blocks is None:
                composed.sightings.pop(index, None)
            elif sighting is None or sighting.blocks != blocks or self.written.since(blocks, sighting.num_steps):
                composed.sightings[index] = SeenBlocks(blocks, step, self.step)

    def are_complete(self, composed: ComposedRequest, pieces: Iterable[int]) -> bool:
        """Whether all of these pieces were found before the step that is being scheduled."""
        return all(composed.sightings[index].step < self.step for index in pieces)

    def look_at_prefix(self, composed: ComposedRequest, num_local: int, step: int) -> bool:
        """Finds the blocks of the first `num_local` tokens; returns whether they were found before this step.

        Repairs read them before the step's forward, while vLLM reports blocks that only this forward writes as cached.
        """
        blocks = self._store().find(composed.request.block_hashes[: num_local // self._block_size])
        if blocks is None:
            return False
        seen = composed.prefix
        is_known = seen is not None and seen.step < self.step and seen.blocks[: len(blocks)] == blocks
        if seen is not None and is_known and not self.written.since(blocks, seen.num_steps):
            return True
        composed.prefix = SeenBlocks(blocks, step, self.step)
        return not blocks

    def forget_unrepairable(self, composed: ComposedRequest, num_local: int) -> bool:
        """Forgets blocks that this request cannot begin with; returns whether there are any.

        In shared positions, documents of an earlier composed prompt are in its blocks where the question sees them.
        Repaired tokens see them one after the other, so they are moved again from where they were computed.
        """
        first, stop = first_private_block(composed.layout, self._block_size), num_local // self._block_size
        if not composed.composition.repair or not composed.layout.rules.overlaps or first >= stop:
            return False
        self._store().forget(self._store().find(composed.request.block_hashes[first:stop]) or ())
        return True

    def remainder(self, composed: ComposedRequest, index: int, num_local: int) -> tuple[PromptPiece, tuple[Any, ...]]:
        """The rest of a piece after the first `num_local` tokens, and the blocks that hold it."""
        piece, blocks = composed.pieces[index], composed.sightings[index].blocks
        cut = max(num_local - piece.start, 0)
        left = replace(piece, start=piece.start + cut, offset=piece.offset + cut)
        return left, blocks[left.offset // self._block_size - piece.offset // self._block_size :]

    def _hashes(self, composed: ComposedRequest, piece: PromptPiece) -> tuple[Any, ...]:
        first = piece.offset // self._block_size
        stop = piece.offset + piece.stop - piece.start
        return composed.hashes[piece.prompt][first : -(-stop // self._block_size)]


@dataclass(frozen=True, slots=True)
class FirstOperations:
    """The operations of one request before its first forward, in this order."""

    moves: tuple[Move, ...] = ()
    repairs: tuple[RepairedRun, ...] = ()
    returns: tuple[Move, ...] = ()
    """Moves after the repairs; see `Operations.returns`."""


def admit(composed: ComposedRequest, own: tuple[int, ...], num_cached: int, block_size: int) -> FirstOperations:
    """Plans the operations of a request whose first `num_cached` tokens are in its blocks `own` already."""
    layout, repair = composed.layout, composed.composition.repair
    runs = recomputed_runs(layout, repair, num_cached)
    away = _distances(composed) if runs else {}
    repaired = repaired_runs(layout, repair)
    moves: list[Move] = []
    returns: list[Move] = []
    for piece, held in composed.planned:
        source = tuple(block.block_id for block in held)
        distance = away.get(piece.span, 0)
        moves.append(_move(piece, source, own, distance, block_size))
        if distance:
            returns += _returns(piece, source, own, distance, repaired[piece.span][0].stop, block_size)
    tokens: Any = composed.request.prompt_token_ids
    repairs = (
        RepairedRun(own[: -(-stop // block_size)], start, tuple(tokens[start:stop]), position)
        for start, stop, position in runs
    )
    return FirstOperations(tuple(moves), tuple(repairs), tuple(returns))


def move_in(composed: ComposedRequest, own: tuple[int, ...], block_size: int) -> FirstOperations:
    """Plans the moves of a request that reads its documents in place: of the end of its system text."""
    moves = (
        _move(piece, tuple(block.block_id for block in held), own, 0, block_size) for piece, held in composed.planned
    )
    return FirstOperations(tuple(moves))


def _distances(composed: ComposedRequest) -> dict[int, int]:
    """By span: how much further on a repaired token sees it than the question does; above 0 in shared positions."""
    seen = composed.layout.positions()
    if not composed.composition.repair:
        return {}
    return {index: at - seen[index] for index, at in repair_positions(composed.layout).items() if at > seen[index]}


def _move(piece: PromptPiece, source: tuple[int, ...], own: tuple[int, ...], further: int, size: int) -> Move:
    first, last = piece.start // size, -(-piece.stop // size)
    return Move(
        source_blocks=source,
        source_start=piece.offset % size,
        target_blocks=own[first:last],
        target_start=piece.start % size,
        num_tokens=piece.stop - piece.start,
        position=piece.offset,
        distance=piece.distance + further,
    )


def _returns(
    piece: PromptPiece, source: tuple[int, ...], own: tuple[int, ...], further: int, num_repaired: int, size: int
) -> tuple[Move, Move]:
    """Moves a piece to where the question sees it: its repaired tokens in place, the others from their source again.

    So the keys of the others are rounded once, as without repair.
    """
    first, last = piece.start // size, -(-piece.stop // size)
    blocks, start = own[first:last], piece.start % size
    position = piece.offset + piece.distance + further
    num_others = piece.stop - piece.start - num_repaired
    skipped = piece.offset % size + num_repaired
    return (
        Move(blocks, start, blocks, start, num_repaired, position, -further),
        Move(source, skipped, blocks, start + num_repaired, num_others, piece.offset + num_repaired, piece.distance),
    )


_IN_PLACE_SPACE = "kvmosaic-in-place-1"


class OwnTokensHasher:
    """Hashes the blocks of own tokens: up to the first that reads a document or is shifted, as vLLM does.

    Later blocks are private: their hashes cover what was read, and where.
    """

    def __init__(
        self, marks: Sequence[tuple[int, tuple[Any, ...]]], block_size: int, digest: Callable[[Any], bytes]
    ) -> None:
        self._marks, self._block_size, self._digest = marks, block_size, digest

    def __call__(self, request: Any) -> list[BlockHash]:
        """Computes the missing hashes of full blocks."""
        return missing_hashes(request, self._block_size, self._digest, self._own_keys)

    def _own_keys(self, start: int, stop: int) -> tuple[Any, ...]:
        own = [(index - start, *mark) for index, mark in self._marks if start <= index < stop]
        return (_IN_PLACE_SPACE, *chain.from_iterable(own)) if own else ()


def hide_documents(request: Any, plan: InPlacePlan, max_model_len: int) -> None:
    """Leaves a request its own tokens; its answer stays as long as the whole prompt leaves room for."""
    room = max_model_len - request.num_prompt_tokens
    request.max_tokens = min(request.max_tokens, room)
    _set_prompt(request, plan.own_tokens(request.prompt_token_ids))


def show_documents(request: Any, token_ids: list[int]) -> None:
    """Gives a request that never ran its whole prompt back."""
    assert not request.num_output_tokens
    _set_prompt(request, token_ids)


def _set_prompt(request: Any, token_ids: list[int]) -> None:
    request.prompt_token_ids = token_ids
    request.num_prompt_tokens = len(token_ids)
    request._all_token_ids[:] = token_ids
