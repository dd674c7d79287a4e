import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.cache import BlockCopy, BlockPool, BlockRun, BlockTable
from kvmosaic.errors import OutOfBlocks


def pool_of(num_blocks=32, block_size=4):
    return BlockPool("request", num_blocks, block_size)


def test_a_table_takes_blocks_only_as_its_tokens_need_them():
    table = BlockTable(pool_of())
    sizes = []
    for _ in range(9):
        assert table.append(1) == []
        sizes.append(len(table.block_ids))
        table.check_invariants()
    assert sizes == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert table.append(0) == [] and table.num_tokens == 9


def test_slots_follow_the_blocks():
    pool = pool_of()
    table = BlockTable.adopt(pool, _taken(pool, 7, 8, 2), 10)
    assert table.slots(0, 10) == [28, 29, 30, 31, 32, 33, 34, 35, 8, 9]
    assert table.slots(3, 3) == [31, 32, 33]
    assert table.slots(9, 0) == []


def test_neighbouring_blocks_make_one_run():
    pool = pool_of()
    table = BlockTable.adopt(pool, _taken(pool, 7, 8, 2), 10)
    assert table.runs() == (BlockRun(28, 8), BlockRun(8, 2))
    assert table.runs(9) == (BlockRun(28, 8), BlockRun(8, 1))
    assert table.runs(8) == (BlockRun(28, 8),)
    assert table.runs(3) == (BlockRun(28, 3),)
    assert table.runs(0) == ()


def test_a_token_more_makes_the_last_run_longer_and_keeps_the_others():
    pool = pool_of()
    table = BlockTable.adopt(pool, _taken(pool, 7, 8, 2), 10)
    first = table.runs()[0]
    table.append(1)
    assert table.runs() == (first, BlockRun(8, 3))
    assert table.runs()[0] is first, "finished runs are kept, not made anew"


def test_forked_table_copies_only_the_written_block():
    pool = pool_of()
    table = BlockTable(pool)
    table.append(10)
    other = table.fork()
    assert pool.num_used == 3 and pool.num_shared == 3
    (copy,) = other.append(1)
    assert copy == BlockCopy(table.block_ids[2], other.block_ids[2])
    assert list(other.block_ids[:2]) == list(table.block_ids[:2])
    assert pool.num_used == 4 and pool.num_shared == 2
    assert table.append(1) == [], "the last holder writes in place"
    other.release()
    table.release()
    assert pool.num_used == 0


def test_a_fork_at_a_block_border_copies_nothing():
    pool = pool_of()
    table = BlockTable(pool)
    table.append(8)
    other = table.fork()
    assert other.append(1) == [] and table.append(1) == []
    assert other.block_ids[-1] != table.block_ids[-1]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_a_refused_append_changes_nothing_and_the_needed_blocks_are_told_before(count):
    pool = pool_of(num_blocks=4)
    table = BlockTable(pool)
    table.append(6)
    other = table.fork()
    pool.allocate(2, grows=False)
    before = list(table.block_ids), table.num_tokens, table.runs(), pool._references[:]
    needed = other.blocks_to_append(count)
    assert needed == 1 + max(0, -(-(6 + count) // 4) - 2)
    with pytest.raises(OutOfBlocks):
        other.append(count)
    assert (list(other.block_ids), other.num_tokens, other.runs(), pool._references) == before
    pool.check_invariants()


def test_release_gives_every_reference_back_and_a_second_one_does_nothing():
    pool = pool_of()
    table = BlockTable(pool)
    table.append(10)
    table.release()
    table.release()
    assert table.is_released and pool.num_used == 0 and table.runs() == () and list(table.block_ids) == []


def test_a_table_over_reused_blocks_takes_their_references_over():
    pool = pool_of()
    shared = pool.allocate(2)
    pool.retain(shared)
    table = BlockTable.adopt(pool, shared, 8)
    table.append(3)
    assert list(table.block_ids[:2]) == shared and pool.num_used == 3
    table.release()
    assert pool.num_used == 2 and pool.num_references == 2


@settings(max_examples=examples(60))
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 16]))
def test_forks_read_back_their_own_tokens_whatever_the_order_of_writes(draw, block_size):
    pool = BlockPool("request", 64, block_size)
    memory, tables = {}, [(BlockTable(pool, grows=True), [])]
    for number in range(60):
        table, expected = draw.choice(tables)
        action = draw.random()
        if action < 0.7:
            count = draw.randint(1, 5)
            try:
                copies = table.append(count)
            except OutOfBlocks:
                continue
            for source, target in copies:
                for offset in range(block_size):
                    memory[target * block_size + offset] = memory.get(source * block_size + offset)
            for slot in table.slots(len(expected), count):
                memory[slot] = (number, len(expected))
                expected.append(memory[slot])
        elif action < 0.85:
            tables.append((table.fork(), expected.copy()))
        elif len(tables) > 1:
            table.release()
            tables = [pair for pair in tables if pair[0] is not table]
        pool.check_invariants()
        for table, expected in tables:
            table.check_invariants()
            assert [memory[slot] for slot in table.slots(0, table.num_tokens)] == expected
            for count in {0, 1, len(expected) // 2, len(expected)} & set(range(len(expected) + 1)):
                spelled = [
                    s for run in table.runs(count) for s in range(run.first_slot, run.first_slot + run.num_tokens)
                ]
                assert spelled == table.slots(0, count)
    for table, _ in tables:
        table.release()
    assert pool.num_used == 0


def _taken(pool, *block_ids):
    """Takes exactly these blocks of an empty pool."""
    pool.allocate(pool.num_blocks, grows=False)
    pool.release([block for block in range(pool.num_blocks) if block not in block_ids])
    return list(block_ids)
