"""What a step of a rolling cache costs: bytes moved and time, against the usual ways of rolling a window.

    python benchmarks/rolling.py [--rounds 7]

One layer, full cache, bfloat16; a step takes in one chunk of keys and values and shows the window. Attention is not
part of it.

    clone      the window is cloned, its tokens are copied back further left
    roll       torch.roll into a new tensor, which is copied back; then the chunk over its end
    cat        sinks, window and chunk are joined into a new tensor
    sliding    the window slides through a buffer of twice its length and is brought back at its end: views in order,
               but at other addresses in every step, so no CUDA graph can be captured
    ordered    BlockKVCache
    ring       BlockKVCache(ordered=False)

The first three need half as much memory again in each step.

Bytes are counted from the operations: whatever a copy writes, the new chunk included. Times are CPU time of one thread,
as many steps as the sliding window takes for a whole round (so that it pays for its one big move), interleaved, medians
of rounds. All of them are first compared with each other. Ratios count; absolute times belong to the machine.

Writes results/rolling.json, rolling.md and, with matplotlib, rolling.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from facts import RESULTS, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvmosaic import BlockKVCache

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """Sizes of one stream; `heads_first` puts the heads before the tokens."""

    name: str
    heads: int
    head_dim: int
    sink: int
    window: int
    chunk: int
    heads_first: bool = False

    @property
    def dim(self) -> int:
        """Dimension of the tokens."""
        return 2 if self.heads_first else 1

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of keys or values of so many tokens."""
        return (1, self.heads, tokens, self.head_dim) if self.heads_first else (1, tokens, self.heads, self.head_dim)

    def zeros(self, tokens: int) -> Tensor:
        """Keys or values of so many tokens."""
        return torch.zeros(self.shape(tokens), dtype=torch.bfloat16)

    @property
    def steps(self) -> int:
        """Steps of one round."""
        return -(-self.window // self.chunk)


CASES = [
    Case("video", 24, 128, 1536, 16384, 1536),
    Case("video, heads first", 24, 128, 1536, 16384, 1536, heads_first=True),
    Case("speech, chunks of 50", 8, 64, 4, 3000, 50, heads_first=True),
    Case("speech, chunks of 25", 8, 64, 4, 1500, 25, heads_first=True),
    Case("speech, chunks of 8", 8, 64, 4, 1024, 8, heads_first=True),
    Case("speech, token by token", 8, 64, 4, 3000, 1, heads_first=True),
]
Step = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def clone(case: Case) -> Step:
    """Clones what stays."""
    stores = case.zeros(case.sink + case.window), case.zeros(case.sink + case.window)
    kept = case.window - case.chunk

    def step(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for store, chunk in zip(stores, (k, v), strict=True):
            staying = store.narrow(case.dim, case.sink + case.chunk, kept).clone()
            store.narrow(case.dim, case.sink, kept).copy_(staying)
            store.narrow(case.dim, case.sink + kept, case.chunk).copy_(chunk)
        return stores

    return step


def roll(case: Case) -> Step:
    """Rolls the window into a new tensor."""
    stores = case.zeros(case.sink + case.window), case.zeros(case.sink + case.window)

    def step(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for store, chunk in zip(stores, (k, v), strict=True):
            window = store.narrow(case.dim, case.sink, case.window)
            window.copy_(window.roll(-case.chunk, case.dim))
            window.narrow(case.dim, case.window - case.chunk, case.chunk).copy_(chunk)
        return stores

    return step


def cat(case: Case) -> Step:
    """Joins everything into a new tensor."""
    stores = [case.zeros(case.sink + case.window), case.zeros(case.sink + case.window)]

    def step(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        for number, chunk in enumerate((k, v)):
            sinks, _gone, kept = stores[number].split([case.sink, case.chunk, case.window - case.chunk], case.dim)
            stores[number] = torch.cat([sinks, kept, chunk], case.dim)
        return stores[0], stores[1]

    return step


def sliding(case: Case) -> Step:
    """Slides through twice the memory; the sinks go along, right before the window."""
    stores = case.zeros(case.sink + 2 * case.window), case.zeros(case.sink + 2 * case.window)
    sinks = case.zeros(case.sink), case.zeros(case.sink)
    edge = case.sink + case.window
    room = case.sink + 2 * case.window

    def step(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal edge
        kept = case.window - case.chunk
        if edge + case.chunk > room:
            for store in stores:
                staying = store.narrow(case.dim, edge - kept, kept)
                store.narrow(case.dim, case.sink, kept).copy_(staying)
            edge = case.sink + kept
        for store, sink, chunk in zip(stores, sinks, (k, v), strict=True):
            store.narrow(case.dim, edge, case.chunk).copy_(chunk)
            if case.sink:
                store.narrow(case.dim, edge + case.chunk - case.window - case.sink, case.sink).copy_(sink)
        edge += case.chunk
        first = edge - case.window - case.sink
        return tuple(store.narrow(case.dim, first, case.sink + case.window) for store in stores)  # type: ignore[return-value]

    return step


def ours(case: Case, *, ordered: bool) -> Step:
    """A BlockKVCache that is full."""
    shape = case.shape(case.sink + case.window)
    cache = BlockKVCache(
        k_shape=shape,
        v_shape=shape,
        seq_dim=case.dim,
        chunk_size=case.chunk,
        window_size=case.window,
        sink_size=case.sink,
        device="cpu",
        dtype=torch.bfloat16,
        ordered=ordered,
    )
    index, chunk = 0, case.zeros(case.chunk)

    def step(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal index
        cache.before_update(index)
        cache.update(k, v)
        seen = cache.cached_k(), cache.cached_v()
        cache.after_update(index)
        index += 1
        return seen

    while not cache.is_steady_state():
        step(index, chunk, chunk)
    return step


WAYS: dict[str, Callable[[Case], Step]] = {
    "clone": clone,
    "roll": roll,
    "cat": cat,
    "sliding": sliding,
    "ordered": lambda case: ours(case, ordered=True),
    "ring": lambda case: ours(case, ordered=False),
}
MEMORY = {"clone": "1.5x", "roll": "1.5x", "cat": "1.5x", "sliding": "2x"}


class Moved(TorchDispatchMode):
    """Counts the bytes that copies write."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::copy_", "aten::clone", "aten::roll", "aten::cat"):
            self.bytes += result.nbytes
        elif name == "aten::index_copy_":
            self.bytes += args[3].nbytes
        elif name == "kvmosaic::shift_left":
            storage, dim, start, stop, by = args
            self.bytes += storage.nbytes // storage.shape[dim] * (stop - start - by)
        elif func._schema.is_mutable and name not in ("aten::add_", "aten::remainder_"):
            raise RuntimeError(f"what does {name} move?")
        return result


def compare(case: Case) -> None:
    """Raises unless all ways show the same after some steps, the ring in its own order."""
    small = Case(case.name, 2, 4, 6, 4 * 7, 7, case.heads_first)
    steps = {name: way(small) for name, way in WAYS.items()}
    for number in range(9):
        k, v = (torch.randn(small.shape(small.chunk)).bfloat16() for _ in range(2))
        seen = {name: step(number, k, v) for name, step in steps.items()}
    for name, tensors in seen.items():
        for tensor, expected in zip(tensors, seen["cat"], strict=True):
            tokens, others = (x.movedim(small.dim, 0).flatten(1).float() for x in (tensor, expected))
            if name == "ring":
                tokens, others = tokens.sort(0).values, others.sort(0).values
            assert torch.equal(tokens, others), name


def measure(case: Case, rounds: int) -> list[dict[str, Any]]:
    """Bytes and seconds per step of every way."""
    k, v = case.zeros(case.chunk), case.zeros(case.chunk)
    steps = {name: way(case) for name, way in WAYS.items()}
    moved: dict[str, int] = {}
    for name, step in steps.items():
        with Moved() as counter:
            for number in range(case.steps):
                step(number, k, v)
        moved[name] = counter.bytes // case.steps
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.thread_time()
            for number in range(case.steps):
                step(number, k, v)
            seconds[name].append((time.thread_time() - begin) / case.steps)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "case": case.name,
            "shape": list(case.shape(case.sink + case.window)),
            "sink": case.sink,
            "window": case.window,
            "chunk": case.chunk,
            "cache": name,
            "moved_bytes_per_step": moved[name],
            "ms_per_step": round(1e3 * medians[name], 4),
            "clone_over_this": round(medians["clone"] / medians[name], 2),
        }
        for name in steps
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| stream | sinks + window, chunk | cache | MiB moved per step | ms per step | faster than clone | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["case"] if row["cache"] == "clone" else "",
            f"{row['sink']} + {row['window']}, {row['chunk']}" if row["cache"] == "clone" else "",
            row["cache"],
            f"{row['moved_bytes_per_step'] / MIB:.3g}",
            f"{row['ms_per_step']:.3g}",
            f"{row['clone_over_this']:.1f}x",
            MEMORY.get(row["cache"], "1x"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]]) -> None:
    """Milliseconds per step, one group of bars for every stream."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    names = list(dict.fromkeys(row["case"] for row in rows))
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for number, way in enumerate(WAYS):
        times = [row["ms_per_step"] for row in rows if row["cache"] == way]
        places = [place + 0.13 * (number - 2.5) for place in range(len(names))]
        axes.bar(places, times, 0.13, label=way)
    axes.set_yscale("log")
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axes.set_ylabel("ms per step, one layer")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=6, fontsize=8, loc="upper right")
    figure.savefig(RESULTS / "rolling.png", dpi=150)


def main() -> None:
    """Measures all streams, prints a table and saves the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        compare(case)
        rows += measure(case, arguments.rounds)
    save("rolling", {"torch": torch.__version__, "rounds": arguments.rounds, "results": rows})
    (RESULTS / "rolling.md").write_text(table(rows))
    plot(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
