"""Plot of a training: held-out divergence and agreement by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvmosaic.adapt.trainer import Evaluated


def save_plot(history: Sequence[Evaluated], path: Path) -> Path:
    """Writes a PNG."""
    figure = FigureCanvasAgg(Figure(figsize=(6.4, 3.6), layout="constrained")).figure
    axes = figure.add_subplot()
    tokens = [each.num_tokens / 1e3 for each in history]
    axes.plot(tokens, [each.divergence for each in history], "o-", ms=3, label="held-out divergence")
    trained = [(each.num_tokens / 1e3, each.train_divergence) for each in history if each.train_divergence is not None]
    axes.plot(
        [at for at, _ in trained], [found for _, found in trained], "--", lw=1, label="of the lessons (moving mean)"
    )
    axes.set(xlabel="thousand tokens trained on", ylabel="nats per token", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    other = axes.twinx()
    other.plot(tokens, [100 * each.agreement for each in history], "s-", ms=3, color="tab:green")
    other.set_ylabel("equal greedy tokens, %", color="tab:green")
    axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    figure.savefig(path, dpi=130)
    return path
