"""Plot of a plan: hit rate over device memory."""

from __future__ import annotations

from pathlib import Path

from kvmosaic.capacity.demand import drawn_together, hit_rate, zipf_ranks
from kvmosaic.capacity.plan import CapacityPlan
from kvmosaic.errors import InvalidConfig

_POINTS = 60
_SIZE = (7.0, 4.2)


def by_memory(plan: CapacityPlan, points: int = _POINTS) -> list[tuple[int, float]]:
    """Bytes of a device, and documents found on it, without tiers.

    From a device that holds one document to one that holds all of them (or four times the planned one).
    """
    demand, room = plan.demand, plan.room
    fixed = room.weight_bytes + room.headroom_bytes + room.request_bytes
    most = min(fixed + demand.documents * room.document_bytes, 4 * room.device_bytes)
    ranks = drawn_together(zipf_ranks(demand.documents, demand.zipf), demand.documents_per_prompt)
    largest = max((most - fixed) // room.document_bytes, 2)
    found = []
    for number in range(points):
        kept = round(largest ** (number / (points - 1)))
        found.append((fixed + kept * room.document_bytes, hit_rate(ranks, min(demand.documents, kept))))
    return found


def save_plot(plan: CapacityPlan, path: Path) -> None:
    """Writes a PNG, SVG or PDF, by the ending of the name. Needs matplotlib.

    Raises:
        InvalidConfig: matplotlib is missing, or it draws no such files.
    """
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidConfig(f"a plot is a .png, .svg or .pdf file, got {path.name[:80]!r}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidConfig("plots need matplotlib; pip install 'kvmosaic[bench]', or leave out the plot") from error
    figure = FigureCanvasAgg(Figure(figsize=_SIZE, layout="constrained")).figure
    axes = figure.add_subplot()
    sizes, rates = zip(*by_memory(plan), strict=True)
    axes.plot([size / 2**30 for size in sizes], [100 * rate for rate in rates])
    axes.axvline(plan.room.device_bytes / 2**30, color="black", linestyle=":", linewidth=1)
    axes.set_xlabel("memory of the device, GiB (dotted: planned)")
    axes.set_ylabel("documents found, %")
    axes.set_ylim(0, 100)
    demand = plan.demand
    axes.set_title(
        f"{plan.model.name}: {demand.documents:,} documents of {demand.tokens_per_document:,} tokens, "
        f"zipf {demand.zipf:g}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
