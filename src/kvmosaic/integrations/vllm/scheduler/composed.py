"""Composed requests: the state of each from arrival to finish, its block hashes, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens

from kvmosaic.integrations.vllm.contract import Composition
from kvmosaic.integrations.vllm.report import ChunkOutcome, ComposedReport
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import ChunkPrompt, PromptPiece, first_private_block
from kvmosaic.integrations.vllm.scheduler.in_place import InPlacePlan
from kvmosaic.integrations.vllm.scheduler.tier_side import LoadedChunk
from kvmosaic.integrations.vllm.scheduler.trouble import Bypass
from kvmosaic.layout import Layout
from kvmosaic.prompt import Segment


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
        self._method = (
            *(_SPACE, composition.position_strategy, composition.chunk_context),
            *(composition.repair, composition.system),
        )
        starts = accumulate((span.num_tokens for span in layout.spans), initial=0)
        self._marks = [(start, _mark_of(span.segment)) for span, start in zip(layout.spans, starts, strict=False)]

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
