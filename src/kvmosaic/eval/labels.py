"""Label placement in plots: no label covers another or a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

_RINGS = 9
_SIDES = ((1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 0), (-1, 1), (-1, -1))
_GAP = 2.0


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    frame: Box,
    radius: float = 5.0,
    others: Sequence[Box] = (),
) -> list[Box | None]:
    """Returns a box for each label: near its point, inside the frame, off all points and all boxes placed before it.

    Args:
        points: positions, in the order in which their labels are placed.
        sizes: width and height of each label.
        frame: bounds of the labels.
        radius: of a point.
        others: further boxes to avoid.

    Returns:
        The boxes; None where there is no room.
    """
    taken: list[Box] = [(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    taken += others
    boxes: list[Box | None] = []
    for point, size in zip(points, sizes, strict=True):
        box = next(
            (
                place
                for place in _places(point, size, radius)
                if _is_inside(place, frame) and not any(overlap(place, other) for other in taken)
            ),
            None,
        )
        boxes.append(box)
        if box is not None:
            taken.append(box)
    return boxes


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes have more than a border in common."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _places(point: tuple[float, float], size: tuple[float, float], radius: float) -> Iterator[Box]:
    """Places around a point, the nearest first."""
    (x, y), (width, height) = point, size
    for ring in range(_RINGS):
        far = radius + _GAP + ring * height * 0.7
        for right, up in _SIDES:
            left = x + right * far + (right - 1) * width / 2
            bottom = y + up * far + (up - 1) * height / 2
            yield left, bottom, left + width, bottom + height


def _is_inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]
