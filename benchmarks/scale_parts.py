"""The parts of `scale.py`: each fills one structure with n entries and says what they cost, in a process of its own."""

from __future__ import annotations

import gc
import os
import random
import resource
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvmosaic.cache import BlockPool, Chunk, Key, KeyChain, KVCache
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.prefix_entry import PrefixEntry
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.eviction import LRU, EvictionPolicy, Priority
from kvmosaic.layout import Layout, arrange
from kvmosaic.prompt import Prompt
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.entry_index import EntryIndex
from kvmosaic.tiers.tier import Deadline

BLOCK_SIZE = 16
CHUNK_BLOCKS = 10
CHAIN_BLOCKS = 8
PROMPT_CHUNKS = 16
SAMPLE = 20_000

Costs = dict[str, float]
"""Of one structure at one size: bytes and microseconds, under the names of the report."""


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Meter:
    """Measures what is done between two readings, in CPU time of this thread."""

    def __init__(self) -> None:
        self.costs: Costs = {}
        gc.collect()
        gc.freeze()  # what was imported is not to be in the pauses

    def cost(self, name: str, done: Callable[[], object], per: int = 1) -> None:
        """Does something once, and notes microseconds per entry."""
        started = time.thread_time_ns()
        done()
        self.costs[name] = (time.thread_time_ns() - started) / 1e3 / max(per, 1)

    def filled(self, fill: Callable[[], object], n: int) -> None:
        """Fills a structure, and notes what an entry takes."""
        gc.collect()
        before = resident_bytes()
        self.cost("insert", fill, n)
        gc.collect()
        self.costs["bytes"] = (resident_bytes() - before) / n
        self.cost("full collection", gc.collect)


def sampled(n: int, count: int = SAMPLE) -> list[int]:
    """Numbers of entries, in no order."""
    draw = random.Random(n)
    return [draw.randrange(n) for _ in range(min(n, count))]


def pool(n: int) -> Costs:
    """A block pool: making it, and taking and giving back runs when it is in pieces."""
    meter, pools = Meter(), []
    meter.filled(lambda: pools.append(BlockPool("request", n, BLOCK_SIZE)), n)
    meter.costs["create"] = meter.costs.pop("insert") * n
    blocks, draw = pools[0], random.Random(1)
    before = resident_bytes()
    held: list[Any] = []
    while blocks.can_allocate(20):
        held.append(array("i", blocks.allocate(draw.randint(1, 20), grows=False)))
    draw.shuffle(held)
    for run in held[::2]:
        blocks.release(run)
    held = held[1::2]
    count = min(len(held), SAMPLE) // 2
    taken: list[Any] = []
    meter.cost("take 10", lambda: taken.extend([blocks.allocate(10, grows=False) for _ in range(count)]), count)
    meter.cost("give 10", lambda: [blocks.release(run) for run in taken], count)
    meter.cost("take 1, which grows", lambda: held.extend([blocks.allocate(1) for _ in range(count)]), count)
    for run in held:
        blocks.release(run)
    held, taken = [], []
    meter.costs["bytes, after use"] = max(resident_bytes() - before, 0) / n + meter.costs["bytes"]
    # The worst there is: every second block is free. Single blocks are taken, then runs of ten from ten places.
    blocks.allocate(n, grows=False)
    gc.collect()
    before = resident_bytes()
    meter.cost("give every second", lambda: blocks.release(range(0, n, 2)), n // 2)
    meter.costs["bytes, every second free"] = meter.costs["bytes"] + (resident_bytes() - before) / n
    count = min(n // 40, SAMPLE)
    meter.cost(
        "take 10 single ones", lambda: taken.extend([blocks.allocate(10, grows=False) for _ in range(count)]), count
    )
    meter.cost("give 10 single ones", lambda: [blocks.release(run) for run in taken], count)
    return meter.costs


class Chains:
    """A prefix cache that n blocks were written into, in chains of `CHAIN_BLOCKS` with a root each."""

    def __init__(self, n: int, policy: EvictionPolicy) -> None:
        self.pool = BlockPool("request", n + CHAIN_BLOCKS, BLOCK_SIZE)
        self.cache = PrefixCache(self.pool, policy, time.monotonic)
        self.chain = KeyChain("model")
        self.n = n

    def blocks(self, number: int) -> tuple[Key, list[bytes]]:
        """Root and tokens of a chain."""
        root = self.chain.root(number)
        return root, [
            (number * CHAIN_BLOCKS + block).to_bytes(8, "little") * BLOCK_SIZE for block in range(CHAIN_BLOCKS)
        ]

    def keys(self, root: Key, blocks: Iterable[bytes]) -> Iterable[Key]:
        """Chained keys."""
        key = root
        for tokens in blocks:
            yield (key := self.chain.extend_encoded(key, tokens))

    def write(self, number: int) -> None:
        """Makes a chain known, as a sequence does that computes it and ends."""
        root, blocks = self.blocks(number)
        taken = self.pool.allocate(CHAIN_BLOCKS, grows=False)
        entries: list[PrefixEntry] = []
        for key, tokens, block_id in zip(self.keys(root, blocks), blocks, taken, strict=True):
            entry, _ = self.cache.register(key, root, entries[-1] if entries else None, tokens, block_id)
            assert entry is not None
            entries.append(entry)
        self.pool.release(taken)
        self.cache.release(entries)

    def find(self, number: int) -> list[PrefixEntry]:
        """What is known of a chain."""
        root, blocks = self.blocks(number)
        return self.cache.match(root, self.keys(root, blocks), blocks)

    def use(self, number: int) -> None:
        """Allocates to a chain and leaves it."""
        entries = self.find(number)
        self.cache.acquire(entries)
        self.cache.release(entries)


def prefix(n: int, policy: EvictionPolicy | None = None) -> Costs:
    """The prefix cache: n blocks."""
    meter, made = Meter(), list[Chains]()
    num_chains = n // CHAIN_BLOCKS

    def fill() -> None:
        made.append(Chains(n, policy or LRU()))
        for number in range(num_chains):
            made[0].write(number)

    meter.filled(fill, n)
    chains = made[0]
    some = sampled(num_chains)
    per = len(some) * CHAIN_BLOCKS
    meter.cost("make keys", lambda: [list(chains.keys(*chains.blocks(number))) for number in some], per)
    meter.cost("find", lambda: [chains.find(number) for number in some], per)
    meter.cost("miss", lambda: [chains.find(n + number) for number in some], len(some))
    meter.cost("use", lambda: [chains.use(number) for number in some], per)
    count = min(n // 10, 10 * SAMPLE)
    meter.cost("evict", lambda: [chains.cache.evict(1) for _ in range(count)], count)
    meter.cost("evict and insert", lambda: [turned_over(chains, 2 * n + i) for i in range(count // 8)], count // 8 * 8)
    meter.cost("clear", chains.cache.clear, n)
    return meter.costs


def turned_over(chains: Chains, number: int) -> None:
    """A new chain in place of an old one, as in a full cache."""
    if not chains.pool.can_allocate(CHAIN_BLOCKS):
        chains.cache.evict(CHAIN_BLOCKS)
    chains.write(number)


def documents(numbers: Iterable[int], *, are_named: bool = True) -> Layout:
    """A prompt with chunks of `CHUNK_BLOCKS` blocks and a question of one token."""
    tokens = CHUNK_BLOCKS * BLOCK_SIZE
    numbers = list(numbers)
    bodies = [[number & 0xFFFF, number >> 16, *range(2, tokens)] for number in numbers]
    names = [f"document-{number}" for number in numbers] if are_named else None
    return arrange(Prompt.from_tokens([1, 2, 3], bodies, [7], names=names), "shared", "system")


def allocated(kv_cache: KVCache, layout: Layout) -> None:
    """A prompt from beginning to end."""
    allocation = kv_cache.allocate(kv_cache.plan(layout))
    kv_cache.begin_step()
    for span in allocation.spans:
        if span.can_advance:
            kv_cache.advance(allocation, span.index, span.num_tokens - span.num_computed)
    kv_cache.release(allocation)


def chunks(n: int, policy: str = "lru") -> Costs:
    """The KV cache: n chunks of `CHUNK_BLOCKS` blocks, with a name each."""
    meter = Meter()
    config = ChunkCacheConfig(max_chunks=n, eviction=policy)
    kv_caches: list[KVCache] = []
    step = PROMPT_CHUNKS

    def fill() -> None:
        kv_caches.append(kv_cache := KVCache("model", config, request_blocks=256, chunk_blocks=n * CHUNK_BLOCKS))
        for first in range(0, n, step):
            allocated(kv_cache, documents(range(first, min(first + step, n))))

    meter.filled(fill, n)
    kv_cache, some = kv_caches[0], sampled(n)
    prompts = [documents(some[i : i + step]) for i in range(0, len(some), step)]
    new = [documents(range(n + i, n + i + step)) for i in range(0, len(some), step)]
    count = sum(len(layout.spans) - 2 for layout in prompts)
    for layout in prompts:
        kv_cache.plan(layout)  # the first caller pays for reading the tokens of the layout
    meter.cost("plan, known", lambda: [kv_cache.plan(layout) for layout in prompts], count)
    meter.cost("plan, new", lambda: [kv_cache.plan(layout) for layout in new], len(new) * step)
    meter.cost("plan, allocate, release", lambda: [allocated(kv_cache, layout) for layout in prompts], count)
    meter.cost("statistics", lambda: [kv_cache.statistics() for _ in range(1_000)], 1_000)
    meter.cost("find by name", lambda: [kv_cache.find_chunks(f"document-{number}") for number in some], len(some))
    meter.cost("pin and unpin", lambda: [pinned(kv_cache, number) for number in some], len(some))
    meter.cost("set_quota", lambda: [kv_cache.set_quota("another", 1 << 40) for _ in range(1_000)], 1_000)
    meter.cost("new in a full cache", lambda: [allocated(kv_cache, layout) for layout in new], len(new) * step)
    index, evicted = kv_cache._chunks, min(n // 10, 10 * SAMPLE)
    meter.cost("evict", lambda: [index.evict_one() for _ in range(evicted)], evicted)
    meter.cost("block_map", kv_cache.block_map)
    meter.cost("reset", kv_cache.reset, n - evicted)
    return meter.costs


def pinned(kv_cache: KVCache, number: int) -> None:
    """Pins a chunk and lets it go again."""
    kv_cache.pin(f"document-{number}")
    kv_cache.unpin(f"document-{number}")


def entry_index(n: int) -> Costs:
    """The entry index of a tier."""
    meter, book = Meter(), EntryIndex()
    keys = KeyChain("model")

    def fill() -> None:
        for number in range(n):
            book.add(keys.root(number), 1_000, book.now())

    meter.filled(fill, n)
    some = [keys.root(number) for number in sampled(n)]
    meter.cost("find", lambda: [book.size(key) for key in some], len(some))
    meter.cost("use", lambda: [book.use(key, book.now()) for key in some], len(some))

    def evict() -> None:
        key = book.first()
        assert key is not None
        book.drop(key)

    count = min(n // 10, 10 * SAMPLE)
    meter.cost("evict", lambda: [evict() for _ in range(count)], count)
    return meter.costs


def kept_keys(n: int) -> Costs:
    """Names of chunks in tiers, at their limit: whatever comes pushes the oldest out."""
    from kvmosaic.engine.chunk_offloader import (
        OffloadedKeys,  # it brings torch, which is not to be measured in other parts
    )

    meter, kept = Meter(), OffloadedKeys(max_keys=n)
    gc.collect()
    gc.freeze()
    some_pool, keys = BlockPool("chunk_cache", 1, BLOCK_SIZE), KeyChain("model")

    def note(number: int) -> None:
        chunk = Chunk(keys.root(number), Key(b""), b"", 0, "", "", some_pool, 0.0, 0.0, Key(b""))  # type: ignore[arg-type]
        chunk.names = (f"document-{number}",)
        kept.note(chunk)

    def fill() -> None:
        for number in range(n):
            note(number)

    meter.filled(fill, n)
    some = sampled(n)
    meter.cost("find", lambda: [kept.named(f"document-{number}", "", "") for number in some], len(some))
    count = n // 2
    meter.cost("evict and insert", lambda: [note(n + number) for number in range(count)], count)
    return meter.costs


def disk(n: int) -> Costs:
    """A disk tier on a folder in memory, with n tiny files: opening it, and listing it whole."""
    meter, keys = Meter(), KeyChain("model")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        DiskTier(Path(folder) / "tier", 2**40).close()
        for number in range(n):
            key = keys.root(number)
            shard = Path(folder) / "tier" / key[:1].hex()
            shard.mkdir(exist_ok=True)
            os.close(os.open(shard / f"{key.hex()}.safetensors", os.O_WRONLY | os.O_CREAT))
        opened: list[DiskTier] = []
        meter.filled(lambda: opened.append(DiskTier(Path(folder) / "tier", 2**40)), n)
        meter.costs["open"] = meter.costs.pop("insert")
        tier = opened[0]
        some = [keys.root(number) for number in sampled(n)]
        meter.cost("find", lambda: tier.exists_many(some, Deadline()), len(some))
        tier.close()
    return meter.costs


def hashing(n: int) -> Costs:
    """Keys of runs of n tokens and of their blocks, by algorithm; microseconds per key."""
    meter = Meter()
    tokens = random.Random(n).randbytes(4 * n)
    count = max(200, 2_000_000 // max(n, 64))
    for algorithm in ("sha256", "xxh3_128"):
        chain = KeyChain("model", algorithm=algorithm)
        key = chain.root(0)
        meter.cost(f"{algorithm}", lambda c=chain, k=key: [c.extend_encoded(k, tokens) for _ in range(count)], count)
    return meter.costs


PARTS: dict[str, Callable[[int], Costs]] = {
    "block pool": pool,
    "prefix cache": prefix,
    "prefix cache, priority": lambda n: prefix(n, Priority()),
    "chunks": chunks,
    "chunks, priority": lambda n: chunks(n, "priority"),
    "ledger": entry_index,
    "kept keys": kept_keys,
    "disk": disk,
    "hashing": hashing,
}
