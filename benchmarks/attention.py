"""Attention of one layer over cached runs: the C extension against torch, and against reading the bytes once.

    python benchmarks/attention.py [--keys 4096] [--threads 1 2] [--rounds 6]
    python benchmarks/attention.py --backend triton      the GPU kernels instead, on a machine with one

16 query heads, 8 key heads of 64 numbers, as in a model of about 0.3 B parameters. One row (a decode) or 32 rows (a
question) read 4096 cached keys in 1 or in 10 pieces, the pieces moved by different distances. Everything that a layer
does in a step is timed: turning the queries, attending, merging. 8 layers take turns, so that no processor cache holds
their keys.

    torch     TorchBackend: torch's flash kernel, one call per piece, merge
    native    NativeBackend: one call of the extension
    triton    TritonBackend: two kernel launches
    limit     reading as many bytes once, by torch, with as many threads

Measured interleaved in one process, medians. With one thread the clock is the thread's CPU time, so that other work on
the machine counts less; with more it is wall time. On a GPU it is wall time of seven layers, until the GPU is done, by
seven. Ratios count; absolute times belong to the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from facts import save
from rich.console import Console
from rich.table import Table

from kvmosaic.attention import (
    AttentionBackend,
    ChosenBackend,
    Piece,
    RowGroup,
    StepAttention,
    TorchBackend,
    choose_backend,
)
from kvmosaic.layers import MaskSpec
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 16, 8, 64, 8
ROTATION = Rotation(
    "half", 0, HEAD_DIM, 1, tuple(10_000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)), HEAD_DIM
)


class Case:
    """Some rows over some pieces, in one dtype."""

    def __init__(self, dtype: torch.dtype, num_rows: int, num_pieces: int, num_keys: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.is_on_gpu = device.type == "cuda"
        self.facts = {"dtype": str(dtype).removeprefix("torch."), "rows": num_rows, "pieces": num_pieces}
        self.layers = [
            SimpleNamespace(
                num_kv_heads=NUM_KV_HEADS,
                key_dim=HEAD_DIM,
                value_dim=HEAD_DIM,
                source_layer=index,
                value_in_key=False,
                rotation=ROTATION,
                mask=MaskSpec("full"),
                bias=None,
                bytes_per_token=lambda dtype: 2 * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize,
            )
            for index in range(NUM_LAYERS)
        ]
        storage = BlockStorage(self.layers, num_keys // 16 + 16, 16, dtype, device)
        for index in range(NUM_LAYERS):
            size = (storage.num_blocks * 16, NUM_KV_HEADS, HEAD_DIM)
            storage.write(index, slice(None), torch.randn(size).to(device, dtype), torch.randn(size).to(device, dtype))
        self.storages: Any = {"chunk_cache": storage}
        length = num_keys // num_pieces
        stride = -(-length // 16) * 16
        reads = tuple(
            Piece("chunk_cache", number * stride, length, number * length, (num_pieces - 1 - number) * length)
            for number in range(num_pieces)
        )
        self.groups = [RowGroup(0, num_rows, num_keys, reads)]
        self.calls: list[Any] = [
            SimpleNamespace(
                layer_index=index,
                query=torch.randn(num_rows, NUM_HEADS, HEAD_DIM).to(device, dtype),
                key=torch.randn(num_rows, NUM_KV_HEADS, HEAD_DIM).to(device, dtype),
                value=torch.randn(num_rows, NUM_KV_HEADS, HEAD_DIM).to(device, dtype),
                scaling=HEAD_DIM**-0.5,
                softcap=None,
                sinks=None,
            )
            for index in range(NUM_LAYERS)
        ]
        num_words = 2 * num_keys * NUM_KV_HEADS * HEAD_DIM * dtype.itemsize // 8
        self.bytes = torch.randint(0, 100, (num_words,), device=device)
        self.flood = torch.empty(1 << 23, dtype=torch.int64, device=device)

    def times(self, backend: AttentionBackend, clock: Callable[[], float]) -> list[float]:
        """Seconds of every layer but the first of a step, which also makes the plan and the tables."""
        step = StepAttention(self.layers, self.storages, self.groups, (), backend)
        step(self.calls[0])
        if self.is_on_gpu:
            begin = clock()
            for call in self.calls[1:]:
                step(call)
            return [(clock() - begin) / (NUM_LAYERS - 1)]
        times = []
        for call in self.calls[1:]:
            begin = clock()
            step(call)
            times.append(clock() - begin)
        return times

    def limit(self, clock: Callable[[], float]) -> list[float]:
        """Seconds to read the bytes of one layer, after the caches were filled with others."""
        self.flood.fill_(1)
        begin = clock()
        self.bytes.sum()
        return [clock() - begin]


def measure(case: Case, chosen: ChosenBackend, num_threads: int, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds and their ratios; the same of the best times, which other work disturbs less."""
    torch.set_num_threads(num_threads)
    clock = finished_clock if case.is_on_gpu else time.thread_time if num_threads == 1 else time.perf_counter
    name = chosen.name
    backends = {"torch": TorchBackend(), name: chosen.backend}
    times: dict[str, list[float]] = {"torch": [], name: [], "limit": []}
    for _ in range(rounds):
        for each, backend in backends.items():
            times[each] += case.times(backend, clock)
        times["limit"] += case.limit(clock)
    medians = {f"{each}_ms": round(1e3 * statistics.median(found), 3) for each, found in times.items()}
    best = {each: min(found) for each, found in times.items()}
    ratios = {
        f"torch_over_{name}": round(medians["torch_ms"] / medians[f"{name}_ms"], 2),
        f"{name}_over_limit": round(medians[f"{name}_ms"] / medians["limit_ms"], 2),
        f"best_torch_over_{name}": round(best["torch"] / best[name], 2),
        f"best_{name}_ms": round(1e3 * best[name], 3),
    }
    return {**case.facts, "threads": num_threads, **medians, **ratios}


def finished_clock() -> float:
    """Wall time, until the GPU has finished."""
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measures all cases, prints a table and saves the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["native", "triton"], default="native")
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    is_on_gpu = arguments.backend == "triton"
    if is_on_gpu and not torch.cuda.is_available():
        parser.error("--backend triton measures a GPU, and torch sees none here")
    device = torch.device("cuda" if is_on_gpu else "cpu")
    results = []
    with torch.inference_mode(), Console(stderr=True).status("measuring"):
        for dtype in (torch.float32, torch.bfloat16):
            chosen = choose_backend(arguments.backend, dtype, device)
            for num_rows in (1, 32):
                for num_pieces in (1, 10):
                    case = Case(dtype, num_rows, num_pieces, arguments.keys, device)
                    threads = [1] if is_on_gpu else arguments.threads
                    results += [measure(case, chosen, count, arguments.rounds) for count in threads]
    table = Table(*(name.replace("_", "\n") for name in results[0]), padding=(0, 1, 0, 0), box=None)
    for result in results:
        table.add_row(*(str(value) for value in result.values()))
    Console().print(table)
    report = {
        "torch": torch.__version__,
        "backend": str(chosen),
        **({"gpu": torch.cuda.get_device_name(device)} if is_on_gpu else {}),
        "keys": arguments.keys,
        "load_average": [round(load, 1) for load in os.getloadavg()],
        "waiting_threads": os.environ.get("OMP_WAIT_POLICY", "default"),
        "results": results,
    }
    Console().print(f"saved {save('attention-triton' if is_on_gpu else 'attention', report)}")


if __name__ == "__main__":
    main()
