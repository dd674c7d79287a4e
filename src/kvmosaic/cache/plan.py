"""Plans: for every span of a prompt, what is reused and what must be computed; and the lookup that makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.block_table import SavedState
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.groups import SharedStart, Starts
from kvmosaic.cache.keys import TOKEN_BYTES, Key, KeyChain, encode_tokens
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.prefix_entry import PrefixEntry
from kvmosaic.cache.statistics import Counters
from kvmosaic.layout import Layout, View
from kvmosaic.prompt import SegmentKind

Action = Literal["reuse", "compute", "wait"]


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The plan of one span.

    action:
        reuse      every token is cached
        compute    at least one token is computed; those before it may be reused (`num_reused`)
        wait       a chunk already being computed, by another request or by an earlier span of this one
    """

    index: int
    kind: SegmentKind
    name: str | None
    action: Action
    num_tokens: int
    num_reused: int
    """Tokens that this span does not compute."""
    distance: int
    """How far its keys are moved for the last span; 0 for the last span itself and for spans it does not see."""
    block_ids: tuple[BlockId, ...]
    """Reused blocks, in the pool of its kind."""
    key: Key = field(repr=False)
    """Chunks: the lookup key. Other closed spans: the run key. The span that grows: its root."""
    identity: Key = field(repr=False)
    """The run key of chunks and other closed spans, as used in keys of later spans."""
    root: Key = field(repr=False)
    """Key of what it sees and where it starts."""
    block_keys: tuple[Key, ...] = field(repr=False)
    """Chained keys of the reused prefix blocks."""
    tokens: bytes = field(repr=False)
    """Its token ids, encoded."""
    num_copied: int = 0
    """Of the reused tokens, those at the end that are copied from a block which diverges after them."""

    @property
    def is_chunk(self) -> bool:
        """Whether it lives in the chunk pool."""
        return self.kind is SegmentKind.CHUNK

    @property
    def is_left_out(self) -> bool:
        """Whether it is a companion that no chunk needs now, so that it takes no blocks."""
        return self.kind is SegmentKind.COMPANION and not self.num_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that this span computes."""
        return self.num_tokens - self.num_reused


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one prompt, as of the moment of planning; `KVCache.allocate` carries it out."""

    layout: Layout
    salt: str
    spans: tuple[SpanPlan, ...]
    tenant: str = ""
    remark: str = ""
    """On its documents."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def reused_tokens(self) -> int:
        """Tokens that this prompt does not compute."""
        return sum(span.num_reused for span in self.spans)

    @property
    def computed_tokens(self) -> int:
        """Tokens that this prompt computes."""
        return sum(span.num_to_compute for span in self.spans)

    def __str__(self) -> str:
        """A small table, one line per span."""
        rows = [("span", "kind", "name", "tokens", "reused", "moved by", "action")]
        rows += [
            (
                str(span.index),
                str(span.kind),
                span.name or "-",
                str(span.num_tokens),
                str(span.num_reused),
                f"{span.distance:+d}" if span.distance else "0",
                span.action,
            )
            for span in self.spans
            if not span.is_left_out
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        is_number = (True, False, False, True, True, True, False)
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines.append(f"{self.num_tokens} tokens: {self.reused_tokens} reused, {self.computed_tokens} computed")
        return "\n".join(lines)


@dataclass(slots=True)
class CacheHit:
    """Cached blocks of one span of a plan."""

    entries: list[PrefixEntry] = field(default_factory=list)
    """The blocks to share, in order."""
    chunk: Chunk | None = None
    shared: SharedStart[Chunk | SpanPlan] | None = None
    """Missing chunks: the first blocks of a chunk that begins alike, cached or also of this prompt."""
    shared_inside: SharedStart[Chunk | SpanPlan] | None = None
    """The same among the chunks of this prompt, which are needed anyway."""
    source: PrefixEntry | None = None
    """A block that begins like its next one: to be copied."""
    num_copied: int = 0
    """Number of common tokens in that block."""
    state: SavedState | None = None
    """For models with states: the one after the last reused token."""

    @property
    def num_shared(self) -> int:
        """Blocks of another chunk that a missing chunk shares."""
        return 0 if self.shared is None else self.shared.num_blocks

    def end_with_a_state(self) -> None:
        """Shares blocks up to the last one that has a state."""
        while self.entries and self.entries[-1].state is None:
            self.entries.pop()
        self.state = self.entries[-1].state if self.entries else None


@dataclass
class _Draft:
    """A plan under construction."""

    layout: Layout
    chain: KeyChain
    distances: dict[int, int]
    block_size: int
    spans: list[SpanPlan] = field(default_factory=list)
    missing: dict[Key, tuple[Key, bytes]] = field(default_factory=dict)
    """Chunks this plan computes: key -> root and tokens."""
    roots: dict[tuple[int, tuple[View, ...], tuple[int, ...]], Key] = field(default_factory=dict)
    """Roots by what was seen: most chunks of a prompt saw the same, so their root is made and stored once."""

    @cached_property
    def starts(self) -> Starts[SpanPlan]:
        """Chunks this plan computes, for later ones that begin alike."""
        return Starts(self.block_size)

    def root(self, index: int) -> Key:
        """Root key of a span: from the keys of earlier spans, which are in the plan by now."""
        span = self.layout.spans[index]
        root = self.roots.get((span.start, span.views, span.positions))
        if root is None:
            root = self.chain.root(span.start, [(self._seen(view), view.distance) for view in span.views])
            if span.positions:
                root = self.chain.part_of(root, span.positions)
            self.roots[span.start, span.views, span.positions] = root
        return root

    def _seen(self, view: View) -> Key:
        key = self.spans[view.span].identity
        seen = view.visibility
        if seen is None:
            return key
        return self.chain.part_of(key, seen.hidden, seen.ends)


def is_closed(layout: Layout, index: int) -> bool:
    """Whether no token will ever follow in a span: a system prompt, a chunk, or any span but the last."""
    kind = layout.spans[index].segment.kind
    return kind in (SegmentKind.SYSTEM, SegmentKind.CHUNK) or index < len(layout.spans) - 1


def num_usable(layout: Layout, index: int) -> int:
    """How many tokens of a span may be taken from the prefix cache.

    An answer needs the logits of the last prompt token, so at least that one is computed.
    """
    count = layout.spans[index].num_tokens
    return count if is_closed(layout, index) else max(count - max(layout.fresh_tokens, 1), 0)


class CacheLookup:
    """Planner of layouts: looks up all spans, without changing the caches."""

    def __init__(
        self,
        chunks: ChunkIndex,
        prefix: PrefixCache | None,
        counters: Counters,
        clock: Callable[[], float],
        *,
        has_states: bool = False,
    ) -> None:
        self._chunks = chunks
        self._prefix = prefix
        self._counters = counters
        self._clock = clock
        self._has_states = has_states

    def plan(self, layout: Layout, salt: str, tenant: str, chain: KeyChain) -> Plan:
        """Looks up every span, in order: the keys of later spans depend on those of the spans they see."""
        draft = _Draft(
            layout,
            chain,
            {view.span: view.distance for view in layout.last.views},
            self._chunks.pool.block_size,
        )
        for index, span in enumerate(layout.spans):
            draft.spans.append(self._plan_chunk(draft, index) if span.is_chunk else self._plan_prefix(draft, index))
        return Plan(layout, salt, tuple(_without_idle_companions(layout, draft.spans)), tenant)

    def revalidate(self, plan: Plan, loaded: Collection[Key] = ()) -> list[CacheHit] | None:
        """Current cache hits for the spans of an older plan; None if the plan is no longer valid.

        That is, if one of its keys has been taken by other tokens since, or an omitted companion is needed after all.

        Args:
            plan: the older plan.
            loaded: keys of chunks that are loaded instead of computed.
        """
        found: list[CacheHit] = []
        for span in plan.spans:
            chunk = self._chunks.get(span.key) if span.is_chunk else None
            if chunk is not None and not self._chunks.is_same(chunk, span.root, span.tokens):
                return None
            here = CacheHit(chunk=chunk)
            seen = () if span.is_left_out else plan.layout.spans[span.index].views
            if chunk is None and any(plan.spans[view.span].is_left_out for view in seen):
                return None  # it was cached when planned, and has been evicted
            if not span.is_chunk:
                usable = span.tokens[: num_usable(plan.layout, span.index) * TOKEN_BYTES]  # none, if it is omitted
                self._find_cached(here, span.root, usable, span.block_keys, is_closed(plan.layout, span.index))
            found.append(here)
        self._find_starts(plan, found, loaded)
        return found

    def _find_starts(self, plan: Plan, found: Sequence[CacheHit], loaded: Collection[Key]) -> None:
        """Finds the blocks that the missing chunks of a plan share: with cached chunks, and with each other.

        A loaded chunk shares only what is complete, so that it need not wait, and lends nothing: it may be inexact.
        """
        if self._has_states:
            return  # the state in the middle of a chunk is not kept
        missing: dict[Key, tuple[SpanPlan, CacheHit]] = {}
        for span, here in zip(plan.spans, found, strict=True):
            if span.is_chunk and here.chunk is None:
                missing.setdefault(span.key, (span, here))
        if not missing:
            return
        inside: Starts[Chunk | SpanPlan] = Starts(self._chunks.pool.block_size)
        computed: Starts[SpanPlan] = Starts(self._chunks.pool.block_size)
        for here in found:
            if here.chunk is not None and not here.chunk.codec:
                inside.add(here.chunk)
        for span, here in missing.values():
            here.shared_inside = inside.find(span.root, span.tokens)
            inside.add(span)
            cached = self._chunks.starts.find(span.root, span.tokens)
            if span.key not in loaded:
                here.shared = _longer(computed.find(span.root, span.tokens), cached)
                computed.add(span)
            elif cached is not None and cached.source.is_ready:
                here.shared = cached

    def _find_cached(
        self, here: CacheHit, root: Key, usable: bytes, keys: Iterable[Key] | KeyChain, closed: bool
    ) -> None:
        """Finds the cached blocks of a span.

        Args:
            here: receives them.
            root: key of the span before its first token.
            usable: the tokens of the span that need not be computed; see `num_usable`.
            keys: of its full blocks, as far as they may be cached; or a generator of them.
            closed: whether no token will be appended to the span.
        """
        if self._prefix is None:
            return
        width = self._prefix.pool.block_size * TOKEN_BYTES
        blocks = [usable[first : first + width] for first in range(0, len(usable) - width + 1, width)]
        if isinstance(keys, KeyChain):
            keys = _chained(keys, root, blocks)
        here.entries = self._prefix.match(root, keys, blocks)
        rest = usable[len(here.entries) * width :]
        parent = here.entries[-1] if here.entries else None
        if self._has_states:
            self._find_state(here, root, parent, rest, closed)
        elif not closed:
            here.source, here.num_copied = self._prefix.nearest(root, parent, rest[: width - TOKEN_BYTES])
        elif 0 < len(rest) < width and (last := self._prefix.covering(root, parent, rest)) is not None:
            here.entries.append(last)

    def _find_state(self, here: CacheHit, root: Key, parent: PrefixEntry | None, rest: bytes, closed: bool) -> None:
        """Finds the last cached state of a span: it is computed from there on, whatever else is cached."""
        assert self._prefix is not None
        tail = self._prefix.with_state(root, parent, rest) if rest else None
        if tail is not None and not closed:
            here.source, here.num_copied, here.state = tail, len(tail.tokens) // TOKEN_BYTES, tail.state
            return
        if tail is not None and tail.tokens == rest:
            here.entries.append(tail)
        here.end_with_a_state()

    def _plan_chunk(self, draft: _Draft, index: int) -> SpanPlan:
        started = self._clock()
        span = draft.layout.spans[index]
        tokens, root = encode_tokens(span.token_ids), draft.root(index)
        key, chunk = self._chunks.find(draft.chain, root, tokens, draft.missing)
        action: Action = "compute"
        block_ids: Sequence[BlockId] = chunk.block_ids if chunk is not None else ()
        num_reused = span.num_tokens
        if chunk is not None:
            action = "reuse" if chunk.is_ready else "wait"
        elif key in draft.missing:
            action = "wait"
        else:
            block_ids, num_reused = self._find_start(draft, root, tokens)
        plan = SpanPlan(
            index=index,
            kind=span.segment.kind,
            name=span.segment.name,
            action=action,
            num_tokens=span.num_tokens,
            num_reused=num_reused,
            distance=draft.distances.get(index, 0),
            block_ids=tuple(block_ids),
            key=key,
            identity=_identity(draft.chain, key, root, tokens, chunk),
            root=root,
            block_keys=(),
            tokens=tokens,
        )
        if action == "compute":
            draft.missing[key] = (root, tokens)
            draft.starts.add(plan)
        self._counters.planned_chunks += 1
        self._counters.lookup_seconds += self._clock() - started
        return plan

    def _find_start(self, draft: _Draft, root: Key, tokens: bytes) -> tuple[Sequence[BlockId], int]:
        """The cached blocks that a missing chunk shares, and how many tokens it shares with any chunk."""
        inside, cached = draft.starts.find(root, tokens), self._chunks.starts.find(root, tokens)
        shared = None if self._has_states else _longer(cached, inside)
        if shared is None:
            return (), 0
        block_ids = shared.source.block_ids[: shared.num_blocks]
        return block_ids, shared.num_blocks * self._chunks.pool.block_size

    def _plan_prefix(self, draft: _Draft, index: int) -> SpanPlan:
        span = draft.layout.spans[index]
        tokens, root, closed = encode_tokens(span.token_ids), draft.root(index), is_closed(draft.layout, index)
        here = CacheHit()
        usable = tokens[: num_usable(draft.layout, index) * TOKEN_BYTES]
        self._find_cached(here, root, usable, draft.chain, closed)
        size = self._prefix.pool.block_size if self._prefix is not None else 0
        num_reused = min(len(here.entries) * size, span.num_tokens) + here.num_copied
        key = draft.chain.run_encoded(root, tokens) if closed else root
        return SpanPlan(
            index=index,
            kind=span.segment.kind,
            name=span.segment.name,
            action="reuse" if num_reused == span.num_tokens else "compute",
            num_tokens=span.num_tokens,
            num_reused=num_reused,
            distance=draft.distances.get(index, 0),
            block_ids=tuple(entry.block_id for entry in here.entries),
            key=key,
            identity=key,
            root=root,
            block_keys=tuple(entry.key for entry in here.entries),
            tokens=tokens,
            num_copied=here.num_copied,
        )


def _longer(
    one: SharedStart[Chunk | SpanPlan] | None, other: SharedStart[Chunk | SpanPlan] | None
) -> SharedStart[Chunk | SpanPlan] | None:
    """The longer of two starts; of equal ones the first."""
    if one is None or other is None:
        return one or other
    return other if other.num_blocks > one.num_blocks else one


def _identity(chain: KeyChain, key: Key, root: Key, tokens: bytes, chunk: Chunk | None) -> Key:
    """The identity of a chunk in later keys; a cached chunk stores it, so a hit needs no slow hash."""
    if chunk is not None:
        return chunk.identity
    return key if chain.algorithm == "sha256" else chain.run_encoded(root, tokens)


def _without_idle_companions(layout: Layout, spans: list[SpanPlan]) -> Iterator[SpanPlan]:
    """The spans of a plan; a companion that no chunk needs takes no blocks and is not computed."""
    computed = [span.index for span in spans if span.action == "compute" and span.kind is not SegmentKind.COMPANION]
    needed = {view.span for index in computed for view in layout.spans[index].views}
    for span in spans:
        if span.kind is SegmentKind.COMPANION and span.index not in needed:
            span = replace(span, action="reuse", num_tokens=0, num_reused=0, block_ids=(), block_keys=(), tokens=b"")
        yield span


def _chained(chain: KeyChain, root: Key, blocks: list[bytes]) -> Iterator[Key]:
    key = root
    for tokens in blocks:
        key = chain.extend_encoded(key, tokens)
        yield key
