import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.sampling import Finish, SamplingParams, StopRules, StopStrings

letters = st.text(alphabet="ab ", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text, sizes):
    """The text in pieces of these sizes."""
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    return pieces


def expected(text, stops, keep):
    """By definition: the stop text that ends first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if keep else end - len(stop)], stop
    return text, None


@settings(max_examples=examples(300))
@given(letters, stop_lists, st.booleans(), st.lists(st.integers(0, 4), max_size=20))
def test_a_stop_text_is_found_wherever_the_pieces_are_cut(text, stops, keep, sizes):
    wanted_text, wanted_stop = expected(text, stops, keep)
    answer = StopStrings(stops, keep=keep)
    found, taken = None, ""
    for piece in cut(text, sizes):
        found = answer.append(piece)
        taken += answer.take(everything=found is not None)
        assert wanted_text.startswith(taken)
        if found:
            break
    assert (answer.text, found) == (wanted_text, wanted_stop)
    assert taken + answer.take(everything=True) == wanted_text
    assert answer.num_characters == len(wanted_text)


@settings(max_examples=examples(200))
@given(letters, stop_lists)
def test_only_what_may_begin_a_stop_text_is_held_back(text, stops):
    answer = StopStrings(stops)
    if answer.append(text) is None:
        held = text[answer.num_shown :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        longer = [text[start:] for start in range(answer.num_shown)]
        assert not any(stop.startswith(tail) and tail for tail in longer for stop in stops)


def test_without_stop_texts_everything_is_shown():
    answer = StopStrings([])
    assert answer.append("any") is None
    assert answer.take() == "any"
    assert answer.take() == ""


def test_text_that_is_not_searched_can_only_be_the_beginning():
    answer = StopStrings(["ab"])
    assert answer.append("ab a", search=False) is None
    assert answer.append("b") == "ab"
    assert answer.text == "ab "


def rules(eos=(2,), room=None, **settings):
    return StopRules(SamplingParams(**settings), eos, room)


def test_ids_that_end_an_answer():
    both = rules(stop_token_ids=[5])
    assert both.by_id(2, 1) == Finish("stop")
    assert both.by_id(5, 1) == Finish("stop", 5)
    assert both.by_id(7, 1) is None
    assert rules(ignore_eos=True).by_id(2, 1) is None
    assert rules(ignore_eos=True, stop_token_ids=[5]).ending_ids == {5}
    assert both.ending_ids == {2, 5}


def test_no_id_ends_an_answer_before_min_tokens():
    late = rules(min_tokens=3)
    assert [late.by_id(2, number) for number in (1, 2, 3, 4)] == [None, None, None, Finish("stop")]


@pytest.mark.parametrize(
    ("limit", "room", "wanted"), [(5, None, 5), (5, 3, 3), (3, 5, 3), (None, 4, 4), (None, None, None)]
)
def test_the_smaller_of_both_limits_counts(limit, room, wanted):
    assert rules(max_tokens=limit, room=room).max_tokens == wanted
    for number in range(1, 8):
        ended = rules(max_tokens=limit, room=room).by_length(number)
        assert ended == (Finish("length") if wanted is not None and number >= wanted else None)
