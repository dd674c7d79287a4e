"""Looking a layout up: what of it is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import TOKEN_BYTES, Key, KeyChain, encode_tokens
from kvmosaic.cache.plan import Action, Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache, PrefixEntry
from kvmosaic.cache.statistics import Counters
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind


@dataclass(slots=True)
class Found:
    """What a span of a plan finds in the caches now."""

    entries: list[PrefixEntry] = field(default_factory=list)
    chunk: Chunk | None = None


@dataclass(slots=True)
class _Draft:
    """A plan being written."""

    layout: Layout
    chain: KeyChain
    distances: dict[int, int]
    spans: list[SpanPlan] = field(default_factory=list)
    missing: dict[Key, tuple[Key, bytes]] = field(default_factory=dict)
    """Chunks this plan computes: key -> root and tokens."""

    def root(self, index: int) -> Key:
        """What a span saw: the keys of earlier spans, which are in the plan by now."""
        span = self.layout.spans[index]
        return self.chain.root(span.start, [(self.spans[view.span].key, view.distance) for view in span.views])


def is_closed(layout: Layout, index: int) -> bool:
    """Whether nothing will ever be written behind a span: a system prompt, a chunk, or any span but the last."""
    kind = layout.spans[index].segment.kind
    return kind in (SegmentKind.SYSTEM, SegmentKind.CHUNK) or index < len(layout.spans) - 1


class Lookup:
    """Turns layouts into plans. Reads the caches and changes nothing in them."""

    def __init__(
        self, chunks: ChunkIndex, prefix: PrefixCache | None, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._chunks = chunks
        self._prefix = prefix
        self._counters = counters
        self._clock = clock

    def plan(self, layout: Layout, salt: str, tenant: str, chain: KeyChain) -> Plan:
        """Looks every span up, in order: the keys of later spans are made from those of the spans they see."""
        draft = _Draft(layout, chain, {view.span: view.distance for view in layout.last.views})
        for index, span in enumerate(layout.spans):
            is_chunk = span.segment.kind is SegmentKind.CHUNK
            draft.spans.append(self._plan_chunk(draft, index) if is_chunk else self._plan_prefix(draft, index))
        return Plan(layout, salt, tuple(draft.spans), tenant)

    def again(self, plan: Plan) -> list[Found] | None:
        """What the spans of an older plan find now; None if a key of it has been taken by other tokens since."""
        found: list[Found] = []
        for span in plan.spans:
            chunk = self._chunks.get(span.key) if span.is_chunk else None
            if chunk is not None and not self._chunks.is_same(chunk, span.root, span.tokens):
                return None
            entries: list[PrefixEntry] = []
            if self._prefix is not None and span.block_keys:
                blocks = _split(span.tokens, self._prefix.pool.block_size, len(span.block_keys))
                entries = self._prefix.match(span.root, span.block_keys, blocks)
            found.append(Found(entries, chunk))
        return found

    def _plan_chunk(self, draft: _Draft, index: int) -> SpanPlan:
        started = self._clock()
        span = draft.layout.spans[index]
        tokens, root = encode_tokens(span.token_ids), draft.root(index)
        key, chunk = self._chunks.find(draft.chain, root, tokens, draft.missing)
        action: Action = "compute"
        if chunk is not None:
            action = "reuse" if chunk.is_ready else "wait"
        elif key in draft.missing:
            action = "wait"
        else:
            draft.missing[key] = (root, tokens)
        self._counters.planned_chunks += 1
        self._counters.lookup_seconds += self._clock() - started
        return SpanPlan(
            index=index,
            kind=span.segment.kind,
            name=span.segment.name,
            action=action,
            num_tokens=span.num_tokens,
            num_reused=0 if action == "compute" else span.num_tokens,
            distance=draft.distances.get(index, 0),
            block_ids=tuple(chunk.block_ids) if chunk is not None else (),
            key=key,
            root=root,
            block_keys=(),
            tokens=tokens,
        )

    def _plan_prefix(self, draft: _Draft, index: int) -> SpanPlan:
        span = draft.layout.spans[index]
        tokens, root, closed = encode_tokens(span.token_ids), draft.root(index), is_closed(draft.layout, index)
        entries: list[PrefixEntry] = []
        num_reused = 0
        if self._prefix is not None:
            size = self._prefix.pool.block_size
            blocks = _split(tokens, size, -(-span.num_tokens // size) if closed else span.num_tokens // size)
            entries = self._prefix.match(root, _chained(draft.chain, root, blocks), blocks)
            num_reused = min(len(entries) * size, span.num_tokens)
            if num_reused == span.num_tokens and index == len(draft.layout.spans) - 1:
                # The next token comes from the last one's logits, so one token at least must run.
                entries.pop()
                num_reused = len(entries) * size
        return SpanPlan(
            index=index,
            kind=span.segment.kind,
            name=span.segment.name,
            action="reuse" if num_reused == span.num_tokens else "compute",
            num_tokens=span.num_tokens,
            num_reused=num_reused,
            distance=draft.distances.get(index, 0),
            block_ids=tuple(entry.block_id for entry in entries),
            key=draft.chain.run_encoded(root, tokens) if closed else root,
            root=root,
            block_keys=tuple(entry.key for entry in entries),
            tokens=tokens,
        )


def _split(tokens: bytes, block_size: int, num_blocks: int) -> list[bytes]:
    width = block_size * TOKEN_BYTES
    return [tokens[i * width : (i + 1) * width] for i in range(num_blocks)]


def _chained(chain: KeyChain, root: Key, blocks: list[bytes]) -> Iterator[Key]:
    key = root
    for tokens in blocks:
        key = chain.extend_encoded(key, tokens)
        yield key
