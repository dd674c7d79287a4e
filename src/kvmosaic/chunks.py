"""Chunk handles: cached documents that a caller can pin, delete and combine in any order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvmosaic.attention import Piece
from kvmosaic.cache import Chunk, Key
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.engine.row_builder import run_reads
from kvmosaic.errors import ChunkCacheOff, ChunkTooLong, EngineAsleep, InvalidConfig, UnknownChunk
from kvmosaic.layout import ChunkContext, Span
from kvmosaic.prompt import Prompt, PromptEncoder, Segment, SegmentKind
from kvmosaic.prompt.document import MAX_POSITION
from kvmosaic.prompt.segment import whole_numbers

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

MAX_WARMED_TOKENS = 2**22
"""Tokens of warmed prompts that are remembered, so that their chunks can be woken by name."""


@dataclass(frozen=True, slots=True)
class ChunkHandle:
    """A cached chunk, as used in a prompt: `Prompt((system, a.segment, b.segment, question))`.

    A handle stays valid when its chunk is evicted: the next prompt that uses it computes it again.
    """

    segment: Segment
    """Its tokens, its name and, for the strategy `absolute`, its place."""
    was_cached: bool
    """Whether it was a cache hit."""
    key: Key
    """Key of its chunk in the cache: that of its tokens, what they saw, and their position."""

    @property
    def name(self) -> str | None:
        """Its name."""
        return self.segment.name

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.segment.num_tokens

    @property
    def position_offset(self) -> int | None:
        """The position its keys were baked at, if it was given."""
        return self.segment.position_offset


class ChunkStore:
    """The cached chunks of an engine: create, inspect, pin, evict and delete them.

        handle = llm.chunks["guide"]           the latest chunk with this name; else UnknownChunk, a KeyError
        "guide" in llm.chunks                  whether one is cached on the device
        for name in llm.chunks: ...            all names

    Names are looked up without a salt, as `warm` and `create` give them by default; the methods take `salt`.
    """

    def __init__(self, engine: Engine, encoder: PromptEncoder, config: ChunkCacheConfig, off_reason: str = "") -> None:
        """Wraps the chunks of an engine; `off_reason` says why it caches none, if so."""
        self._engine = engine
        self._encoder = encoder
        self._config = config
        self._off_reason = off_reason
        self._warmed = _WarmedPrompts()

    def __getitem__(self, name: str) -> ChunkHandle:
        """A handle of the latest chunk with this name. Raises UnknownChunk."""
        chunk = self._engine.kv_cache.find_chunks(name)[-1]
        token_ids = chunk.token_ids
        known = (prompt.chunks[0] for prompt, _, _ in reversed(self._warmed.named(name, "")))
        found = next((segment for segment in known if segment.token_ids == token_ids), None)
        return ChunkHandle(found or Segment(SegmentKind.CHUNK, token_ids, name=name), True, chunk.key)

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self._engine.kv_cache.find_chunks(name))
        except UnknownChunk:
            return False

    def __iter__(self) -> Iterator[str]:
        found = (chunk for chunk in self.entries() if not chunk.salt and not chunk.tenant)
        return iter(dict.fromkeys(name for chunk in found for name in chunk.names))

    def __len__(self) -> int:
        return len(self.entries())

    def __bool__(self) -> bool:
        return True

    def create(
        self,
        tokens: Sequence[int] | str,
        *,
        name: str | None = None,
        system: Sequence[int] | str | None = None,
        position_offset: int | None = None,
        priority: float | None = None,
        chunk_context: ChunkContext | None = None,
        salt: str = "",
    ) -> ChunkHandle:
        """Computes one chunk (or finds it) and returns a handle.

        Args:
            tokens: token ids (a list, an array of numpy or a tensor of torch), or text.
            name: what to call it.
            system: the system prompt it sees, as in the prompts that use it.
            position_offset: bake the keys at this place; the strategy is then `absolute`.
            priority: how much it should stay in a full cache, 0 to 1; None: 0.5, or as it is.
            chunk_context: what it sees, instead of the configured one; prompts must say the same.
            salt: tenant salt of the prompts that use it.

        Raises:
            InvalidPrompt: empty, too long, unknown token ids, or an offset inside the system prompt.
            ChunkCacheFull: it can never fit.
        """
        parts = [] if system is None else [_segment(SegmentKind.SYSTEM, system)]
        chunk = replace(
            _segment(SegmentKind.CHUNK, tokens), name=name, position_offset=position_offset, priority=priority
        )
        question = Segment(SegmentKind.QUESTION, (0,))
        prompt = self._encoder.encode(Prompt((*parts, chunk, question), salt=salt))
        if len(prompt.chunks) > 1:
            raise ChunkTooLong(
                f"{chunk.label} does not fit into one chunk and was split into {len(prompt.chunks)}; "
                "raise max_chunk_tokens, or use warm, which returns one handle per part"
            )
        if position_offset is not None:
            return self._warm([prompt], "absolute", chunk_context, None)[0]
        return self.warm([prompt], chunk_context=chunk_context)[0]

    def warm(
        self,
        prompts: Sequence[Prompt],
        progress: Callable[[int, int], None] | None = None,
        *,
        chunk_context: ChunkContext | None = None,
    ) -> list[ChunkHandle]:
        """Computes all chunks of tokenized prompts, each on its own, so that they need not fit in memory together.

        Each is computed for every place that changes its companions; its handle is that of the first place.
        """
        handles = list[ChunkHandle]()
        with_places = (chunk_context or self._config.context_in()) == "companions"
        singles = [single for prompt in prompts for single in prompt.singles(with_places=with_places)]
        for single, handle in zip(singles, self._warm(singles, None, chunk_context, progress), strict=True):
            handles += [] if single.place else [handle]
        return handles

    def entries(self) -> list[Chunk]:
        """All cached chunks, oldest first."""
        return self._engine.kv_cache.chunks()

    def get_kv(self, handle: ChunkHandle, layer: int) -> tuple[Float[Tensor, "n G D"], Float[Tensor, "n G Dv"]]:
        """Keys and values of a chunk in one layer, as the model computed them at the chunk's own position.

        They are views of the cache if the chunk's blocks are neighbours, as they usually are, otherwise copies. Views
        hold what they show while the chunk is cached; pin it, or hold it by a running request. Never write into them.

        Args:
            handle: of the chunk.
            layer: number of the layer, from 0.

        Returns:
            keys [n, G, D], rotated, and values [n, G, Dv]. A latent layer (MLA) has one head, its latent and rotary
            part, and the values are the latent.

        Raises:
            UnknownChunk: it is not cached any more, or not complete.
            InvalidConfig: no such layer.
            EngineAsleep: the caches are offloaded.
        """
        chunk = self._chunk(handle)
        return self._engine.runner.storages["chunk_cache"].get_kv(layer, chunk.table.runs())

    def pieces(self, handle: ChunkHandle, position: int | None = None) -> tuple[Piece, ...]:
        """What attention reads of a chunk: runs of neighbouring slots, usually one.

        Args:
            handle: of the chunk.
            position: where the reader sees its first token; None: where it was computed.

        Raises:
            UnknownChunk, EngineAsleep: see `get_kv`.
            InvalidConfig: a position outside its range.
        """
        chunk = self._chunk(handle)
        if position is None:
            position = chunk.start
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= MAX_POSITION:
            raise InvalidConfig(f"a position is a whole number from 0 to {MAX_POSITION}, got {position!r:.80}")
        return run_reads(Span(handle.segment, chunk.start), chunk.table, position - chunk.start, chunk.num_tokens)

    def _chunk(self, handle: ChunkHandle) -> Chunk:
        """The complete chunk of a handle."""
        if self._engine.is_asleep:
            raise EngineAsleep("the engine sleeps, and its caches are offloaded; wake it first")
        (chunk,) = self._engine.kv_cache.find_chunks(handle.key, None)
        if not chunk.is_ready:
            raise UnknownChunk(f"{handle.segment.label} is still being computed; ask for it when it is complete")
        return chunk

    def pin(self, name: str, *, salt: str = "", tenant: str = "") -> int:
        """Protects the chunks with this name from eviction; returns how many. Raises UnknownChunk."""
        return self._engine.kv_cache.pin(name, salt, tenant)

    def unpin(self, name: str, *, salt: str = "", tenant: str = "") -> int:
        """Lets the chunks with this name be evicted again; returns how many. Raises UnknownChunk."""
        return self._engine.kv_cache.unpin(name, salt, tenant)

    def set_priority(self, name: str, priority: float, *, salt: str = "", tenant: str = "") -> int:
        """Sets the eviction priority of the chunks with this name that are cached now, from 0 to 1; returns how many.

        For the policy "priority"; initially 0.5. A document's field `priority` also applies to later ones.

        Raises:
            UnknownChunk: no cached chunk has this name.
            InvalidConfig: a priority outside its range.
        """
        return self._engine.kv_cache.set_priority(name, priority, salt, tenant)

    def delete(self, name: str, *, salt: str = "", tenant: str = "") -> int:
        """Drops the chunks with this name, from the tiers as well; returns how many. Raises UnknownChunk or ChunkInUse.

        Chunks that only the tiers have are known by name if this process stored or used them.
        """
        offloader = self._engine.offloader
        try:
            num_deleted = self._engine.kv_cache.delete(name, salt, tenant)
        except UnknownChunk:
            if offloader is None or not (num_deleted := offloader.delete_named(name, salt, tenant)):
                raise
            return num_deleted
        return num_deleted + (offloader.delete_named(name, salt, tenant) if offloader is not None else 0)

    def evict(self, name: str, *, salt: str = "", tenant: str = "") -> int:
        """Evicts the chunks with this name from the device, into the tiers if there are any; returns how many.

        Their next use, or `wake`, brings them back. Raises UnknownChunk, or ChunkInUse: in use, or pinned.
        """
        return self._engine.kv_cache.evict(name, salt, tenant)

    def evict_oldest(self, count: int = 1) -> int:
        """Evicts up to `count` chunks, the longest unused first, into the tiers if there are any; returns how many.

        Pinned chunks and chunks in use stay.
        """
        cache = self._engine.kv_cache
        idle = [chunk for chunk in self.entries() if chunk.is_ready and not chunk.ref_count and not chunk.pinned]
        oldest = sorted(idle, key=lambda chunk: chunk.last_used)[: max(count, 0)]
        return sum(cache.evict(chunk.key, None, chunk.tenant) for chunk in oldest)

    def wake(self, name: str, *, salt: str = "") -> list[ChunkHandle]:
        """Brings the chunks with this name back to the device: from a tier, or computed again; returns their handles.

        Raises:
            UnknownChunk: no chunk of this name was warmed or created here, or that was very long ago.
        """
        if not (known := self._warmed.named(name, salt)):
            raise UnknownChunk(f"no chunk called {name!r:.80} was warmed or created here; warm it with its text")
        return [
            handle for prompt, strategy, context in known for handle in self._warm([prompt], strategy, context, None)
        ]

    def clear(self) -> int:
        """Deletes all chunks that no request uses, pinned ones too, from the tiers as well; returns how many.

        Entries of other processes stay in the tiers.
        """
        idle = [chunk for chunk in self.entries() if not chunk.ref_count]
        for chunk in idle:
            self._engine.kv_cache.delete(chunk.key, None, chunk.tenant)
        if self._engine.offloader is not None:
            self._engine.offloader.delete_known()
        self._warmed.clear()
        return len(idle)

    def _warm(
        self,
        prompts: Sequence[Prompt],
        strategy: str | None,
        context: ChunkContext | None,
        progress: Callable[[int, int], None] | None,
    ) -> list[ChunkHandle]:
        if self._off_reason:
            raise ChunkCacheOff(f"no chunk can be kept, the chunk cache is off: {self._off_reason}")
        for prompt in prompts:
            self._warmed.note(prompt, strategy, context)
        requests = (
            self._engine.add_warm_up(prompt, position_strategy=strategy, chunk_context=context) for prompt in prompts
        )
        return [self._handle(request) for request in self._engine.run(requests, progress)]

    def _handle(self, request: Request) -> ChunkHandle:
        """The handle of a finished warm-up of one chunk."""
        prompt = request.prompt
        plan = self._engine.kv_cache.plan(request.layout, prompt.salt, prompt.tenant)
        return ChunkHandle(prompt.chunks[0], request.reuse.segments[-1].reused_tokens > 0, plan.spans[-1].key)


_Warmed = tuple[Prompt, str | None, ChunkContext | None]


class _WarmedPrompts:
    """Prompts of one chunk each that were warmed, by salt and name; the latest ones, at most so many tokens."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[str, str, int, tuple[Segment, ...]], _Warmed] = OrderedDict()
        self._num_tokens = 0

    def note(self, prompt: Prompt, strategy: str | None, context: ChunkContext | None) -> None:
        for chunk in prompt.chunks:
            if chunk.name is None:
                continue
            key = (prompt.salt, chunk.name, prompt.place, prompt.segments)
            self._num_tokens += prompt.num_tokens if self._prompts.pop(key, None) is None else 0
            self._prompts[key] = (prompt, strategy, context)
        while self._num_tokens > MAX_WARMED_TOKENS:
            self._num_tokens -= self._prompts.popitem(last=False)[1][0].num_tokens

    def named(self, name: str, salt: str) -> list[_Warmed]:
        return [known for (own, label, *_), known in self._prompts.items() if own == salt and label == name]

    def clear(self) -> None:
        self._prompts.clear()
        self._num_tokens = 0


def _segment(kind: SegmentKind, content: Sequence[int] | str) -> Segment:
    return Segment(kind, text=content) if isinstance(content, str) else Segment(kind, whole_numbers(content))
