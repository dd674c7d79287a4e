"""Plot of an evaluation: divergence over work, and accuracy over TTFT, with their Pareto fronts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import dist
from pathlib import Path
from typing import TYPE_CHECKING

from kvmosaic.eval.report import EvalReport
from kvmosaic.eval.rows import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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


_WIDTH, _HEIGHT = 8.0, 5.0
_FONT_SIZE = 8
_FAR = 18.0
"""Pixels between a point and its label from which on a line joins them."""
_ROOM = 0.12
"""Empty space around the points, as a share of what they span, for labels."""


def save_plot(report: EvalReport, path: Path) -> Path:
    """Writes the plot as a PNG. Needs matplotlib."""
    figure = draw_plot(report)
    figure.savefig(path, dpi=130)
    return path


def draw_plot(report: EvalReport) -> Figure:
    """Draws one point for each variant, over all tasks. Needs matplotlib.

    On the left divergence over work; on the right accuracy over time, if answers were scored.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summaries = [summary for summary in report.summaries if not summary.way.is_turned]
    panels = [_nearness(summaries)]
    if any(summary.accuracy is not None for summary in summaries):
        panels.append(_accuracy(summaries, len(dict.fromkeys(row.task for row in report.rows))))
    size = (_WIDTH * len(panels), _HEIGHT)
    figure = FigureCanvasAgg(Figure(figsize=size, layout="constrained")).figure
    figure.suptitle(
        f"{report.model}: what is repaired, and how near that is to full attention\n{report.about}", size=10
    )
    drawn = [(figure.add_subplot(1, len(panels), number), panel) for number, panel in enumerate(panels, start=1)]
    for axes, panel in drawn:
        _draw(axes, panel)
    figure.draw_without_rendering()  # from here on positions are known in pixels
    figure.set_layout_engine("none")
    for axes, panel in drawn:
        _add_labels(axes, panel.points, panel.summaries, panel.front)
    return figure


@dataclass(frozen=True, slots=True)
class _Panel:
    """Points of one plot, and the Pareto-optimal ones."""

    summaries: Sequence[Summary]
    points: Sequence[tuple[float, float]]
    front: Sequence[int]
    horizontal: str
    vertical: str
    front_text: str


def _accuracy(summaries: Sequence[Summary], num_tasks: int) -> _Panel:
    points = [(1e3 * summary.first_median, 100 * (summary.accuracy or 0.0)) for summary in summaries]
    return _Panel(
        summaries,
        points,
        pareto_front(points),
        "time to the first token, ms (median, documents known before)",
        f"accuracy, % (mean of {num_tasks} task{'s' if num_tasks > 1 else ''})",
        "Pareto front: nothing is faster and as accurate",
    )


def _nearness(summaries: Sequence[Summary]) -> _Panel:
    """Returns the points without full attention, which has no divergence and all of the work."""
    composed = [summary for summary in summaries if not summary.way.is_full] or list(summaries)
    points = [(100 * summary.work, summary.divergence) for summary in composed]
    return _Panel(
        composed,
        points,
        pareto_front([(work, -divergence) for work, divergence in points]),
        "work for choosing and repairing, % of computing all documents once",
        "divergence from full attention, nats per token",
        "Pareto front: nothing is nearer with less work",
    )


def _draw(axes: Axes, panel: _Panel) -> None:
    for place in dict.fromkeys(_place(summary) for summary in panel.summaries):
        own = [point for point, summary in zip(panel.points, panel.summaries, strict=True) if _place(summary) == place]
        is_full = place == _FULL
        x, y = zip(*own, strict=True)
        axes.scatter(x, y, s=60 if is_full else 28, marker="*" if is_full else "o", label=place, zorder=3)
    x, y = zip(*(panel.points[number] for number in panel.front), strict=True)
    axes.step(x, y, where="post", color="black", linewidth=0.8, zorder=1, label=panel.front_text)
    axes.scatter(x, y, s=110, facecolors="none", edgecolors="black", zorder=2)
    axes.set(xlabel=panel.horizontal, ylabel=panel.vertical)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(_ROOM)
    axes.legend(fontsize=_FONT_SIZE, loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=3, frameon=False)


_FULL = "full attention"


def _place(summary: Summary) -> str:
    return _FULL if summary.way.is_full else f"{summary.way.strategy}, context {summary.way.context}"


def _add_labels(
    axes: Axes, points: Sequence[tuple[float, float]], summaries: Sequence[Summary], front: Sequence[int]
) -> None:
    """Adds policy names, off the line of the front; labels of the front are placed first."""
    order = [*front, *(number for number in range(len(points)) if number not in front)]
    texts = [axes.text(*points[number], summaries[number].way.label, fontsize=_FONT_SIZE) for number in order]
    extents = [text.get_window_extent() for text in texts]
    pixels = [tuple(axes.transData.transform(points[number])) for number in order]
    left, bottom, right, top = axes.get_window_extent().extents
    steps = [
        box
        for (x, y), (next_x, next_y) in pairwise(pixels[: len(front)])
        for box in ((x, y - 1, next_x, y + 1), (next_x - 1, y, next_x + 1, next_y))
    ]
    sizes = [(box.width, box.height) for box in extents]
    boxes = place_labels(pixels, sizes, (left, bottom, right, top), radius=7, others=steps)
    back = axes.transData.inverted()
    for text, pixel, box in zip(texts, pixels, boxes, strict=True):
        if box is None:
            text.remove()
            continue
        text.set(position=back.transform(box[:2]), verticalalignment="bottom", horizontalalignment="left")
        nearest = (min(max(pixel[0], box[0]), box[2]), min(max(pixel[1], box[1]), box[3]))
        if dist(pixel, nearest) > _FAR:
            ends = back.transform([pixel, nearest])
            axes.plot(ends[:, 0], ends[:, 1], color="grey", linewidth=0.5, zorder=0)
