"""Keeper: keeps chunks beyond the device, and brings them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from kvmosaic.cache import Chunk, Key, Plan, Planner, SpanPlan
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.kept_keys import KeptKeys
from kvmosaic.engine.sequence import Sequence
from kvmosaic.errors import UnknownChunk
from kvmosaic.memory import BlockStorage, ChunkTensors
from kvmosaic.tiers import ComputeCost, Fetch, Hierarchy

logger = logging.getLogger("kvmosaic")


@dataclass(slots=True, eq=False)
class StagedChunk:
    """A chunk on its way, or here already, for sequences that wait."""

    fetch: Fetch[ChunkTensors]
    num_holders: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether it was not found."""
        return self.fetch.is_over and self.fetch.value is None


class Keeper:
    """Stands between the planner and the tiers.

        a chunk is complete      keep ──▶ copied, written behind to the tiers that outlive the process
        a chunk is evicted      leave ──▶ copied, written behind to the others
        a request is queued     begin ──▶ fetches what it misses, if that is faster than computing it
        it is attached         finish ──▶ what came is copied into its blocks, the rest is computed

    Copies are made on the engine's thread between two steps (a memory copy takes a thousandth of what computing the
    chunk took); everything slower happens on the threads of the hierarchy. Nothing in here fails a request: what cannot
    be kept is computed again one day.
    """

    def __init__(
        self,
        planner: Planner,
        storage: BlockStorage,
        hierarchy: Hierarchy[ChunkTensors],
        entries: ChunkEntries,
        *,
        most_staged_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to be told of evictions.

        Args:
            planner: of the engine.
            storage: of the chunk pool.
            hierarchy: of the tiers.
            entries: makes entries.
            most_staged_bytes: of chunks that were fetched for requests that wait; beyond that a fetch begins when its
                request is next.
            clock: the engine's.
        """
        self.hierarchy = hierarchy
        self.kept = KeptKeys()
        """What the chunks are called that are in the tiers, as far as it is known here."""
        self._planner = planner
        self._storage = storage
        self._entries = entries
        self._most_staged_bytes = most_staged_bytes
        self._staged_bytes = 0
        self._staged: dict[Key, StagedChunk] = {}
        self._clock = clock
        self._compute = ComputeCost()
        self._bytes_per_token = storage.bytes_per_block // storage.block_size
        planner.notify(evicted=self.leave, deleted=self.forget)

    def begin(self, sequence: Sequence, plan: Plan | None = None) -> bool:
        """Begins to fetch what a sequence misses; returns whether it should wait.

        Args:
            sequence: one that waits; what was fetched for it already is not fetched again.
            plan: its newest plan, if it is to run next. Without one it is only a good time to begin, and nothing
                happens if too much was fetched for others.
        """
        is_next = plan is not None
        if plan is None:
            prompt = sequence.request.prompt
            plan = self._planner.plan(sequence.layout, prompt.salt, prompt.tenant)
        fetches: dict[Key, StagedChunk] = sequence.fetches or {}
        missing = {span.key: span for span in plan.spans if span.is_chunk and span.action == "compute"}
        missing = {key: span for key, span in missing.items() if key not in fetches}
        new = [span.num_tokens for key, span in missing.items() if key not in self._staged]
        num_bytes = sum(new) * self._bytes_per_token
        if not is_next and self._staged_bytes + num_bytes > self._most_staged_bytes:
            return False
        for key, span in missing.items():
            if (staged := self._staged.get(key)) is None or staged.has_failed:
                if (fetch := self._fetch(span, plan.layout.spans[span.index].start)) is None:
                    continue
                staged = self._staged[key] = StagedChunk(fetch)
                self._staged_bytes += fetch.num_bytes
            fetches[key] = staged
            staged.num_holders += 1
        sequence.fetches = fetches
        return not self.is_settled(sequence)

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether a sequence need not wait for fetches any longer."""
        now, last_ended = self._clock(), self.hierarchy.last_ended
        return all(staged.fetch.is_settled(now, last_ended) for staged in (sequence.fetches or {}).values())

    def finish(self, sequence: Sequence) -> None:
        """Copies what was fetched into the blocks of a sequence that was just attached."""
        fetches, attachment = sequence.fetches or {}, sequence.attachment
        assert attachment is not None
        for index, span in enumerate(attachment.spans):
            chunk = span.chunk
            if chunk is None or not span.is_owner or chunk.num_computed:
                continue
            fetch = fetches[chunk.key].fetch if chunk.key in fetches else None
            if fetch is None or fetch.value is None:
                continue
            begin = self._clock()
            try:
                self._storage.write_chunk(chunk.block_ids, fetch.value)
            except Exception:  # its blocks are written again, by computing it
                logger.exception("a chunk from the tier %s could not be copied to the device", fetch.tier_name)
                continue
            self._planner.load(attachment, index)
            chunk.is_stored = fetch.is_persistent
            self.kept.note(chunk)
            sequence.loaded(index, fetch.tier_name, self._clock() - begin)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Lets go of what was fetched for a sequence; safe for one that has nothing."""
        for key, staged in (sequence.fetches or {}).items():
            staged.num_holders -= 1
            if not staged.num_holders:
                self._staged_bytes -= staged.fetch.num_bytes
                if self._staged.get(key) is staged:
                    del self._staged[key]
        sequence.fetches = None

    def keep(self, chunk: Chunk, seconds: float) -> None:
        """Stores a chunk that was just computed, in so many seconds."""
        self._compute.note(chunk.num_tokens, seconds)
        if self._is_deleted(chunk):
            return
        self.kept.note(chunk)
        if self.hierarchy.has_persistent and not chunk.is_stored:
            self._store(chunk, volatile=False)

    def leave(self, chunk: Chunk) -> None:
        """Stores a chunk that leaves the device."""
        self.kept.note(chunk)  # it may have got more names
        if chunk.is_ready and (self.hierarchy.has_volatile or not chunk.is_stored):
            self._store(chunk, volatile=True)

    def forget(self, chunk: Chunk) -> None:
        """Removes a chunk from the tiers that was deleted from the device."""
        self.delete([chunk.key])

    def delete(self, keys: Collection[Key]) -> None:
        """Removes chunks from all tiers, whether or not the device has them."""
        for key in keys:
            self.kept.discard(key)
        self.hierarchy.delete(keys)

    def delete_named(self, name: str, salt: str | None = "", tenant: str = "") -> int:
        """Removes the chunks with this name that only the tiers have; returns how many are known."""
        keys = self.kept.named(name, salt, tenant)
        self.delete(keys)
        return len(keys)

    def wait(self, seconds: float) -> None:
        """Sleeps until a fetch is over, but no longer than this."""
        self.hierarchy.wait(seconds)

    def _is_deleted(self, chunk: Chunk) -> bool:
        """Whether a chunk was deleted while a request went on computing it: then nobody may find it again."""
        try:
            return self._planner.find_chunks(chunk.key, None, chunk.tenant)[0] is not chunk
        except UnknownChunk:
            return True

    def _fetch(self, span: SpanPlan, start: int) -> Fetch[ChunkTensors] | None:
        num_bytes = span.num_tokens * self._bytes_per_token
        accept = self._entries.accept(span, start)
        return self.hierarchy.fetch(span.key, num_bytes, accept, self._compute.estimate(span.num_tokens))

    def _store(self, chunk: Chunk, *, volatile: bool) -> None:
        def done(is_stored: bool) -> None:
            chunk.is_stored = is_stored

        persistent = not chunk.is_stored
        try:
            num_bytes = chunk.num_tokens * self._bytes_per_token
            if not self.hierarchy.has_room(num_bytes):
                return
            layers = self._storage.read_chunk(chunk.block_ids, chunk.num_tokens)
            chunk.is_stored = self.hierarchy.store(
                chunk.key,
                layers,
                num_bytes,
                self._entries.encode(chunk),
                persistent=persistent,
                volatile=volatile,
                done=done if persistent else lambda _: None,
            )
        except Exception:
            logger.exception("a chunk could not be stored")
