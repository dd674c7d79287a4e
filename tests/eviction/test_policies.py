import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import LFU, LRU, POLICIES, Candidate, EvictionPolicy, EvictionQueue, Priority, choose


def test_lfu_ranks_by_hits_and_then_by_the_last_use():
    rank = LFU().rank
    often, seldom = Candidate(1.0, 1, hits=9), Candidate(5_000.0, 1, hits=8)
    assert rank(seldom) < rank(often)
    assert rank(Candidate(1e6, 1, hits=9)) < rank(Candidate(1e6 + 1e-3, 1, hits=9)) < rank(Candidate(1.0, 1, hits=10))


def test_lru_ranks_by_the_last_use_alone():
    old = Candidate(last_used=1.0, num_tokens=1, priority=1.0)
    new = Candidate(last_used=2.0, num_tokens=9_999, priority=0.0)
    assert LRU().rank(old) < LRU().rank(new)


@pytest.mark.parametrize(
    ("leaves", "stays"),
    [
        (Candidate(5.0, 16, priority=0.1), Candidate(5.0, 16, priority=0.9)),
        (Candidate(5.0, 16, progress=0.2), Candidate(5.0, 16, progress=0.8)),
        (Candidate(1.0, 16), Candidate(5.0, 16)),
        (Candidate(5.0, 4_000), Candidate(5.0, 16)),
    ],
    ids=["less wanted", "less complete", "older", "larger"],
)
def test_priority_lets_the_less_wanted_less_complete_older_and_larger_leave(leaves, stays):
    assert Priority().rank(leaves) < Priority().rank(stays)


def test_priority_weighs_its_four_parts_as_documented():
    policy = Priority(age_seconds=100.0, size_tokens=1_000)
    zero = Candidate(last_used=0.0, num_tokens=0, priority=0.0, progress=0.0)
    assert policy.rank(zero) == 0.0
    assert policy.rank(Candidate(0.0, 0, 1.0, 0.0)) == pytest.approx(0.4)
    assert policy.rank(Candidate(0.0, 0, 0.0, 1.0)) == pytest.approx(0.3)
    assert policy.rank(Candidate(100.0, 0, 0.0, 0.0)) == pytest.approx(0.2)
    assert policy.rank(Candidate(0.0, 5_000, 0.0, 0.0)) == pytest.approx(-0.1)


def test_priority_in_the_end_lets_the_most_wanted_leave_when_nobody_uses_it():
    policy = Priority(age_seconds=60.0)
    wanted_long_ago, unwanted_now = Candidate(0.0, 16, priority=1.0), Candidate(121.0, 16, priority=0.0)
    assert policy.rank(wanted_long_ago) < policy.rank(unwanted_now)


@pytest.mark.parametrize("settings", [{"age_seconds": 0.0}, {"age_seconds": 1e9}, {"size_tokens": 0}])
def test_priority_refuses_settings_that_cannot_work(settings):
    with pytest.raises(InvalidConfig, match="must be"):
        Priority(**settings)


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_chosen_by_name_or_given_as_an_instance(name):
    policy = choose(name)
    assert policy.name == name
    assert isinstance(policy, EvictionPolicy)
    assert choose(policy) is policy


def test_unknown_policies_are_refused_with_the_names_there_are():
    with pytest.raises(InvalidConfig, match="'lru' or 'lfu' or 'gdsf' or 'priority'"):
        choose("fifo")
    with pytest.raises(InvalidConfig, match="rank"):
        choose(42)


class Item:
    def __init__(self, name):
        self.name, self.queue_entry = name, None

    def queued(self, rank, number, *queues):
        self.queue_entry = (rank, number, self)
        for queue in queues:
            queue.push(self)


def names(queue):
    return [item.name for item in queue.in_order()]


def test_the_queue_has_the_lowest_rank_first_and_equal_ranks_in_fifo_order():
    queue = EvictionQueue()
    for number, (name, rank) in enumerate([("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 0.5)]):
        Item(name).queued(rank, number, queue)
    assert names(queue) == ["d", "a", "b", "c"] and queue.first().name == "d"


def test_a_removed_item_is_not_evicted_and_can_be_pushed_again():
    queue, a, b = EvictionQueue(), Item("a"), Item("b")
    a.queued(1.0, 0, queue)
    b.queued(2.0, 1, queue)
    queue.remove(a)
    assert a.queue_entry is None and len(queue) == 1 and queue.first() is b
    a.queued(3.0, 2, queue)
    assert names(queue) == ["b", "a"]


@settings(max_examples=examples(80))
@given(st.lists(st.tuples(st.sampled_from("push remove evict".split()), st.integers(0, 9), st.integers(0, 5))))
def test_two_queues_that_share_entries_agree_with_sorting(operations):
    queues, items, expected = (EvictionQueue(), EvictionQueue()), [Item(name) for name in range(10)], {}
    for number, (operation, which, rank) in enumerate(operations):
        item = items[which] if operation != "evict" else queues[0].first()
        if item is not None and item.queue_entry is not None:
            for queue in queues:
                queue.remove(item)
            del expected[item.name]
        if operation == "push":
            item.queued(rank, number, *queues)
            expected[item.name] = (rank, number)
        for queue in queues:
            assert names(queue) == sorted(expected, key=expected.get) and len(queue) == len(expected)
            first = queue.first()
            assert (first.name if first else None) == min(expected, key=expected.get, default=None)
            assert len(queue._heap) <= 2 * len(queue) + 64


def test_the_heap_does_not_grow_with_what_was_removed():
    queue, items, draw = EvictionQueue(), [Item(name) for name in range(40)], random.Random(5)
    for number in range(5_000):
        item = draw.choice(items)
        if item.queue_entry is not None:
            queue.remove(item)
        if draw.random() < 0.7:
            candidate = Candidate(draw.random() * 1e4, draw.randrange(9_000), draw.random(), draw.random())
            item.queued(Priority().rank(candidate), number, queue)
        assert len(queue._heap) <= 2 * len(queue) + 64
