"""The Pareto front: choices that no other beats in both cost and gain."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the points that no other point beats, by rising cost.

    gain
      |        o     x is on the front, o is beaten by a point that costs no more and gains no less
      |      x   o
      |  x
      |x    o
      +----------- cost

    Args:
        points: (cost, gain) of each.
    """
    order = sorted(range(len(points)), key=lambda number: (points[number][0], -points[number][1], number))
    front: list[int] = []
    for number in order:
        cost, gain = points[number]
        if not front or gain > points[front[-1]][1] or (cost, gain) == points[front[-1]]:
            front.append(number)
    return front
