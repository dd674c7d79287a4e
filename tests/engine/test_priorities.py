"""Priorities: who goes first, who gives way, and that everybody has a turn, on a clock that counts steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clocked import NO_AGING, NO_GAP, World, policy
from support.engines import GREEDY

from kvmosaic.config import MAX_PRIORITY
from kvmosaic.engine import Request
from kvmosaic.engine.preemption import in_order
from kvmosaic.engine.priorities import AGING_SECONDS, class_of, sort_key_of
from kvmosaic.errors import InvalidPriority, InvalidPrompt
from kvmosaic.prompt import Prompt, Segment, SegmentKind

NUMBERS = st.integers(-MAX_PRIORITY, MAX_PRIORITY)
TIMES = st.integers(0, 10_000)


@given(NUMBERS, TIMES, NUMBERS, TIMES, st.integers(0, 10_000))
def test_turns_order_requests_by_priority_and_waiting_at_any_time(priority, arrival, other, later, waited):
    def effective(priority, arrival, now):
        return AGING_SECONDS * priority + (now - arrival)

    now = max(arrival, later) + waited
    first, second = effective(priority, arrival, now), effective(other, later, now)
    turns = sort_key_of(priority, arrival), sort_key_of(other, later)
    assert (first > second) == (turns[0] < turns[1])


@pytest.mark.parametrize("priority", [101, -101, 2**40, 1.0, True, "1", None, float("nan")])
def test_a_priority_outside_its_range_is_refused(priority):
    world = World()
    with pytest.raises(InvalidPriority, match="from -100 to 100") as raised:
        world.add(priority)
    assert isinstance(raised.value, InvalidPrompt)
    assert not world.engine.has_unfinished_requests


def test_priorities_are_counted_in_three_classes():
    assert [class_of(priority) for priority in (-100, -1, 0, 1, 100)] == ["low", "low", "normal", "high", "high"]


@policy(aging=5.0)
def test_who_waited_long_enough_goes_before_a_higher_priority():
    world = World(max_running=1)
    running, low = world.add(9, tokens=30), world.add(0)
    for _ in range(12):
        world.step()
    high = world.add(2)
    world.run()
    assert running.finished_time < low.finished_time < high.finished_time, "it waited 12 seconds, which are worth 2.4"


@policy(aging=5.0)
def test_a_higher_priority_goes_before_who_has_not():
    world = World(max_running=1)
    world.add(9, tokens=30)
    low = world.add(0)
    for _ in range(8):
        world.step()
    high = world.add(2)
    world.run()
    assert high.finished_time < low.finished_time


def crowd(world: World, low: Request, arrivals, most: int) -> float | None:
    """When a request has ended, while others keep coming: each step the next of `arrivals`, over and over."""
    for index in range(most):
        if low.is_finished:
            return low.finished_time
        for priority in arrivals[index % len(arrivals)]:
            world.add(priority)
        world.step()
    return None


AGING = 3.0
HIGHEST = 4
ALONE = 4
"""Steps of one request on an idle engine: one for the prompt and the first token, then one a token."""


@settings(max_examples=12, deadline=None)
@given(
    arrivals=st.lists(st.lists(st.integers(0, HIGHEST), max_size=2), min_size=1, max_size=4),
    blocks=st.sampled_from([5, 8, 64]),
    running=st.integers(1, 3),
    gap=st.sampled_from([NO_GAP, 1, 3]),
)
def test_everybody_has_a_turn_whatever_comes(arrivals, blocks, running, gap):
    world = World(max_running=running, blocks=blocks)
    head_start = AGING * (HIGHEST + 1)  # who comes later than this stands behind it
    num_ahead = math.ceil(head_start + 1) * max(len(each) for each in arrivals)
    bound = head_start + (num_ahead + 1) * (ALONE + 1)
    with policy(aging=AGING, gap=gap):
        assert crowd(world, world.add(-1), arrivals, int(bound) + 1) is not None


@policy(aging=NO_AGING)
def test_without_aging_a_low_priority_would_wait_for_ever():
    world = World(max_running=1)
    assert crowd(world, world.add(-1), [[0]], 200) is None


def test_a_running_answer_does_not_give_way_for_ever():
    def end_of(**constants):
        with policy(**constants):
            world = World(blocks=8)
            return crowd(world, world.add(-1, tokens=20), [[2], [], [3]], 300)

    assert end_of(aging=AGING, gap=1) is not None
    assert end_of(aging=NO_AGING, gap=NO_GAP) is None, "with this many, it takes aging"


@pytest.mark.parametrize(("priority", "gives_way"), [(100, True), (10, True), (9, False), (0, False)])
def test_a_much_higher_priority_takes_the_place_of_a_running_answer(priority, gives_way):
    world = World(max_running=2)
    low = [world.add(0, tokens=20) for _ in range(2)]
    world.step()
    high = world.add(priority)
    world.run()
    assert world.engine.scheduler.num_preemptions == int(gives_way)
    assert (high.finished_time < min(request.finished_time for request in low)) == gives_way


def test_blocks_are_taken_for_a_much_higher_priority_only_if_that_makes_room():
    world = World(blocks=12)
    kept = world.add(5, prompt=30, tokens=16)
    world.add(0, prompt=8, tokens=8)
    world.step()
    high = world.add(10, prompt=20)
    world.step()
    assert world.engine.scheduler.num_preemptions == 0, "with two blocks more it could not run either"
    world.run()
    assert kept.is_finished and high.is_finished


def test_blocks_of_as_few_as_needed_are_taken_for_a_much_higher_priority():
    world = World(blocks=20)
    low = [world.add(0, prompt=16, tokens=40) for _ in range(4)]
    world.step()
    high = world.add(10, prompt=16, tokens=2)
    world.step()  # there was room for it, which the others have grown into
    world.step()
    assert high.first_token_time is not None
    assert world.engine.scheduler.num_preemptions == 1
    world.run()
    assert all(request.is_finished for request in low)


@policy(aging=2.0, gap=1)
def test_who_has_waited_as_long_as_the_gap_is_worth_does_not_give_way():
    world = World(max_running=1)
    low = world.add(0, tokens=40)
    for _ in range(10):
        world.step()
    high = world.add(4)
    world.run()
    assert world.engine.scheduler.num_preemptions == 0 and low.finished_time < high.finished_time


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=8))
@policy(aging=NO_AGING, gap=1)
def test_however_often_a_higher_priority_comes_little_is_computed_in_vain(pauses):
    world = World(max_running=1)
    prompt, tokens = 20, 24
    low = world.add(0, prompt=prompt, tokens=tokens)
    sequence = world.engine._requests.sequences_of(low)[0]
    for index in range(600):
        if low.is_finished:
            break
        for _ in range(pauses[index % len(pauses)]):
            world.step()
        world.add(1, tokens=1)
    needed = prompt + tokens - 1
    assert low.is_finished and sequence.num_worked < 3 * needed


def test_a_question_of_higher_priority_is_computed_before_the_rest_of_a_long_prompt():
    world = World(max_batched_tokens=16)
    long = world.add(0, prompt=200, tokens=2)
    world.step()
    high = world.add(1, prompt=12, tokens=2)
    world.step()
    assert high.first_token_time is not None and long.first_token_time is None
    world.run()


def test_who_computes_a_document_for_others_does_not_give_way_before_it_is_complete():
    world = World(max_running=2, max_batched_tokens=8)
    document = Prompt.from_tokens([1, 2], [list(range(40))], [3, 4])
    low = world.engine.add_request(document, replace(GREEDY, max_tokens=9))
    world.step()
    reader = world.engine.add_request(document, replace(GREEDY, max_tokens=9), priority=10)
    world.step()
    high = world.add(10, tokens=1)
    world.run()
    assert world.engine.kv_cache.statistics().computed_tokens == 40, "once"
    assert world.engine.scheduler.num_preemptions == 1, "when it was complete"
    assert high.finished_time < min(low.finished_time, reader.finished_time)


def test_of_equal_priority_the_first_comes_first_with_long_prompts_too():
    world = World(max_batched_tokens=16)
    long = world.add(0, prompt=60, tokens=2)
    world.step()
    late = world.add(0, prompt=12, tokens=2)
    world.run()
    assert long.first_token_time <= late.first_token_time


def test_who_gives_way_is_chosen_by_priority_progress_age_and_size():
    def order(*asked, steps=1):
        world = World()
        requests = [world.add(priority, prompt=prompt, tokens=tokens) for priority, prompt, tokens in asked]
        for _ in range(steps):
            world.step()
        sequences = [world.engine._requests.sequences_of(request)[0] for request in requests]
        return [sequences.index(sequence) for sequence in in_order(sequences, world.now)]

    assert order((5, 8, 20), (0, 8, 20), (-5, 8, 20)) == [2, 1, 0], "the least wanted first"
    assert order((0, 8, 200), (0, 8, 20)) == [0, 1], "what is nearly done stays"
    assert order((0, 150, 4), (0, 150, 4)) == [1, 0], "of equal ones, the last in rank first"


def documents(count: int, *, tokens: int = 64) -> Iterator[Prompt]:
    """Prompts of one document each, of other tokens."""
    for number in range(count):
        chunk = Segment(SegmentKind.CHUNK, token_ids=tuple((number + token) % 30 for token in range(tokens)))
        yield Prompt((chunk, Segment(SegmentKind.QUESTION, token_ids=tuple(range(8)))))


def test_a_question_runs_at_once_while_documents_are_warmed():
    world = World(max_batched_tokens=32)
    warm_ups = [world.engine.add_warm_up(prompt) for prompt in documents(16)]
    world.step()
    question = world.add(tokens=6)
    while not question.is_finished:
        world.step()
    assert question.finished_time - question.arrival_time <= 7, "one step that was under way, and its own six"
    assert all(not warm_up.is_finished for warm_up in warm_ups)
    world.run()
    assert all(warm_up.error is None and warm_up.is_finished for warm_up in warm_ups)


def test_a_question_gets_a_slot_that_warm_ups_have():
    world = World(max_batched_tokens=32, max_running=2)
    for prompt in documents(8):
        world.engine.add_warm_up(prompt)
    world.step()
    question = world.add(tokens=6)
    world.run()
    assert question.finished_time - question.arrival_time <= 8


def test_a_document_that_a_question_waits_for_is_computed_beside_other_answers():
    world = World(max_batched_tokens=32)
    (wanted,) = documents(1)
    warm_up = world.engine.add_warm_up(wanted)
    world.step()
    answer = world.add(tokens=200)
    question = world.engine.add_request(wanted, replace(GREEDY, max_tokens=4))
    while not question.is_finished:
        world.step()
    assert not answer.is_finished
    assert warm_up.is_finished


@policy(aging=1.0)
def test_warming_ends_however_many_questions_come():
    world = World(max_batched_tokens=32)
    warm_ups = [world.engine.add_warm_up(prompt) for prompt in documents(4)]
    assert crowd(world, warm_ups[-1], [[0, 0]], 400) is not None


def test_a_question_that_comes_waits_for_no_long_step_of_warm_ups():
    world = World(max_batched_tokens=1_024, costs=(0.01, 0.002))
    for prompt in documents(16, tokens=512):
        world.engine.add_warm_up(prompt)
    world.step()  # a first one, from which it knows
    for _ in range(5):
        before = world.now
        world.step()
        assert world.now - before < 0.6
