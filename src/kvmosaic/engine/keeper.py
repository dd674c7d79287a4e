"""Keeper: keeps chunks beyond the device, and brings them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

from torch import Tensor

from kvmosaic.cache import Chunk, Key, Plan, Planner, SpanPlan
from kvmosaic.engine.sequence import Sequence
from kvmosaic.memory import BlockStorage
from kvmosaic.tiers import ComputeCost, Entry, Fetch, Hierarchy

logger = logging.getLogger("kvmosaic")

Layers = Items[tuple[Tensor, Tensor | None]]
"""Keys [n, G, D] and values [n, G, Dv] of every layer that stores any; None where the keys hold the values."""


class EntryMaker(Protocol):
    """Turns chunks into entries and back; `kvmosaic.memory.Entries` is one."""

    def encode(self, chunk: Chunk) -> Callable[[Layers], Entry]:
        """What makes an entry of the tensors of a chunk, on any thread, later."""

    def accept(self, span: SpanPlan, start: int) -> Callable[[Entry], Layers]:
        """What verifies an entry for a planned chunk and decodes it, on any thread; raises InvalidEntry."""


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
        hierarchy: Hierarchy[Layers],
        entries: EntryMaker,
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
        self._planner = planner
        self._storage = storage
        self._entries = entries
        self._most_staged_bytes = most_staged_bytes
        self._staged_bytes = 0
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
        fetches = sequence.fetches or {}
        missing = {span.key: span for span in plan.spans if span.is_chunk and span.action == "compute"}
        missing = {key: span for key, span in missing.items() if key not in fetches}
        num_bytes = sum(span.num_tokens for span in missing.values()) * self._bytes_per_token
        if not is_next and self._staged_bytes + num_bytes > self._most_staged_bytes:
            return False
        for key, span in missing.items():
            accept = self._entries.accept(span, plan.layout.spans[span.index].start)
            seconds = self._compute.estimate(span.num_tokens)
            fetch = self.hierarchy.fetch(key, span.num_tokens * self._bytes_per_token, accept, seconds)
            if fetch is not None:
                fetches[key] = fetch
                self._staged_bytes += fetch.num_bytes
        sequence.fetches = fetches
        return not self.is_settled(sequence)

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether a sequence need not wait for fetches any longer."""
        now, last_ended = self._clock(), self.hierarchy.last_ended
        return all(fetch.is_settled(now, last_ended) for fetch in (sequence.fetches or {}).values())

    def finish(self, sequence: Sequence) -> None:
        """Copies what was fetched into the blocks of a sequence that was just attached."""
        fetches, attachment = sequence.fetches or {}, sequence.attachment
        assert attachment is not None
        for index, span in enumerate(attachment.spans):
            chunk = span.chunk
            if chunk is None or not span.is_owner or chunk.num_computed:
                continue
            fetch = fetches.get(chunk.key)
            if fetch is None or fetch.value is None:
                continue
            begin = self._clock()
            self._storage.write_chunk(chunk.block_ids, fetch.value)
            self._planner.load(attachment, index)
            chunk.is_stored = fetch.is_persistent
            sequence.loaded(index, fetch.tier_name, self._clock() - begin)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Lets go of what was fetched for a sequence; safe for one that has nothing."""
        self._staged_bytes -= _size(sequence.fetches or {})
        sequence.fetches = None

    def keep(self, chunk: Chunk, seconds: float) -> None:
        """Stores a chunk that was just computed, in so many seconds."""
        self._compute.note(chunk.num_tokens, seconds)
        if self.hierarchy.has_persistent and not chunk.is_stored:
            self._store(chunk, volatile=False)

    def leave(self, chunk: Chunk) -> None:
        """Stores a chunk that leaves the device."""
        if chunk.is_ready and (self.hierarchy.has_volatile or not chunk.is_stored):
            self._store(chunk, volatile=True)

    def forget(self, chunk: Chunk) -> None:
        """Removes a chunk from the tiers that was deleted from the device."""
        self.hierarchy.delete([chunk.key])

    def wait(self, seconds: float) -> None:
        """Sleeps until a fetch is over, but no longer than this."""
        self.hierarchy.wait(seconds)

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


def _size(fetches: dict[Key, Fetch[Layers]]) -> int:
    return sum(fetch.num_bytes for fetch in fetches.values())
