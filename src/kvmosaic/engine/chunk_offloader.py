"""ChunkOffloader: offloads chunks to the tiers, remembers their names, and prefetches them for waiting requests."""

from __future__ import annotations

import logging
import re
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvmosaic.cache import Chunk, Key, KVCache, Plan, SpanPlan
from kvmosaic.cache.groups import Groups
from kvmosaic.engine.chunk_entries import ChunkEntries, ChunkSource
from kvmosaic.engine.sequence import Sequence
from kvmosaic.errors import UnknownChunk
from kvmosaic.tiers import ComputeCost, Fetch, Rank, TieredStore

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import SlotStorage, StateStorage
    from kvmosaic.memory import ChunkTensors


MAX_KEYS = 1_000_000
"""Beyond that, the oldest are dropped; each takes a few hundred bytes."""
MAX_NAMES = 64
"""Most names of one chunk; beyond that, the oldest are dropped."""
_PART = re.compile(r" \([0-9]+/[0-9]+\)$")


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: str
    salt: str
    names: tuple[str, ...]


class OffloadedKeys:
    """Names of the chunks that this process offloaded to the tiers, or fetched from there.

        (tenant, name without its part) -> keys        "guide (2/3)" is found by "guide", too
        key -> tenant, salt, names                      at most `max_keys`

    The KV cache drops the names of a chunk on eviction, and a tier stores keys only; with this index a document can be
    deleted everywhere by its name. Chunks stored by other processes are not known.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        """Not a plain dict, whose deleted entries must be skipped to find the oldest."""
        self._keys: Groups[tuple[str, str], Key] = Groups()

    def __len__(self) -> int:
        return len(self._known)

    def keys(self) -> list[Key]:
        """All keys that are known."""
        return list(self._known)

    def note(self, chunk: Chunk) -> None:
        """Records the names of a chunk; earlier names stay."""
        before = self._known.get(chunk.key)
        names = tuple(dict.fromkeys((*(before.names if before else ()), *chunk.names)))[-MAX_NAMES:]
        if not names or (before is not None and before.names == names):
            return
        self.discard(chunk.key)
        self._known[chunk.key] = _Known(chunk.tenant, chunk.salt, names)
        for place in _places(chunk.tenant, names):
            self._keys.add(place, chunk.key)
        if len(self._known) > self._max_keys:
            self.discard(next(iter(self._known)))

    def discard(self, key: Key) -> None:
        """Removes a key; safe for an unknown one."""
        if (known := self._known.pop(key, None)) is None:
            return
        for place in _places(known.tenant, known.names):
            self._keys.discard(place, key)

    def named(self, name: str, salt: str | None, tenant: str, *, with_parts: bool = False) -> list[Key]:
        """The keys of a tenant's chunks with this name, under one salt or (None) any.

        `with_parts`: also the chunks of a split document's parts.
        """
        found = []
        for key in self._keys.members((tenant, _whole(name))):
            known = self._known[key]
            is_named = name in known.names or (with_parts and any(_whole(other) == name for other in known.names))
            if is_named and salt in (None, known.salt):
                found.append(key)
        return found

    def names(self, key: Key) -> tuple[str, ...]:
        """Names of a chunk, oldest first; empty if its key is not known."""
        known = self._known.get(key)
        return () if known is None else known.names

    def check_invariants(self) -> None:
        """Checks both maps against each other (for tests)."""
        assert len(self._known) <= self._max_keys
        pairs = {(place, key) for key, known in self._known.items() for place in _places(known.tenant, known.names)}
        assert pairs == {(place, key) for place in self._keys for key in self._keys.members(place)}
        assert all(self._keys.members(place) for place in self._keys)


def _places(tenant: str, names: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(tenant, _whole(name)) for name in names}


def _whole(name: str) -> str:
    """Document name without the part number of a chunk."""
    return _PART.sub("", name)


logger = logging.getLogger("kvmosaic")


@dataclass(slots=True, eq=False)
class StagedChunk:
    """A chunk being fetched, or already fetched, for waiting sequences."""

    fetch: Fetch[ChunkSource]
    num_holders: int = 0


class ChunkOffloader:
    """Connects the KV cache with the tiers.

        chunk is complete       on_computed ──▶ written in the background to the persistent tiers
        chunk is evicted           on_evict ──▶ copied, written in the background to the other tiers
        request is queued          prefetch ──▶ fetches cache misses, if that is faster than computing them
        request is allocated           load ──▶ copies what has arrived into its blocks, the rest is computed

    A complete chunk is read from its blocks by the writer thread. Only if its blocks are reused before that, it is
    copied on the engine's thread, between two steps. All slower work happens on the threads of the tiered store.
    Errors in here never fail a request: a chunk that cannot be offloaded is recomputed when it is needed.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        storage: SlotStorage,
        tiered_store: TieredStore[ChunkSource],
        entries: ChunkEntries,
        *,
        max_staged_bytes: int,
        states: StateStorage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Registers for the KV cache's evictions.

        Args:
            kv_cache: KV cache of the engine.
            storage: block storage of the chunk pool.
            tiered_store: the tiers.
            entries: serializes chunks.
            max_staged_bytes: max bytes of chunks fetched for waiting requests; beyond that a fetch begins only when
                its request is next.
            states: reads and writes what documents do to states, for models with states.
            clock: the engine's clock.
        """
        self.tiered_store = tiered_store
        self.kept = OffloadedKeys()
        """Names and keys of the chunks in the tiers, as far as this process knows them."""
        self._kv_cache = kv_cache
        self._storage = storage
        self._entries = entries
        self._states, self._state_bytes = states, entries.state_bytes
        self._max_staged_bytes = max_staged_bytes
        self._staged_bytes = 0
        self._staged: dict[Key, StagedChunk] = {}
        self._sources: WeakValueDictionary[Chunk, ChunkSource] = WeakValueDictionary()
        """Chunks still to be written, whose data may be in their blocks; the tiered store references them till then."""
        self._crowded_out: Sequence | None = None
        """The next sequence, if there is no room to stage its chunks: later ones do not prefetch until there is."""
        self._num_ended = 0
        """Completed fetches at the last check for sequences that need not wait any longer."""
        self._clock = clock
        self._compute = ComputeCost()
        self._bytes_per_token = storage.bytes_per_block // storage.block_size
        kv_cache.notify(evicted=self.on_evict, deleted=self.on_delete, freed=self.on_free)
        weakref.finalize(self, tiered_store.orphan).atexit = False

    def reserve_staging(self, sequence: Sequence, plan: Plan) -> bool:
        """Reserves the staging area for the cache misses of the next sequence; False if others take too much of it.

        Then later sequences do not prefetch until this one has room, so that it is not starved.
        """
        num_bytes = self._new_bytes(sequence, self._missing(sequence, plan))
        has_room = not num_bytes or not self._staged_bytes or self._staged_bytes + num_bytes <= self._max_staged_bytes
        self._crowded_out = None if has_room else sequence
        return has_room

    def prefetch(self, sequence: Sequence, plan: Plan | None = None) -> bool:
        """Starts to fetch the cache misses of a sequence; returns whether it should wait.

        Args:
            sequence: a waiting sequence; chunks already fetched for it are not fetched again.
            plan: its newest plan, if it is to run next. Without one this is an early prefetch, which is skipped if the
                staging area is full.
        """
        is_next = plan is not None
        if not is_next and (self._crowded_out is not None or self._staged_bytes >= self._max_staged_bytes):
            return False
        if plan is None:
            prompt = sequence.request.prompt
            plan = self._kv_cache.plan(sequence.layout, prompt.salt, prompt.tenant)
        missing = self._missing(sequence, plan)
        if not is_next and self._staged_bytes + self._new_bytes(sequence, missing) > self._max_staged_bytes:
            return False
        fetches: dict[Key, StagedChunk] = sequence.fetches or {}
        sequence.fetches = fetches  # set first, so that `cancel` finds them whatever fails below
        for key, span in missing.items():
            fetch = self._fetch(span, plan.layout.spans[span.index].start, sequence.sort_key)
            if fetch is None:
                continue
            staged = self._staged.get(key)
            if staged is None or staged.fetch is not fetch:
                staged = self._staged[key] = StagedChunk(fetch)
                self._staged_bytes += fetch.num_bytes
            fetches[key] = staged
            staged.num_holders += 1
            sequence.note_fetch(self._clock())
        return not self.check_fetches(sequence)

    def check_fetches(self, sequence: Sequence) -> bool:
        """Notes the completed fetches; returns whether a sequence need not wait for its own any longer.

        It waits at most as long as computing the chunks takes: those fetched by then are used, others are computed.
        """
        now, last_ended = self._clock(), self.tiered_store.last_ended
        self._num_ended = self.tiered_store.num_ended
        fetches = [staged.fetch for staged in (sequence.fetches or {}).values()]
        if all(fetch.is_settled(now, last_ended) for fetch in fetches):
            return True
        num_bytes = sum(fetch.num_bytes for fetch in fetches)
        num_tokens = (num_bytes - len(fetches) * self._state_bytes) // self._bytes_per_token
        compute_seconds = self._compute.estimate(num_tokens)
        return now >= sequence.fetching_since + self.tiered_store.longest_wait(num_bytes, compute_seconds)

    def fetched_keys(self, sequence: Sequence) -> set[Key]:
        """The chunks that have been fetched for a sequence."""
        return {key for key, staged in (sequence.fetches or {}).items() if staged.fetch.value is not None}

    def load(self, sequence: Sequence) -> None:
        """Copies fetched chunks into the blocks of a newly allocated sequence."""
        fetches, allocation = sequence.fetches or {}, sequence.allocation
        assert allocation is not None
        for index, span in enumerate(allocation.spans):
            chunk = span.chunk
            if chunk is None or not span.is_owner or chunk.num_computed > chunk.num_kept or chunk.lacks_start:
                continue
            if self._entries.lossy_codec and self._kv_cache.has_dependents(chunk):
                continue  # chunks that share its first blocks must be exact
            fetch = fetches[chunk.key].fetch if chunk.key in fetches else None
            tensors = None if fetch is None or fetch.value is None else fetch.value.tensors()
            if fetch is None or tensors is None:
                continue
            begin = self._clock()
            try:
                num_blocks = chunk.num_kept // self._storage.block_size  # shared with another chunk, and complete
                layers, rest = tensors[: self._entries.num_layers], tensors[self._entries.num_layers :]
                self._storage.write_chunk(chunk.block_ids[num_blocks:], layers, first_token=chunk.num_kept)
                if self._states is not None:
                    chunk.saved_state = self._states.write_state(tensor for tensor, _ in rest)
            except Exception:  # recomputing the chunk overwrites its blocks
                logger.exception("a chunk from the tier %s could not be copied to the device", fetch.tier_name)
                continue
            chunk.is_stored, chunk.codec = fetch.is_persistent, self._entries.lossy_codec
            self._kv_cache.load(allocation, index)
            self.kept.note(chunk)
            sequence.loaded(index, fetch.tier_name, self._clock() - begin)
        self.cancel(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Releases the chunks fetched for a sequence; safe without any."""
        for key, staged in (sequence.fetches or {}).items():
            staged.num_holders -= 1
            if not staged.num_holders:
                self._staged_bytes -= staged.fetch.num_bytes
                if self._staged.get(key) is staged:
                    del self._staged[key]
                if not staged.fetch.is_over:
                    self.tiered_store.cancel(staged.fetch)
        sequence.fetches = None
        if self._crowded_out is sequence:
            self._crowded_out = None

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Updates the estimated compute speed from a step."""
        self._compute.note_step(num_tokens, seconds)

    def on_computed(self, chunk: Chunk, seconds: float) -> None:
        """Offloads a newly computed chunk, which took `seconds` to compute."""
        self._compute.note(chunk.num_tokens - chunk.num_kept, seconds)
        if self._is_deleted(chunk):
            return
        self.kept.note(chunk)
        if self.tiered_store.has_persistent and not chunk.is_stored:
            self._store(chunk, volatile=False)

    def on_evict(self, chunk: Chunk) -> None:
        """Offloads a chunk that is evicted from the device."""
        self.kept.note(chunk)  # it may have more names by now
        if chunk.is_ready and (self.tiered_store.has_volatile or not chunk.is_stored):
            self._store(chunk, volatile=True)

    def on_free(self, chunk: Chunk) -> None:
        """Copies a chunk that is still to be written before its blocks are freed, unless it is copied already."""
        if (source := self._sources.get(chunk)) is not None:
            self._copy(source)

    def on_delete(self, chunk: Chunk) -> None:
        """Removes a chunk that was deleted from the device from the tiers, too."""
        if (source := self._sources.get(chunk)) is not None:
            source.drop()
        self.delete([chunk.key])

    def delete(self, keys: Collection[Key]) -> None:
        """Removes chunks from all tiers, whether or not they are on the device."""
        for key in keys:
            self.kept.discard(key)
            if (staged := self._staged.pop(key, None)) is not None:
                staged.fetch.value = None
        self.tiered_store.delete(keys)

    def delete_named(self, name: str, salt: str | None = "", tenant: str = "") -> int:
        """Removes the chunks with this name that are only in the tiers; returns how many are known."""
        keys = self.kept.named(name, salt, tenant)
        self.delete(keys)
        return len(keys)

    def delete_known(self) -> None:
        """Removes from the tiers all chunks with names that were stored or loaded here, and those of the device."""
        for chunk in self._kv_cache.chunks():
            self.on_delete(chunk)
        self.delete(self.kept.keys())

    def flush(self) -> None:
        """Copies all chunks still to be written out of their blocks; afterwards all blocks may be freed."""
        for source in list(self._sources.values()):
            self._copy(source)

    def wait(self, seconds: float) -> None:
        """Blocks until a fetch completes, but at most `seconds`."""
        self.tiered_store.wait(seconds, self._num_ended)

    def _is_deleted(self, chunk: Chunk) -> bool:
        """Whether a chunk was deleted while a request computed it: it must not be found again."""
        try:
            return self._kv_cache.find_chunks(chunk.key, None, chunk.tenant)[0] is not chunk
        except UnknownChunk:
            return True

    def _missing(self, sequence: Sequence, plan: Plan) -> dict[Key, SpanPlan]:
        """Chunks that a plan computes and that were not fetched for this sequence yet."""
        known = sequence.fetches or {}
        return {
            span.key: span
            for span in plan.spans
            if span.is_chunk and span.action == "compute" and span.key not in known
        }

    def _new_bytes(self, sequence: Sequence, missing: dict[Key, SpanPlan]) -> int:
        """Bytes that fetching them adds to the staging area."""
        return sum(self._bytes_of(span.num_tokens) for key, span in missing.items() if key not in self._staged)

    def _bytes_of(self, num_tokens: int) -> int:
        return num_tokens * self._bytes_per_token + self._state_bytes

    def _copy(self, source: ChunkSource) -> bool:
        try:
            source.tensors()
        except BaseException as error:  # not stored then; its blocks must not be read later
            source.drop()
            if not isinstance(error, Exception):
                raise
            logger.exception("a chunk could not be copied to be stored")
            return False
        return True

    def _fetch(self, span: SpanPlan, start: int, rank: Rank) -> Fetch[ChunkSource] | None:
        staged = self._staged.get(span.key)
        known = None if staged is None else staged.fetch
        num_bytes = self._bytes_of(span.num_tokens)
        accept = self._entries.accept(span, start, self._compute.tell)
        compute_seconds = self._compute.estimate(span.num_to_compute)
        max_bytes = self._entries.max_bytes(span.num_tokens)
        return self.tiered_store.fetch(span.key, num_bytes, accept, compute_seconds, rank, known, max_bytes=max_bytes)

    def _store(self, chunk: Chunk, *, volatile: bool) -> None:
        persistent = not chunk.is_stored

        def done(is_stored: bool) -> None:
            chunk.is_stored = is_stored

        num_bytes = self._bytes_of(chunk.num_tokens)
        if not self.tiered_store.has_room(num_bytes):
            self.tiered_store.note_dropped()
            return
        # without `self`: an unreferenced offloader is garbage collected even with pending writes
        source = self._sources.get(chunk) or ChunkSource(_reading(self._storage, self._states, chunk))
        if volatile and not self._copy(source):
            return
        try:
            chunk.is_stored = True  # before a failed write can reset it
            self._sources[chunk] = source
            is_queued = self.tiered_store.store(
                chunk.key,
                source,
                num_bytes,
                self._entries.encode(chunk),
                persistent=persistent,
                volatile=volatile,
                done=done if persistent else lambda _: None,
            )
            if not is_queued:
                chunk.is_stored = not persistent
        except Exception:
            logger.exception("a chunk could not be stored")


def _reading(storage: SlotStorage, states: StateStorage | None, chunk: Chunk) -> Callable[[], ChunkTensors]:
    """Reads a chunk, later and on any thread; does not keep the chunk itself."""
    block_ids, num_tokens, saved = tuple(chunk.block_ids), chunk.num_tokens, chunk.saved_state

    def read() -> ChunkTensors:
        layers = storage.read_chunk(block_ids, num_tokens)
        return layers if states is None or saved is None else [*layers, *((s, None) for s in states.read_state(saved))]

    return read
