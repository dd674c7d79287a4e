"""Swap space: host memory for the blocks of preempted answers, and when copying them is faster than recomputing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmosaic.cache import BlockId, KVCache
from kvmosaic.cache.allocation import own_blocks
from kvmosaic.config import EngineConfig
from kvmosaic.engine.sequence import Sequence
from kvmosaic.tiers.fetch_policy import EMA, ComputeCost

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import SlotStorage
    from kvmosaic.memory import ChunkTensors

logger = logging.getLogger("kvmosaic")

_LOOK_AGAIN = 32
"""Refusals after which a copy is measured again: the first ones of a process are slow."""


class SwapCost:
    """Measured seconds of computing a token, and of copying a byte in either direction.

    Until the compute speed is measured, recomputing is assumed to be faster. Then the first copy to the host is a
    measurement, and the way back is assumed to take as long until it is measured, too.
    """

    def __init__(self) -> None:
        self._compute = ComputeCost()
        self._out, self._in = EMA(), EMA()
        self._num_refused = 0

    def note_step(self, num_tokens: int, num_prefilled: int, seconds: float) -> None:
        """Records a step of `num_tokens` tokens, `num_prefilled` of which were prefill."""
        if 2 * num_prefilled >= num_tokens:
            self._compute.note(num_tokens, seconds)
        else:
            self._compute.note_step(num_tokens, seconds)

    def note_out(self, num_bytes: int, seconds: float) -> None:
        """Records a copy to the host."""
        self._out.add(seconds / num_bytes)

    def note_in(self, num_bytes: int, seconds: float) -> None:
        """Records a copy back to the device."""
        self._in.add(seconds / num_bytes)

    def decide(self, num_tokens: int, num_bytes: int) -> bool:
        """Decides whether to swap `num_tokens` of `num_bytes` out and in: if that is expected to save time.

        Counts refusals: after many, the measurements are dropped, so that the next copy is a probe.
        """
        compute_seconds = self._compute.estimate(num_tokens)
        if compute_seconds is None:
            return False
        out_pace = self._out.value
        if out_pace is None:
            return True
        in_pace = out_pace if self._in.value is None else self._in.value
        if num_bytes * (out_pace + in_pace) < compute_seconds:
            self._num_refused = 0
            return True
        self._num_refused += 1
        if self._num_refused >= _LOOK_AGAIN:
            self._num_refused, self._out, self._in = 0, EMA(), EMA()
        return False


@dataclass(frozen=True, slots=True, eq=False)
class SavedTokens:
    """Keys and values of consecutive tokens of the last span of a sequence."""

    first: int
    """Number of the first of them; a block begins with it."""
    num_tokens: int
    layers: ChunkTensors
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Restore:
    """Keys and values to be written into blocks before a step computes."""

    block_ids: Seq[BlockId]
    layers: ChunkTensors
    num_bytes: int


class SwapSpace:
    """Swaps out the blocks that only one sequence reads, and restores them bit by bit.

        running     question + answer in blocks of the request pool
                        │ preempted: save                        ▲ restore, `write` before the step computes
                        ▼                                        │
        waiting     copied into the memory of the host, at most `swap_space` bytes

    Shared chunks and prefixes are not copied: they stay in their caches, or are recomputed. Blocks that the prefix
    cache still has when the sequence resumes are reused from there. A text with a rolling window is always recomputed.

    Invariant: num_bytes == bytes of what is saved, 0 when no preempted sequence waits.
    Always safe: dropping what was not saved, or twice.
    """

    def __init__(
        self,
        storage: SlotStorage,
        kv_cache: KVCache,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates an empty swap space for blocks of the request pool in `storage`."""
        self.num_bytes = 0
        self.moved_bytes = {"out": 0, "in": 0}
        """Bytes copied to the host, and back, so far."""
        self.cost = SwapCost()
        self._storage = storage
        self._kv_cache = kv_cache
        self._choice = config.preemption
        self._max_bytes = config.swap_bytes
        self._clock = clock
        self._bytes_per_token = storage.bytes_per_block // storage.block_size
        self._saved: dict[Sequence, SavedTokens] = {}

    def save(self, sequence: Sequence) -> bool:
        """Copies what a running sequence has computed to the host, if that is allowed and worth it; returns whether.

        It still holds its blocks. A failed copy only means recomputing, so no error here matters.
        """
        allocation = sequence.allocation
        assert allocation is not None and sequence not in self._saved
        span = allocation.last
        if self._choice == "recompute" or span.chunk is not None or sequence.request.window is not None:
            return False
        if sequence.request.is_measuring:
            return False  # its attention is observed while it is computed
        first_block, size = own_blocks(allocation), self._storage.block_size
        first = first_block * size
        num_tokens = span.computed - first
        num_bytes = num_tokens * self._bytes_per_token
        if num_tokens <= 0 or self.num_bytes + num_bytes > self._max_bytes:
            return False
        if self._choice == "auto" and not self.cost.decide(num_tokens, num_bytes):
            return False
        begin = self._clock()
        try:
            layers = self._storage.read_chunk(span.table.block_ids[first_block:], num_tokens)
        except Exception:
            logger.exception("the blocks of an answer could not be copied to the host; it is computed again")
            return False
        self.cost.note_out(num_bytes, self._clock() - begin)
        if self._choice == "auto" and not self.cost.decide(num_tokens, num_bytes):
            return False  # that was the first measurement
        self._saved[sequence] = SavedTokens(first, num_tokens, layers, num_bytes)
        self.num_bytes += num_bytes
        self.moved_bytes["out"] += num_bytes
        return True

    def restore(self, sequence: Sequence) -> Restore | None:
        """Blocks to write back for a newly allocated sequence; its tokens count as computed.

        None if nothing was saved, or it is useless: the blocks before it are gone, or all of it was a cache hit.
        """
        saved, allocation = self._saved.get(sequence), sequence.allocation
        assert allocation is not None
        self.drop(sequence)
        span, size = allocation.last, self._storage.block_size
        if saved is None or not saved.first <= span.computed < saved.first + saved.num_tokens:
            return None
        end = saved.first + saved.num_tokens
        first_block = span.computed // size
        skipped = first_block * size - saved.first
        layers = [(keys[skipped:], None if values is None else values[skipped:]) for keys, values in saved.layers]
        self._kv_cache.advance(allocation, len(allocation.spans) - 1, end - span.computed)
        num_bytes = (saved.num_tokens - skipped) * self._bytes_per_token
        return Restore(span.table.block_ids[first_block:], layers, num_bytes)

    def drop(self, sequence: Sequence) -> None:
        """Drops what was saved of a sequence; safe if nothing was."""
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self.num_bytes -= saved.num_bytes

    def write(self, restores: Seq[Restore]) -> None:
        """Writes the restored blocks, before the step that needs them computes."""
        for restore in restores:
            begin = self._clock()
            self._storage.write_chunk(restore.block_ids, restore.layers)
            self.cost.note_in(restore.num_bytes, self._clock() - begin)
            self.moved_bytes["in"] += restore.num_bytes

    def check_invariants(self) -> None:
        """Checks `num_bytes` against what is saved."""
        assert self.num_bytes == sum(saved.num_bytes for saved in self._saved.values()) <= self._max_bytes
