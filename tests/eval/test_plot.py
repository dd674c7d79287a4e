"""The Pareto front beside its obvious twin, and labels that do not cover anything."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.eval.plot import overlap, pareto_front, place_labels

SMALL = st.integers(0, 6).map(float)
POINTS = st.lists(st.tuples(SMALL, SMALL), max_size=30)


@given(POINTS)
def test_front_holds_what_no_other_point_beats(points: list[tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    expected = {n for n, point in enumerate(points) if not any(beats(other, point) for other in points)}
    front = pareto_front(points)
    assert set(front) == expected
    assert len(front) == len(expected)
    costs = [points[number] for number in front]
    assert costs == sorted(costs)


PLACES = st.lists(st.tuples(st.floats(0, 600), st.floats(0, 400)), max_size=25)


@given(PLACES, st.floats(10, 120), st.floats(5, 20))
def test_labels_cover_neither_each_other_nor_a_point(
    points: list[tuple[float, float]], width: float, height: float
) -> None:
    frame = (-50.0, -50.0, 650.0, 450.0)
    boxes = place_labels(points, [(width, height)] * len(points), frame)
    placed = [box for box in boxes if box is not None]
    assert not any(overlap(one, other) for one, other in combinations(placed, 2))
    assert not any(box[0] < x < box[2] and box[1] < y < box[3] for box in placed for x, y in points)
    assert all(
        frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3] for box in placed
    )


def test_lonely_point_has_its_label_to_the_right() -> None:
    (box,) = place_labels([(100, 100)], [(40, 10)], (0, 0, 300, 300))
    assert box is not None
    assert 100 < box[0] < 110
    assert box[1] < 100 < box[3]


def test_label_without_room_is_left_out() -> None:
    assert place_labels([(5, 5)], [(40, 10)], (0, 0, 10, 10)) == [None]
