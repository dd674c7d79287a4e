"""Allocating, advancing, extending, forking and releasing."""

from itertools import chain

import pytest
from cache.world import Clock, allocation_state, compute_all, layout_of, make_kv_cache, plain, state_of, warmed

from kvmosaic.errors import ChunkCacheFull, OutOfBlocks, RequestTooLarge

SYSTEM, DOC_A, DOC_B, DOC_C, QUESTION = [1] * 6, [2] * 5, [3] * 9, [4] * 4, [5, 6, 7]


def test_every_span_has_room_for_all_of_its_tokens():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))
    assert [span.table.num_tokens for span in allocation.spans] == [6, 5, 9, 3]
    assert [len(span.table.block_ids) for span in allocation.spans] == [2, 2, 3, 1]
    assert [span.is_owner for span in allocation.spans] == [False, True, True, False]
    assert [span.is_closed for span in allocation.spans] == [True, True, True, False]
    kv_cache.check_invariants()


def test_a_chunk_read_by_many_at_different_places_has_one_physical_copy():
    kv_cache = make_kv_cache()
    warmed(kv_cache, layout_of(SYSTEM, [DOC_B], QUESTION))
    used = kv_cache.chunk_pool.num_used
    prompts = [[DOC_B], [DOC_A, DOC_B], [DOC_C, DOC_A, DOC_B], [DOC_B, DOC_B]]
    readers = [
        kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, chunks, QUESTION, strategy="sequential")))
        for chunks in prompts
    ]
    places = {(span.table.runs(), span.chunk.key) for r in readers for span in r.spans if span.num_tokens == 9}
    assert len(places) == 1
    assert kv_cache.chunk_pool.num_used == used + 2 + 1
    (chunk,) = {span.chunk for r in readers for span in r.spans if span.num_tokens == 9}
    assert chunk.ref_count == 4 and kv_cache.chunk_pool.reference_count(chunk.block_ids[0]) == 5
    assert readers[-1].held_chunks() == [chunk]


def test_the_same_chunk_twice_in_one_prompt_is_one_entry_with_one_owner():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_A], QUESTION)))
    first, second = allocation.spans[1:3]
    assert first.chunk is second.chunk and first.table is second.table
    assert (first.is_owner, second.is_owner) == (True, False)
    assert (first.action, second.action) == ("compute", "wait")
    kv_cache.advance(allocation, 1, 5)
    assert second.is_ready and second.num_computed == 5


def test_blocks_are_reused_while_the_step_that_writes_them_is_being_assembled():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    first = kv_cache.allocate(kv_cache.plan(layout))
    kv_cache.advance(first, 0, 4)
    assert kv_cache.plan(layout).spans[0].num_reused == 4
    kv_cache.advance(first, 0, 2)
    second = kv_cache.allocate(kv_cache.plan(layout))
    assert second.spans[0].action == "reuse"
    assert list(second.spans[0].table.block_ids) == list(first.spans[0].table.block_ids)


def test_what_was_evicted_after_planning_is_computed():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A], [5] * 9)
    warmed(kv_cache, layout)
    plan = kv_cache.plan(layout)
    assert [span.action for span in plan.spans] == ["reuse", "reuse", "compute"] and plan.reused_tokens == 19
    kv_cache.reset()
    allocation = kv_cache.allocate(plan)
    assert [span.action for span in allocation.spans] == ["compute", "compute", "compute"]
    assert [span.num_computed for span in allocation.spans] == [0, 0, 0]
    assert allocation.spans[1].is_owner
    kv_cache.check_invariants()


def test_a_block_that_moved_since_planning_is_read_where_it_is_now():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [], QUESTION)
    warmed(kv_cache, layout)
    plan = kv_cache.plan(layout)
    kv_cache.reset()
    kv_cache.allocate(kv_cache.plan(plain([8] * 9)))
    warmed(kv_cache, layout)
    moved = kv_cache.plan(layout).spans[0].block_ids
    assert moved != plan.spans[0].block_ids
    assert tuple(kv_cache.allocate(plan).spans[0].table.block_ids) == moved
    kv_cache.check_invariants()


def test_what_came_to_be_cached_after_planning_is_not_computed_twice():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)
    plan = kv_cache.plan(layout)
    first = kv_cache.allocate(kv_cache.plan(layout))
    kv_cache.advance(first, 1, 5)
    second = kv_cache.allocate(plan)
    assert [span.action for span in second.spans[1:3]] == ["reuse", "wait"]
    assert not any(span.is_owner for span in second.spans)


def test_two_writers_of_the_same_blocks_keep_one_cached_copy_and_their_own_tables():
    kv_cache = make_kv_cache()
    layout = layout_of(SYSTEM, [], [5] * 9)
    readers = [kv_cache.allocate(kv_cache.plan(layout)) for _ in range(2)]
    for reader in readers:
        compute_all(kv_cache, reader)
    tables = [[list(span.table.block_ids) for span in reader.spans] for reader in readers]
    assert not set(chain.from_iterable(tables[0])) & set(chain.from_iterable(tables[1]))
    assert [list(span.block_ids) for span in kv_cache.plan(layout).spans] == [tables[0][0], tables[0][1][:2]]
    kv_cache.release(readers[0])
    kv_cache.check_invariants()
    kv_cache.release(readers[1])
    kv_cache.check_invariants()
    assert kv_cache.request_pool.num_used == 5, "2 of the system prompt, 3 of the question"


def test_an_answer_is_cached_block_by_block_as_it_grows():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(plain([1, 2, 3])))
    compute_all(kv_cache, allocation)
    for token in [4, 5, 6, 7, 8]:
        assert kv_cache.append_slots(allocation, [token]) == []
        kv_cache.advance(allocation, 0, 1)
    assert allocation.last.num_tokens == allocation.last.num_computed == 8
    assert kv_cache.plan(plain([1, 2, 3, 4, 5, 6, 7, 8, 9])).reused_tokens == 8


def test_tokens_that_were_extended_but_not_computed_are_not_cached():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(plain([1, 2, 3])))
    compute_all(kv_cache, allocation)
    kv_cache.append_slots(allocation, [4])
    assert kv_cache.plan(plain([1, 2, 3, 4, 5])).reused_tokens == 0


def test_a_fork_shares_everything_and_copies_only_the_last_block():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], [5] * 6)))
    compute_all(kv_cache, allocation)
    used = kv_cache.request_pool.num_used
    other = kv_cache.fork(allocation)
    assert kv_cache.request_pool.num_used == used
    (copy,) = kv_cache.append_slots(other, [1])
    assert copy.source == allocation.last.table.block_ids[-1] and copy.target == other.last.table.block_ids[-1]
    assert kv_cache.request_pool.num_used == used + 1
    assert kv_cache.append_slots(allocation, [2]) == []
    for one in (allocation, other):
        kv_cache.advance(one, 2, 1)
    assert other.last.tokens != allocation.last.tokens
    kv_cache.check_invariants()
    kv_cache.release(allocation)
    kv_cache.check_invariants()
    kv_cache.release(other)
    assert kv_cache.chunks()[0].ref_count == 0


def test_release_twice_does_nothing_the_second_time():
    kv_cache = make_kv_cache()
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A], QUESTION)))
    kv_cache.release(allocation)
    before = state_of(kv_cache)
    kv_cache.release(allocation)
    assert state_of(kv_cache) == before
    assert kv_cache.request_pool.num_used == kv_cache.chunk_pool.num_used == 0


@pytest.mark.parametrize("order", ["old first", "old used again"])
def test_the_least_recently_used_chunk_makes_room(order):
    clock = Clock()
    kv_cache = make_kv_cache(chunk_blocks=6, clock=clock)
    for chunk in (DOC_A, DOC_B):
        warmed(kv_cache, layout_of(SYSTEM, [chunk], QUESTION))
        clock.wait(1)
    if order == "old used again":
        warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION))
        clock.wait(1)
    warmed(kv_cache, layout_of(SYSTEM, [[8] * 8], QUESTION))
    left = {chunk.token_ids[0] for chunk in kv_cache.chunks()}
    assert left == ({3, 8} if order == "old first" else {2, 8})
    assert kv_cache.statistics().evictions == 1


def test_priority_eviction_keeps_what_is_wanted():
    kv_cache = make_kv_cache(chunk_blocks=6, eviction="priority")
    for name, chunk in (("a", DOC_A), ("b", DOC_B)):
        warmed(kv_cache, layout_of(SYSTEM, [chunk], QUESTION, names=[name]))
    kv_cache.set_priority("a", 0.9)
    kv_cache.set_priority("b", 0.1)
    warmed(kv_cache, layout_of(SYSTEM, [[8] * 8], QUESTION))
    assert {chunk.token_ids[0] for chunk in kv_cache.chunks()} == {2, 8}


def test_more_chunks_than_max_chunks_push_the_oldest_out():
    clock = Clock()
    kv_cache = make_kv_cache(max_chunks=2, clock=clock)
    for number in range(5):
        warmed(kv_cache, layout_of(SYSTEM, [[number] * 3], QUESTION))
        clock.wait(1)
    assert [chunk.token_ids[0] for chunk in kv_cache.chunks()] == [3, 4]


def test_prefix_blocks_leave_from_their_end_oldest_first():
    clock = Clock()
    kv_cache = make_kv_cache(request_blocks=8, clock=clock)
    old, new = [1] * 12, [2] * 12
    warmed(kv_cache, plain(old))
    clock.wait(1)
    warmed(kv_cache, plain(new))
    clock.wait(1)
    warmed(kv_cache, plain([3] * 11))
    kv_cache.check_invariants()
    assert kv_cache.plan(plain([*old, 0])).reused_tokens == 8, "the end of the oldest has left, its beginning has not"
    assert kv_cache.plan(plain([*new, 0])).reused_tokens == 12


def refusals():
    def pinned(kv_cache):
        kv_cache.pin("a")

    def running(kv_cache):
        kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, DOC_B], QUESTION)))

    return [
        (
            "a pinned chunk",
            {"chunk_blocks": 5},
            pinned,
            [[8] * 13],
            QUESTION,
            ChunkCacheFull,
            "of which 2 are pinned by others",
        ),
        ("never fits", {"chunk_blocks": 5}, None, [[8] * 24], QUESTION, ChunkCacheFull, "need 6 blocks of 4 tokens"),
        ("together too many", {"chunk_blocks": 5}, None, [[8] * 12, [9] * 12], QUESTION, ChunkCacheFull, "need 6"),
        ("too many chunks", {"max_chunks": 2}, None, [[7], [8], [9]], QUESTION, ChunkCacheFull, "max_chunks is 2"),
        ("in use", {"chunk_blocks": 5}, running, [[8] * 4], QUESTION, OutOfBlocks, "0 are free and 0 may be evicted"),
        ("all chunks in use", {"max_chunks": 2}, running, [[8]], QUESTION, OutOfBlocks, "0 may be evicted"),
        ("a long question", {}, None, [], [8] * 33, RequestTooLarge, "the pool 'request' has 10"),
        ("busy requests", {}, running, [], [8] * 32, OutOfBlocks, "the pool 'request' cannot give 8 blocks"),
    ]


@pytest.mark.parametrize(
    ("config", "prepare", "chunks", "question", "error", "message"),
    [case[1:] for case in refusals()],
    ids=[case[0] for case in refusals()],
)
def test_a_refused_prompt_changes_nothing(config, prepare, chunks, question, error, message):
    kv_cache = make_kv_cache(**({"request_blocks": 10} | config))
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], [5] * 4, names=["a"]))
    if prepare:
        prepare(kv_cache)
    plan = kv_cache.plan(layout_of(SYSTEM, chunks, question))
    before = state_of(kv_cache), kv_cache.statistics()
    with pytest.raises(error, match=message):
        kv_cache.allocate(plan)
    assert (state_of(kv_cache), kv_cache.statistics()) == before
    kv_cache.check_invariants()


def test_a_prompt_whose_chunks_are_all_cached_needs_no_room_in_a_full_cache():
    kv_cache = make_kv_cache(chunk_blocks=2, max_chunks=1)
    layout = layout_of(SYSTEM, [DOC_A], QUESTION)
    warmed(kv_cache, layout)
    kv_cache.pin(kv_cache.chunks()[0].key)
    readers = [kv_cache.allocate(kv_cache.plan(layout)) for _ in range(3)]
    assert [reader.spans[1].action for reader in readers] == ["reuse"] * 3


def test_what_a_prompt_reuses_is_not_evicted_to_make_room_for_the_rest_of_it():
    kv_cache = make_kv_cache(chunk_blocks=5)
    warmed(kv_cache, layout_of(SYSTEM, [DOC_A], QUESTION))
    warmed(kv_cache, layout_of(SYSTEM, [DOC_B], QUESTION))
    allocation = kv_cache.allocate(kv_cache.plan(layout_of(SYSTEM, [DOC_A, [8] * 12], QUESTION)))
    assert [span.action for span in allocation.spans[1:3]] == ["reuse", "compute"]


def test_a_refused_extend_changes_nothing():
    kv_cache = make_kv_cache(request_blocks=3)
    first = kv_cache.allocate(kv_cache.plan(plain([1] * 6)))
    compute_all(kv_cache, first)
    second = kv_cache.fork(first)
    kv_cache.append_slots(second, [1])
    before = state_of(kv_cache), allocation_state(first), allocation_state(second)
    with pytest.raises(OutOfBlocks, match="'request' cannot give 1 blocks: of 3 0 are free and 0 may be evicted"):
        kv_cache.append_slots(second, [1, 2])
    assert (state_of(kv_cache), allocation_state(first), allocation_state(second)) == before


def test_growing_answers_push_idle_prefix_blocks_out():
    kv_cache = make_kv_cache(request_blocks=3)
    warmed(kv_cache, plain([9] * 8))
    allocation = kv_cache.allocate(kv_cache.plan(plain([1] * 4)))
    compute_all(kv_cache, allocation)
    kv_cache.append_slots(allocation, [1] * 8)
    assert kv_cache.statistics().prefix_evictions == 2 and len(allocation.last.table.block_ids) == 3
    kv_cache.check_invariants()
