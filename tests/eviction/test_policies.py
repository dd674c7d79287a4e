import random

import pytest

from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import LRU, POLICIES, Candidate, EvictionPolicy, EvictionQueue, Priority, choose


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
    with pytest.raises(InvalidConfig, match="'lru' or 'priority'"):
        choose("fifo")
    with pytest.raises(InvalidConfig, match="rank"):
        choose(42)


def test_the_queue_pops_the_lowest_rank_and_equal_ranks_in_the_order_they_came():
    queue = EvictionQueue(LRU())
    for item, last_used in [("b", 2.0), ("a", 1.0), ("c", 2.0), ("d", 0.5)]:
        queue.add(item, Candidate(last_used, 1))
    assert queue.in_order() == ["d", "a", "b", "c"]
    assert [queue.pop() for _ in range(5)] == ["d", "a", "b", "c", None]


def test_an_item_that_is_used_again_leaves_the_line_and_comes_back_at_its_new_place():
    queue = EvictionQueue(LRU())
    queue.add("a", Candidate(1.0, 1))
    queue.add("b", Candidate(2.0, 1))
    queue.discard("a")
    queue.discard("never there")
    assert "a" not in queue and len(queue) == 1
    queue.add("a", Candidate(3.0, 1))
    assert [queue.pop(), queue.pop()] == ["b", "a"]


def test_the_queue_agrees_with_sorting_over_many_random_changes_and_forgets_its_leftovers():
    draw, queue, expected = random.Random(5), EvictionQueue(Priority()), {}
    for number in range(5_000):
        item = draw.randrange(40)
        if draw.random() < 0.7:
            candidate = Candidate(draw.random() * 1e4, draw.randrange(9_000), draw.random(), draw.random())
            queue.add(item, candidate)
            expected[item] = (Priority().rank(candidate), number)
        elif draw.random() < 0.5:
            queue.discard(item)
            expected.pop(item, None)
        else:
            first = min(expected, key=expected.get, default=None)
            assert queue.pop() == first
            expected.pop(first, None)
        assert len(queue) == len(expected)
    assert queue.in_order() == sorted(expected, key=expected.get)
    assert len(queue._heap) <= 2 * len(queue) + 64
