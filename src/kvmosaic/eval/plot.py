"""The plot of an evaluation: accuracy by time to the first token, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import dist
from pathlib import Path
from typing import TYPE_CHECKING

from kvmosaic.eval.labels import place_labels
from kvmosaic.eval.pareto import pareto_front
from kvmosaic.eval.report import EvalReport
from kvmosaic.eval.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """The plot: one point for each way of answering, over all tasks. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summaries = report.summaries
    figure = FigureCanvasAgg(Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")).figure
    axes = figure.add_subplot()
    points = [(1e3 * summary.first_median, 100 * summary.accuracy) for summary in summaries]
    for place in dict.fromkeys(_place(summary) for summary in summaries):
        own = [point for point, summary in zip(points, summaries, strict=True) if _place(summary) == place]
        is_full = place == _FULL
        x, y = zip(*own, strict=True)
        axes.scatter(x, y, s=60 if is_full else 28, marker="*" if is_full else "o", label=place, zorder=3)
    front = pareto_front(points)
    x, y = zip(*(points[number] for number in front), strict=True)
    label = "Pareto front: nothing is faster and as accurate"
    axes.step(x, y, where="post", color="black", linewidth=0.8, zorder=1, label=label)
    axes.scatter(x, y, s=110, facecolors="none", edgecolors="black", zorder=2)
    tasks = len(dict.fromkeys(row.task for row in report.rows))
    axes.set(
        xlabel="time to the first token, ms (median, documents known before)",
        ylabel=f"accuracy, % (mean of {tasks} task{'s' if tasks > 1 else ''})",
    )
    axes.set_title(f"{report.model}: accuracy and time of what is repaired\n{report.about}", fontsize=10)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.margins(_ROOM)
    axes.legend(fontsize=_FONT_SIZE, loc="lower center", bbox_to_anchor=(0.5, -0.3), ncols=3, frameon=False)
    figure.draw_without_rendering()  # from here on places are known in pixels
    figure.set_layout_engine("none")
    _add_labels(axes, points, summaries, front)
    return figure


_FULL = "full attention"


def _place(summary: Summary) -> str:
    return _FULL if summary.way.is_full else f"{summary.way.strategy}, context {summary.way.context}"


def _add_labels(
    axes: Axes, points: Sequence[tuple[float, float]], summaries: Sequence[Summary], front: Sequence[int]
) -> None:
    """Names of the policies, off the line of the front; those of the front choose their places first."""
    order = [*front, *(number for number in range(len(points)) if number not in front)]
    texts = [axes.text(*points[number], summaries[number].way.repair, fontsize=_FONT_SIZE) for number in order]
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
