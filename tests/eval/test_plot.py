"""The Pareto front beside its obvious twin."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.lab.eval.report import pareto_front

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
