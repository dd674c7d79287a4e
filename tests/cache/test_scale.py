"""What a million entries would cost, asked of thousands: steps that are counted, and bytes; never seconds."""

import gc
import tracemalloc
from array import array
from types import SimpleNamespace

import pytest
from cache.world import Clock, layout_of, make_kv_cache, warmed
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.cache import BlockPool, Chunk, KeyChain
from kvmosaic.cache.groups import Groups
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.eviction import LRU, Candidate, EvictionQueue

SYSTEM, QUESTION = [1, 2, 3], [7]


class CountedArray(array):
    """An array that counts how often it is looked into or written to."""

    steps = 0

    def __getitem__(self, index):
        type(self).steps += 1
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        type(self).steps += 1
        super().__setitem__(index, value)


class Rank(float):
    """A number that counts how often it is compared."""

    steps = 0

    def __eq__(self, other):
        Rank.steps += 1
        return float.__eq__(self, other)

    def __lt__(self, other):
        Rank.steps += 1
        return float.__lt__(self, other)

    __hash__ = float.__hash__


class CountedPolicy:
    """Least recently used, and counted."""

    name = "counted"

    def __init__(self):
        self.num_ranks = 0

    def rank(self, candidate):
        self.num_ranks += 1
        return Rank(candidate.last_used)


class NeverWalked(dict):
    """A dictionary in which things are found, but which nobody goes through from one end."""

    def _refuse(self, *_):
        raise AssertionError("all of it is gone through")

    __iter__ = keys = values = items = copy = _refuse


def document(number, num_tokens=8):
    return [10 + number % 50_000, 60_000 + number // 50_000, *range(100, 98 + num_tokens)]


def filled(num_chunks, **config):
    """A KV cache that is full of chunks of two blocks, with a name each, 50 in a prompt."""
    kv_cache = make_kv_cache(chunk_blocks=2 * num_chunks, max_chunks=num_chunks, **config)
    for first in range(0, num_chunks, 50):
        add(kv_cache, range(first, first + 50))
    return kv_cache


def add(kv_cache, numbers):
    names = [f"document {number}" for number in numbers]
    warmed(kv_cache, layout_of(SYSTEM, [document(number) for number in numbers], QUESTION, names=names))
    kv_cache._clock.wait(1.0)


def bytes_of(make, count):
    """Bytes per entry that stay after `make`."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kept = make()
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / count, kept
    finally:
        tracemalloc.stop()


def taking_steps(num_blocks):
    """Steps to take and give back single blocks out of a pool in which every second one is free."""
    pool = BlockPool("request", num_blocks, 16)
    pool.allocate(num_blocks, grows=False)
    pool.release(range(0, num_blocks, 2))
    runs = pool._free
    for name in ("_starting", "_ending", "_next", "_previous"):
        setattr(runs, name, CountedArray("i", getattr(runs, name)))
    CountedArray.steps = 0
    for _ in range(num_blocks // 20):
        pool.release(pool.allocate(10, grows=False)[:5])
    return CountedArray.steps / (num_blocks // 20)


def test_a_block_is_taken_in_as_few_steps_from_many_runs_as_from_few():
    few, many = taking_steps(400), taking_steps(8_000)
    assert many <= 1.1 * few


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_pool_takes_the_same_memory_whatever_its_free_blocks_look_like(every):
    def make():
        pool = BlockPool("request", 20_000, 16)
        pool.allocate(20_000, grows=False)
        pool.release(range(0, 20_000, every))
        return pool

    num_bytes, _ = bytes_of(make, 20_000)
    assert num_bytes < 24


def test_a_prefix_block_takes_few_bytes():
    blocks, depth, size = 20_000, 8, 64
    pool, chain = BlockPool("request", blocks, 16), KeyChain("model")

    def make():
        cache = PrefixCache(pool, LRU(), Clock())
        for number in range(0, blocks, depth):
            key = root = chain.root(number)
            entries = []
            taken = pool.allocate(depth, grows=False)
            for index, block_id in enumerate(taken):
                tokens = (number + index).to_bytes(8, "little") * (size // 8)
                key = chain.extend_encoded(key, tokens)
                entries.append(cache.register(key, root, entries[-1] if entries else None, tokens, block_id)[0])
            pool.release(taken)
            cache.release(entries)
        return cache

    num_bytes, cache = bytes_of(make, blocks)
    assert len(cache) == blocks and num_bytes < 460, "key, tokens and entry are 320 of them"


def test_a_chunk_takes_few_bytes_besides_its_tokens():
    count, num_tokens = 4_000, 8
    num_bytes, kv_cache = bytes_of(lambda: filled(count), count)
    assert len(kv_cache.chunks()) == count and num_bytes - 4 * num_tokens < 1_300


def test_evicting_from_many_takes_hardly_more_steps_than_from_few():
    def steps(count):
        policy, clock = CountedPolicy(), Clock()
        items = [SimpleNamespace(queue_entry=None, last_used=clock.now + (i * 7_919) % count) for i in range(count)]
        queue = EvictionQueue()
        for number, item in enumerate(items):
            item.queue_entry = (policy.rank(Candidate(item.last_used, 1)), number, item)
            queue.push(item)
        Rank.steps, gone = 0, []
        for _ in range(count // 2):
            gone.append(queue.first())
            queue.remove(gone[-1])
        assert policy.num_ranks == count and gone == sorted(items, key=lambda item: item.last_used)[: count // 2]
        return Rank.steps / (count // 2)

    few, many = steps(1_000), steps(8_000)
    assert many < 1.6 * few, "log 8,000 is 1.3 times log 1,000"


def living_chunks(kv_cache):
    """Every chunk of a KV cache that takes memory, whether the KV cache knows it or not."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if type(one) is Chunk and one.table.pool is kv_cache.chunk_pool}


def test_a_full_cache_that_is_turned_over_keeps_nothing_of_what_has_left():
    kv_cache = filled(200)
    for first in range(200, 1_400, 50):
        add(kv_cache, range(first, first + 50))
    present = set(map(id, kv_cache.chunks()))
    assert len(present) == 200 and kv_cache.statistics().evictions == 1_200
    assert living_chunks(kv_cache) == present


def test_nothing_that_is_asked_while_requests_run_goes_through_all_chunks():
    kv_cache = filled(200)
    index, prefix = kv_cache._chunks, kv_cache._prefix
    index._chunks, prefix._entries = NeverWalked(index._chunks), NeverWalked(prefix._entries)
    for groups in (index._names, index.same_text._chunks):
        groups._members = NeverWalked(groups._members)
    assert kv_cache.statistics().cached_chunks == 200
    assert kv_cache.find_chunks("document 150")[0].num_tokens == 8
    assert kv_cache.pin("document 150") == kv_cache.unpin("document 150") == 1
    assert kv_cache.set_priority("document 3", 0.9) == 1
    kv_cache.set_quota("somebody", 1_000)
    kv_cache.set_quota("", 390)
    assert kv_cache.tenant_usage().num_blocks <= 390
    add(kv_cache, range(300, 350))
    assert kv_cache.delete("document 320") == 1
    assert kv_cache.statistics().evictions >= 50
    with pytest.raises(AssertionError, match="gone through"):
        kv_cache.chunks()


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_groups_agree_with_a_dictionary_of_dictionaries(operations):
    groups, plain = Groups(), {}
    for is_add, place, member in operations:
        if is_add:
            groups.add(place, member)
            plain.setdefault(place, {})[member] = None
        else:
            groups.discard(place, member)
            plain.get(place, {}).pop(member, None)
            if not plain.get(place, True):
                del plain[place]
        assert {place: groups.members(place) for place in groups} == {p: tuple(m) for p, m in plain.items()}
        assert len(groups) == len(plain)
