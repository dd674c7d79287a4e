"""A long random walk over everything a KV cache can do, with a simulated memory that is read back."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from cache.world import Clock, Memory, Reader, allocation_state, layout_of, make_kv_cache, plain, state_of, warm_up

from kvmosaic.cache import KVCache
from kvmosaic.cache.keys import decode_tokens
from kvmosaic.errors import ChunkCacheFull, ChunkInUse, OutOfBlocks, RequestTooLarge, UnknownChunk


@dataclass
class Walk:
    """An engine of a few lines: it assembles steps, runs them (or fails), and reads everything back."""

    kv_cache: KVCache
    clock: Clock
    random: random.Random
    memory: Memory = field(default_factory=Memory)
    readers: list[Reader] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    def one_step(self) -> None:
        actions = [self.start, self.start, self.run_step, self.run_step, self.answer, self.answer, self.fork]
        actions += [self.answer, self.answer, self.stop, self.stop, self.pin, self.delete]
        if self.random.random() < 0.3:
            actions = [self.fail_step, self.run_step]
        if self.random.random() < 0.003:
            actions = [self.reset]
        self.clock.wait(self.random.random())
        action = self.random.choice(actions)
        action()
        self.replan_stale()
        self.seen[action.__name__] += 1
        self.kv_cache.check_invariants()
        self.check_references()
        for reader in self.readers:
            self.memory.check(reader)

    def some_layout(self):
        draw = self.random
        system = [[7] * 6, [7] * 4 + [8] * 5, [9]][draw.randrange(3)]
        documents = [[100 + n] * draw.choice([n + 1, n + 1, 3 * n + 2]) for n in range(8)]
        documents += [self.edited(document) for document in documents[3:]]
        chosen = draw.choices(documents, k=draw.randrange(4))
        question = [draw.randrange(3)] * draw.randrange(1, 10)
        if draw.random() < 0.2:
            return plain(system + question)
        if draw.random() < 0.1 and chosen:
            return warm_up(system, *chosen)
        names = [str(document[0]) for document in chosen]
        strategy = draw.choice(["shared", "sequential"])
        context = draw.choice(["system", "system", "none"])
        sees = {len(chosen) - 1: (0,)} if len(chosen) > 1 and draw.random() < 0.2 else {}
        return layout_of(system, chosen, question, names=names, strategy=strategy, context=context, sees=sees)

    def edited(self, document: list[int]) -> list[int]:
        """A document with some tokens replaced, inserted or removed."""
        first = self.random.randrange(1, len(document))
        return document[:first] + [150] * self.random.randrange(3) + document[first + self.random.randrange(3) :]

    def allocate(self, layout, salt: str, *, between_steps: bool = True) -> None:
        plan = self.kv_cache.plan(layout, salt)
        if between_steps and self.random.random() < 0.2:
            self.stop()  # something may change between the plan and allocating it
        before = state_of(self.kv_cache)
        try:
            allocation = self.kv_cache.allocate(plan)
        except (OutOfBlocks, ChunkCacheFull, RequestTooLarge) as error:
            self.seen[type(error).__name__] += 1
            assert state_of(self.kv_cache) == before
            return
        self.seen["copied when allocated"] += len(allocation.copies)
        self.memory.copy(self.kv_cache.request_pool, allocation.copies)
        self.seen["evicted"] = self.kv_cache.statistics().evictions
        tokens = [list(span.token_ids) for span in layout.spans]
        self.readers.append(Reader(layout, salt, allocation, self.memory.expected(layout, salt), tokens))
        self.seen.update(span.action for span in allocation.spans)
        self.seen["kept"] += sum(span.is_owner and span.chunk.num_kept > 0 for span in allocation.spans)

    def start(self, *, between_steps: bool = True) -> None:
        self.allocate(self.some_layout(), self.random.choice(["", "", "tenant"]), between_steps=between_steps)

    def assemble(self) -> list[tuple[Reader, int, int, int]]:
        """Gives some spans some tokens; new requests may arrive and reuse what is not written yet."""
        self.kv_cache.begin_step()
        writes = []
        for reader in list(self.readers):
            ready = True
            for span in reader.allocation.spans:
                left = span.num_tokens - span.num_computed
                self.seen["waited for a start"] += span.is_owner and not span.can_advance
                if ready and span.can_advance and left and self.random.random() < 0.8:
                    count = self.random.choice([left, left, self.random.randint(1, left)])
                    writes.append((reader, span.index, span.num_computed, count))
                    self.kv_cache.advance(reader.allocation, span.index, count)
                ready = ready and span.is_ready
        return writes

    def run_step(self) -> None:
        writes = self.assemble()
        if self.random.random() < 0.3:
            self.start(between_steps=False)
        for reader, index, first, count in writes:
            self.memory.write(reader.allocation.spans[index], first, reader.expected[index][first : first + count])
        self.kv_cache.end_step()

    def fail_step(self) -> None:
        """A forward that fails half-way: what it wrote is wrong and must never be read."""
        writes = self.assemble()
        for reader, index, first, count in writes:
            self.memory.write(reader.allocation.spans[index], first, ["wrong"] * count)
        for reader in {id(write[0]): write[0] for write in writes}.values():
            self.kv_cache.rollback_step(reader.allocation)
        self.kv_cache.end_step()

    def replan_stale(self) -> None:
        stale = [reader for reader in self.readers if reader.allocation.is_stale]
        for reader in stale:
            self.readers.remove(reader)
            self.kv_cache.release(reader.allocation)
        for reader in stale:
            self.seen["replanned"] += 1
            if self.random.random() < 0.5:
                self.allocate(reader.layout, reader.salt)

    def answer(self) -> None:
        able = [r for r in self.readers if r.allocation.last.is_ready and not r.allocation.last.is_closed]
        if not able:
            return
        reader = self.random.choice(able)
        tokens = [self.random.randrange(3) for _ in range(self.random.choice([1, 1, 5, 13]))]
        before = state_of(self.kv_cache), allocation_state(reader.allocation)
        try:
            copies = self.kv_cache.append_slots(reader.allocation, tokens)
        except OutOfBlocks:
            self.seen["extend refused"] += 1
            assert (state_of(self.kv_cache), allocation_state(reader.allocation)) == before
            return
        self.seen["copied"] += len(copies)
        self.memory.copy(self.kv_cache.request_pool, copies)
        reader.expected[-1] = reader.expected[-1] + self.memory.chained(reader.expected[-1][-1], tokens)
        reader.token_ids[-1] = reader.token_ids[-1] + tokens
        if not reader.allocation.last.is_unregistrable:
            assert list(decode_tokens(bytes(reader.allocation.last.tokens))) == reader.token_ids[-1]

    def fork(self) -> None:
        able = [r for r in self.readers if all(span.is_ready for span in r.allocation.spans)]
        if able and len(self.readers) < 12:
            reader = self.random.choice(able)
            other = self.kv_cache.fork(reader.allocation)
            self.readers.append(
                Reader(reader.layout, reader.salt, other, list(reader.expected), list(reader.token_ids))
            )

    def stop(self) -> None:
        if self.readers:
            reader = self.readers.pop(self.random.randrange(len(self.readers)))
            self.kv_cache.release(reader.allocation)
            self.kv_cache.release(reader.allocation)

    def pin(self) -> None:
        chunks = self.kv_cache.chunks()
        if chunks:
            chunk = self.random.choice(chunks)
            change = self.kv_cache.unpin if chunk.pinned or self.random.random() < 0.5 else self.kv_cache.pin
            change(chunk.key)

    def delete(self) -> None:
        before = state_of(self.kv_cache)
        try:
            self.kv_cache.delete(str(100 + self.random.randrange(8)))
        except (UnknownChunk, ChunkInUse) as error:
            self.seen[type(error).__name__] += 1
            assert state_of(self.kv_cache) == before

    def reset(self) -> None:
        self.kv_cache.reset()

    def check_references(self) -> None:
        """Counts the references of every block anew, from those who should hold them."""
        counted: dict[str, Counter[int]] = {"request": Counter(), "chunk_cache": Counter()}
        counted["request"].update(entry.block_id for entry in self.kv_cache._prefix._entries.values())
        for chunk in self.kv_cache.chunks():
            counted["chunk_cache"].update(chunk.block_ids)
        for reader in self.readers:
            for span in reader.allocation.spans:
                if span.chunk is None:
                    counted["request"].update(span.table.block_ids)
            for chunk in reader.allocation.held_chunks():
                counted["chunk_cache"].update(chunk.block_ids)
                if chunk.is_abandoned:
                    raise AssertionError("stale readers have been replanned")
        for pool in (self.kv_cache.request_pool, self.kv_cache.chunk_pool):
            held = {block: count for block, count in enumerate(pool._references) if count}
            assert held == dict(counted[pool.name])


@pytest.mark.parametrize(
    ("steps", "block_size", "config"),
    [
        (10_000, 4, {}),
        (1_500, 1, {"eviction": "priority", "max_chunks": 6}),
        (1_500, 4, {"hash_algorithm": "xxh3_128", "verify_tokens": False}),
        (1_500, 3, {"prefix_caching": False}),
        (3_000, 2, {"hash_algorithm": "xxh3_128", "verify_tokens": False, "block_key_bytes": 1}),
    ],
)
def test_random_walk_keeps_every_invariant_and_reads_back_what_was_written(steps, block_size, config):
    clock = Clock()
    scale = 4 // block_size if block_size < 4 else 1
    kv_cache = make_kv_cache(
        block_size=block_size, request_blocks=40 * scale, chunk_blocks=20 * scale, clock=clock, **config
    )
    walk = Walk(kv_cache, clock, random.Random(steps + block_size))
    for _ in range(steps):
        walk.one_step()
    if steps == 10_000:
        expected = {"start", "run_step", "fail_step", "answer", "fork", "stop", "pin", "delete", "reset"}
        expected |= {"reuse", "compute", "wait", "copied", "copied when allocated", "replanned"}
        expected |= {"extend refused", "evicted", "kept", "waited for a start"}
        expected |= {"OutOfBlocks", "ChunkCacheFull", "ChunkInUse", "UnknownChunk"}
        assert expected <= {name for name, count in walk.seen.items() if count}, "the walk has met every situation"
    for reader in walk.readers:
        kv_cache.release(reader.allocation)
    kv_cache.check_invariants()
    assert kv_cache.request_pool.num_used == kv_cache.request_pool.num_references == len(kv_cache._prefix)
    held = Counter(block_id for chunk in kv_cache.chunks() for block_id in chunk.block_ids)
    assert kv_cache.chunk_pool.num_used == len(held)
    assert kv_cache.chunk_pool.num_shared == sum(count > 1 for count in held.values())
    assert kv_cache.request_pool.num_shared == 0
    kv_cache.reset()
    assert kv_cache.request_pool.num_used == kv_cache.chunk_pool.num_used == 0
