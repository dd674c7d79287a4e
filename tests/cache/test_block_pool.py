import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.cache import BlockPool
from kvmosaic.cache.block_pool import FreeRuns
from kvmosaic.errors import InvalidConfig, OutOfBlocks


def num_runs(block_ids):
    return sum(1 for i, block in enumerate(block_ids) if i == 0 or block_ids[i - 1] + 1 != block)


def with_free(num_blocks, *free):
    """A pool in which only these blocks are free."""
    pool = BlockPool("request", num_blocks, 4)
    pool.allocate(num_blocks, grows=False)
    pool.release(sorted(free))
    return pool


def test_blocks_are_handed_out_once_and_come_back():
    pool = BlockPool("request", 8, 4)
    first, second = pool.allocate(3), pool.allocate(5)
    assert sorted(first + second) == list(range(8))
    assert (pool.num_free, pool.num_used) == (0, 8)
    pool.release(first)
    assert (pool.num_free, pool.num_used) == (3, 5)
    assert sorted(pool.allocate(3)) == sorted(first)
    pool.check_invariants()


def test_a_shared_block_is_free_only_after_its_last_reference():
    pool = BlockPool("request", 4, 4)
    blocks = pool.allocate(2)
    pool.retain(blocks)
    assert pool.num_shared == 2 and pool.num_references == 4
    pool.release(blocks)
    assert pool.num_shared == 0 and pool.num_used == 2
    assert [pool.reference_count(block) for block in blocks] == [1, 1]
    pool.release(blocks)
    assert pool.num_used == pool.num_references == 0


def test_too_large_an_allocation_names_the_numbers_and_takes_nothing():
    pool = BlockPool("chunk_cache", 4, 4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="'chunk_cache' cannot give 2 blocks: of 4 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_invariants()


def test_an_allocation_of_nothing_is_safe_in_a_full_pool():
    pool = BlockPool("request", 1, 4)
    (block,) = pool.allocate(1)
    assert pool.allocate(0) == pool.allocate(0, after=block) == []


def test_blocks_right_behind_are_preferred_to_a_run_that_fits():
    pool = with_free(12, 3, 4, 7, 8, 9)
    assert pool.allocate(2, after=6, grows=False) == [7, 8]


def test_blocks_right_behind_are_taken_as_far_as_they_go_and_the_rest_from_a_run_that_fits():
    pool = with_free(12, 2, 3, 5, 6, 7, 9, 10)
    assert pool.allocate(4, after=8, grows=False) == [9, 10, 2, 3]


def test_the_shortest_run_that_fits_is_taken():
    pool = with_free(20, *range(0, 6), *range(8, 11), *range(12, 20))
    assert pool.allocate(3, grows=False) == [8, 9, 10]
    assert pool.allocate(5, grows=False) == [0, 1, 2, 3, 4]


def test_without_a_run_that_fits_as_few_runs_as_possible_are_taken():
    pool = with_free(20, 1, 3, 4, 6, 7, 8, 10, 11, 12, 13)
    blocks = pool.allocate(8, grows=False)
    assert num_runs(blocks) == 3
    assert blocks == [10, 11, 12, 13, 6, 7, 8, 1]


def test_sequences_that_decode_side_by_side_stay_in_one_run_each():
    pool = BlockPool("request", 1_024, 4)
    tables = [pool.allocate(3, grows=True) for _ in range(16)]
    for _ in range(20):
        for table in tables:
            table += pool.allocate(1, after=table[-1], grows=True)
    assert [num_runs(table) for table in tables] == [1] * 16


def test_a_single_block_starts_in_a_large_gap_by_default():
    pool = with_free(40, 1, 3, *range(10, 30))
    (block,) = pool.allocate(1)
    assert 15 < block < 25


@pytest.mark.parametrize("call", ["retain", "release"])
def test_a_free_block_can_be_neither_retained_nor_released(call):
    pool = BlockPool("request", 4, 4)
    with pytest.raises(AssertionError, match="block 2 of the pool 'request'"):
        getattr(pool, call)([2])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 4), (2**31, 4), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks, block_size):
    with pytest.raises(InvalidConfig):
        BlockPool("request", num_blocks, block_size)


@settings(max_examples=examples(60))
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans()), max_size=40))
def test_free_runs_agree_with_a_plain_set(num_blocks, operations):
    runs, free = FreeRuns(num_blocks), set(range(num_blocks))
    for a, b, is_take in operations:
        if is_take:
            first = runs.fitting(1 + a % 5)
            if first is None:
                continue
            count = 1 + a % 5
            taken = runs.take(first, count, b % (runs.length_at(first) - count + 1))
            assert free >= set(range(taken, taken + count))
            free -= set(range(taken, taken + count))
        elif (block := a % num_blocks) not in free:
            runs.put(block, 1)
            free.add(block)
        runs.check_invariants()
        assert {first + i for first, length in runs.runs() for i in range(length)} == free
        assert runs.num_free == len(free)
        assert runs.longest == max((length for _, length in runs.runs()), default=0)


@settings(max_examples=examples(60))
@given(st.integers(1, 60), st.randoms(use_true_random=False), st.integers(1, 60))
def test_no_allocation_uses_more_runs_than_needed(num_blocks, draw, count):
    free = [block for block in range(num_blocks) if draw.random() < 0.6]
    pool = with_free(num_blocks, *free)
    if count > pool.num_free:
        return
    lengths = sorted((length for _, length in pool._free.runs()), reverse=True)
    fewest = next(k for k in range(len(lengths) + 1) if sum(lengths[:k]) >= count)
    blocks = pool.allocate(count, grows=False)
    assert len(set(blocks)) == count and set(blocks) <= set(free)
    pool.check_invariants()
    # Two runs that were taken may turn out to be neighbours never: free runs do not touch.
    assert num_runs(blocks) == fewest


class CountingList(list):
    """A list that counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self):
        raise AssertionError("the whole pool is scanned")


def test_a_million_blocks_are_never_scanned():
    draw, pool = random.Random(1), BlockPool("request", 1_000_000, 16)
    held = [pool.allocate(draw.randint(1, 300), grows=False) for _ in range(4_000)]
    draw.shuffle(held)
    for blocks in held[::2]:
        pool.release(blocks)
    assert len(pool._free._lengths) < 1_000, "few lengths, however many runs"
    pool._references = CountingList(pool._references)
    taken = [pool.allocate(4, grows=grows) for grows in (True, False)]
    for blocks in taken:
        pool.retain(blocks)
        pool.release(blocks)
        pool.release(blocks)
    assert pool._references.looks == 2 * 3 * 4
