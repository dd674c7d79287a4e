"""Operations: the work that the scheduler assigns to every worker before a step's forward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def layer_specs(group: Any) -> tuple[Any, ...]:
    """The cache specs of a group's layers: one for all, or one of each where their sizes differ."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return (group.kv_cache_spec,) if by_layer is None else tuple(by_layer.values())


def cache_owner(layer: Any) -> str:
    """The name of the layer whose cache a layer reads; empty: it has its own."""
    return getattr(layer, "kv_sharing_target_layer_name", None) or ""


def block_bytes(group: Any) -> int:
    """Bytes of a block in all layers of a group."""
    is_for_all = getattr(group.kv_cache_spec, "kv_cache_specs", None) is None
    return int(group.kv_cache_spec.page_size_bytes) * (len(group.layer_names) if is_for_all else 1)


@dataclass(frozen=True, slots=True)
class Move:
    """A run of tokens whose keys and values are copied inside the paged cache, and whose keys are rotated.

        source_blocks    │ . . . c c │ c c c c c │ c . . . . │    source_start = 3, num_tokens = 9
        target_blocks    │ r r r r c │ c c c c c │ c c c . . │    target_start = 4

    Token i of the run is in slot `source_start + i` of its source blocks, was computed at `position + i`, and goes to
    slot `target_start + i` of the target blocks, at `position + distance + i`.
    """

    source_blocks: tuple[int, ...]
    source_start: int
    target_blocks: tuple[int, ...]
    target_start: int
    num_tokens: int
    position: int
    distance: int


@dataclass(frozen=True, slots=True)
class RepairedRun:
    """A run of recomputed tokens that see everything before them: token `start + i` is `token_ids[i]`.

    `blocks` hold the request's tokens 0, 1, … at least up to the end of the run. The run begins at `position`.
    """

    blocks: tuple[int, ...]
    start: int
    token_ids: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class ShiftedTokens:
    """Tokens that this step writes into these blocks are `distance` positions earlier than their index says."""

    blocks: tuple[int, ...]
    distance: int


@dataclass(frozen=True, slots=True)
class DocumentRead:
    """A run of a document's tokens that a request reads where they are stored.

        blocks    │ s s s s │ s a a a │ a a a . │      start = 5, num_tokens = 6

    Its first token was computed at `position`. A reader sees it `distance` positions further on.
    """

    first_reader: int
    """The request's own tokens from this index on see it."""
    blocks: tuple[int, ...]
    start: int
    num_tokens: int
    position: int
    distance: int


@dataclass(frozen=True, slots=True)
class InPlaceRequest:
    """A request that vLLM knows without its documents: its own tokens, and the documents that they read in place.

    the prompt          s s s │ a a a a │ b b b b b │ q q q
    own tokens, index   0 1 2                         3 4 5       shifts: (3, 9): from index 3 on, 9 positions later
    """

    blocks: tuple[int, ...]
    """Blocks of its own tokens. Requests that begin alike share the first ones, also while one of them writes these."""
    shifts: tuple[tuple[int, int], ...]
    """(index, shift), ascending: from this own token on, a position is its index plus `shift`; before: its index."""
    reads: tuple[DocumentRead, ...]
    num_computed: int = 0
    """Own tokens before this step."""
    num_scheduled: int = 0
    """Own tokens that this step computes."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of tokens as an entry of the tiers: its full identity, and what its entry must match.

    Its first token is at position `start`, which is also its index in its chunk prompt.
    """

    fingerprint: str
    """Fingerprint of the model, combined from all workers."""
    key: bytes
    root: bytes
    """What it saw, and its start; see `kvmosaic.cache.keys`."""
    start: int
    tokens: bytes

    @property
    def num_tokens(self) -> int:
        """Tokens of the run."""
        return len(self.tokens) // 4


@dataclass(frozen=True, slots=True)
class RunFetch:
    """A run to fetch from the tiers and to keep in host memory under this number, until it is dropped."""

    number: int
    run: StoredRun
    compute_seconds: float | None
    """Estimated time to compute it; None: unknown."""


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens of a fetched run that are written into blocks, without rotation.

    the run, fetched       │ . . x x x x │       skip = 2, num_tokens = 4
    blocks of a prompt     │ . . . . . . . x │ x x x . . . . . │     start = 7
    """

    number: int
    skip: int
    blocks: tuple[int, ...]
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Store:
    """A run to store, which is complete in these blocks after the step's forward, from slot `run.start` on."""

    run: StoredRun
    blocks: tuple[int, ...]
    compute_seconds: float


@dataclass(slots=True)
class Operations:
    """One step's work: moves (they read what earlier steps wrote), then repairs, returns, and the forward with shifts.

    Loads come before the forward, too, and stores after it. Drops come after loads.
    """

    moves: list[Move] = field(default_factory=list)
    repairs: list[RepairedRun] = field(default_factory=list)
    returns: list[Move] = field(default_factory=list)
    """Moves of documents in shared positions, which repaired tokens saw one after the other, to where the question
    sees them."""
    shifts: list[ShiftedTokens] = field(default_factory=list)
    in_place: list[InPlaceRequest] = field(default_factory=list)
    fetches: list[RunFetch] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    """Blocks without valid keys and values, which vLLM counts as computed: the workers report them as not loaded."""
    drops: list[int] = field(default_factory=list)
    """Numbers of fetches that are no longer needed."""
    fingerprint_round: int | None = None
    """Compute the fingerprint of the weights again, and report it with this number."""

    def __bool__(self) -> bool:
        return bool(self.moves or self.repairs or self.shifts or self.in_place or self.uses_tiers)

    @property
    def uses_tiers(self) -> bool:
        """Whether there is any work for the tiers."""
        asks = self.fetches or self.loads or self.stores or self.drops
        return bool(asks) or self.fingerprint_round is not None


@dataclass(frozen=True, slots=True)
class FetchReport:
    """The outcome of a fetch on one worker."""

    number: int
    rank: int
    tier: str
    """The tier that had it; empty: none, or computing it is faster."""


@dataclass(frozen=True, slots=True)
class FingerprintReport:
    """The fingerprint of one worker's weights in this round; empty: it cannot be computed."""

    number: int
    rank: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Capabilities of one worker, reported to the scheduler once at startup."""

    trouble: str = ""
    """Why chunks cannot be moved on this worker; empty: they can."""
    can_repair: bool = False
    can_shift: bool = False
    can_read_in_place: bool = False
    """Its attention reads documents where they are stored."""
    no_reading: str = ""
    """Why it does not, where that was chosen; empty: it does, or copies were chosen."""
    fingerprint: str = ""
    """The fingerprint of this worker's weights; empty: unknown."""
    num_positions: int = 0
    """Positions of the model's rotary table; 0: unknown."""
    cache_format: str = ""
    """Format in eight bits of its cache, where keys that are moved are rounded once more; empty: there is none."""
