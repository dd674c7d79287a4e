"""A small world for KV cache tests: a clock, prompts in one line, and an engine whose memory is a dictionary."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmosaic.cache import Allocation, BlockCopy, BlockPool, KeyChain, KVCache, SpanAllocation
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.layout import ChunkContext, Layout, arrange
from kvmosaic.prompt import Prompt, SegmentKind


class Clock:
    """A clock that stands still until it is told to move on."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def layout_of(
    system: Sequence[int] | None,
    chunks: Sequence[Sequence[int]],
    question: Sequence[int],
    *,
    names: Sequence[str] | None = None,
    strategy: str = "shared",
    context: ChunkContext = "system",
    sees: Mapping[int, tuple[int, ...]] | None = None,
) -> Layout:
    """A composed prompt, placed; `sees` tells which earlier chunks a chunk sees."""
    prompt = Prompt.from_tokens(system, chunks, question, names=names)
    if sees:
        first = system is not None
        segments = [replace(s, sees=sees.get(i - first, ())) for i, s in enumerate(prompt.segments)]
        prompt = Prompt(tuple(segments))
    return arrange(prompt, strategy, context)


def plain(token_ids: Sequence[int]) -> Layout:
    return arrange(Prompt.plain(token_ids))


def warm_up(system: Sequence[int], *chunks: Sequence[int]) -> Layout:
    """A layout without a question: its last span is a chunk."""
    full = layout_of(system, chunks, [1])
    return Layout(full.spans[:-1], full.strategy, full.chunk_context)


def make_kv_cache(
    *,
    block_size: int = 4,
    request_blocks: int = 64,
    chunk_blocks: int = 64,
    prefix_caching: bool = True,
    clock: Clock | None = None,
    block_key_bytes: int | None = None,
    bytes_per_block: int = 1,
    **config: object,
) -> KVCache:
    """A small KV cache; `block_key_bytes` shortens the keys of prefix blocks so much that they collide."""
    kv_cache = KVCache(
        "model",
        ChunkCacheConfig(block_size=block_size, **config),
        request_blocks=request_blocks,
        chunk_blocks=chunk_blocks,
        prefix_caching=prefix_caching,
        bytes_per_block=bytes_per_block,
        clock=clock or Clock(),
    )
    if block_key_bytes is not None:
        make_chain = kv_cache._chain

        def short_chain(salt: str, tenant: str, layout: Layout) -> KeyChain:
            chain = make_chain(salt, tenant, layout)
            whole = chain._digest
            chain._digest = lambda data: whole(data)[:block_key_bytes]
            return chain

        kv_cache._chain = short_chain
    return kv_cache


def compute_all(kv_cache: KVCache, allocation: Allocation) -> None:
    """One step that computes whatever this allocation must compute."""
    kv_cache.begin_step()
    for span in allocation.spans:
        if span.can_advance:
            kv_cache.advance(allocation, span.index, span.num_tokens - span.num_computed)
    kv_cache.end_step()


def warmed(kv_cache: KVCache, layout: Layout, salt: str = "", tenant: str = "", *, goes_on: bool = False) -> None:
    """Runs a prompt from beginning to end, so that what can be cached is cached."""
    allocation = kv_cache.allocate(kv_cache.plan(layout, salt, tenant))
    compute_all(kv_cache, allocation)
    kv_cache.release(allocation, goes_on=goes_on)


def state_of(kv_cache: KVCache) -> object:
    """Everything a failing operation must leave as it was (not the counters of lookups)."""
    prefix, chunks = kv_cache._prefix, kv_cache._chunks
    return {
        "references": [list(pool._references) for pool in (kv_cache.request_pool, kv_cache.chunk_pool)],
        "free runs": [pool._free.runs() for pool in (kv_cache.request_pool, kv_cache.chunk_pool)],
        "prefix": {
            key: (e.block_id, e.ref_count, e.last_used, len(e.children or ())) for key, e in prefix._entries.items()
        },
        "prefix line": [entry.key for entry in prefix._queue.in_order()],
        "chunks": {
            c.key: (
                tuple(c.block_ids),
                c.state,
                c.ref_count,
                c.hits,
                c.pinned,
                c.last_used,
                c.num_computed,
                tuple(c.names),
            )
            for c in chunks.chunks()
        },
        "chunk lines": [[c.key for c in account.in_order()] for account in (chunks.total, *chunks._accounts.values())],
        "accounts": {t: (a.num_chunks, a.num_blocks, a.num_pinned_blocks) for t, a in chunks._accounts.items()},
        "names": {place: chunks._names.members(place) for place in chunks._names},
        "evictions": (prefix.num_evictions, chunks.num_evictions),
    }


def allocation_state(allocation: Allocation) -> object:
    """What an operation that fails must leave as it was in one allocation."""
    return [
        (tuple(s.table.block_ids), s.num_tokens, s.num_computed, bytes(s.tokens), len(s.entries), s.table.runs())
        for s in allocation.spans
    ]


@dataclass(eq=False)
class Reader:
    """One sequence of the simulated engine, with what it should read back."""

    layout: Layout
    salt: str
    allocation: Allocation
    expected: list[list[Hashable]]
    """Per span and token: what its keys and values depend on."""
    token_ids: list[list[int]]


@dataclass
class Memory:
    """Device memory as two dictionaries, slot -> value, and the identity of every value, worked out without keys.

    The value of a token stands for its keys and values. It is made of everything they depend on (tenant, position,
    tokens before it in its span, values and distances of all it saw), so reading back the right values from the right
    slots means that no block was shared, kept or overwritten wrongly.
    """

    slots: dict[tuple[str, int], Hashable] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, identity: Hashable) -> int:
        """A small number for an identity: equal for equal ones."""
        return self._numbers.setdefault(identity, len(self._numbers))

    def expected(self, layout: Layout, salt: str, tenant: str = "") -> list[list[Hashable]]:
        values: list[list[Hashable]] = []
        for span in layout.spans:
            seen = sorted((values[view.span][-1], view.distance) for view in span.views)
            before = self.number(("root", tenant, salt, span.start, tuple(seen)))
            values.append(self.chained(before, span.token_ids))
        return values

    def chained(self, before: Hashable, token_ids: Sequence[int]) -> list[Hashable]:
        row = []
        for token in token_ids:
            before = self.number((before, token))
            row.append(before)
        return row

    def write(self, span: SpanAllocation, first: int, values: Sequence[Hashable]) -> None:
        name = span.table.pool.name
        for slot, value in zip(span.table.slots(first, len(values)), values, strict=True):
            self.slots[name, slot] = value

    def copy(self, pool: BlockPool, copies: Sequence[BlockCopy]) -> None:
        for source, target in copies:
            for offset in range(pool.block_size):
                value = self.slots.get((pool.name, source * pool.block_size + offset))
                self.slots[pool.name, target * pool.block_size + offset] = value

    def check(self, reader: Reader) -> None:
        for span, values in zip(reader.allocation.spans, reader.expected, strict=True):
            if span.chunk is not None and span.chunk.lacks_start:
                continue
            name = span.table.pool.name
            spelled = [
                self.slots.get((name, slot))
                for run in span.table.runs(span.num_computed)
                for slot in range(run.first_slot, run.first_slot + run.num_tokens)
            ]
            assert spelled == values[: span.num_computed], f"{span.kind} span {span.index} reads what it did not write"


def is_chunk(span: SpanAllocation) -> bool:
    return span.kind is SegmentKind.CHUNK
