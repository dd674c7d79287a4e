"""The waiting queue: the order of a sorted list, at the cost of a heap."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.engine import Request, Sequence
from kvmosaic.engine.admission import WaitingQueue
from kvmosaic.engine.placement import PlacedPrompt
from kvmosaic.layout import arrange
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import Answer, SamplingParams


def sequence(tenant="", priority=0, arrival_time=0.0):
    prompt = replace(Prompt.plain([1]), tenant=tenant)
    params = SamplingParams()
    request = Request("a", PlacedPrompt(prompt, arrange(prompt, "shared", "system")), params, arrival_time, priority)
    return Sequence(request, Answer(params), None)


STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(["", "a", "b"]), st.integers(-1, 1), st.integers(0, 3)),
    st.tuples(st.just("remove"), st.integers(0, 50)),
    st.tuples(st.just("first"), st.sets(st.sampled_from(["", "a", "b"]), max_size=2)),
    st.tuples(st.just("take")),
)


@given(st.lists(STEPS, max_size=60))
def test_it_gives_what_a_sorted_list_gives(steps):
    queue, twin = WaitingQueue(), []
    for step in steps:
        if step[0] == "add":
            added = sequence(*step[1:])
            queue.add(added)
            twin.append(added)
            twin.sort(key=lambda waiting: waiting.sort_key)
        elif step[0] == "remove" and twin:
            queue.remove(removed := twin.pop(step[1] % len(twin)))
            queue.remove(removed)
            assert removed not in queue
        elif step[0] == "first":
            expected = [waiting for waiting in twin if waiting.request.prompt.tenant not in step[1]]
            assert queue.first(step[1]) is (expected[0] if expected else None)
        elif step[0] == "take" and twin:
            assert queue.first() is twin[0]
            queue.remove(twin.pop(0))
        assert len(queue) == len(twin)
    while twin:
        assert queue.first() is twin[0]
        queue.remove(twin.pop(0))
    assert queue.first() is None


def test_what_was_taken_out_does_not_pile_up():
    queue = WaitingQueue()
    stays = sequence(arrival_time=0.5)
    queue.add(stays)
    for number in range(10_000):
        other = sequence(tenant=str(number % 3), arrival_time=float(number))
        queue.add(other)
        queue.remove(other)
    assert sum(map(len, queue._heaps.values())) < 200
    assert queue.first() is stays


def test_ten_thousand_wait_and_leave_in_the_order_of_their_rank():
    queue = WaitingQueue()
    waiting = [sequence(priority=number % 7, arrival_time=number * 37 % 1009) for number in range(10_000)]
    for each in waiting:
        queue.add(each)
    left = []
    while (first := queue.first()) is not None:
        left.append(first)
        queue.remove(first)
    assert left == sorted(waiting, key=lambda each: each.sort_key)
