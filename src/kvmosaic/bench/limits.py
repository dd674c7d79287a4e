"""Measured limits of this machine: memory bandwidth and multiplication speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from kvmosaic.bench.models import TokenCost


@dataclass(frozen=True, slots=True)
class Limits:
    """The best of several tries: other work on the machine only makes them slower."""

    read_bytes_per_second: dict[int, float]
    """By number of threads."""
    flops_per_second: dict[str, float]
    """By dtype, with the threads of the run."""
    threads: int

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the threads of the run read."""
        return self.read_bytes_per_second[self.threads]

    def first_token_seconds(self, weight: TokenCost, dtype: str, num_computed: int, num_prompt: int) -> float:
        """Returns the minimum time of a prompt: multiplications, or the bytes that must be read; without attention."""
        flops = 2.0 * (weight.linear_parameters * num_computed + weight.output_parameters)
        read = weight.step_bytes + weight.kv_bytes_per_token * num_prompt
        return max(flops / self.flops_per_second.get(dtype, float("inf")), read / self.bandwidth)

    def token_seconds(self, weight: TokenCost, num_context: int) -> float:
        """Returns the minimum time of one decode step: weights and KV cache are read once."""
        return (weight.step_bytes + weight.kv_bytes_per_token * num_context) / self.bandwidth

    def best_of(self, other: Limits) -> Limits:
        """Returns the faster of both in every limit: the same machine at another, perhaps less busy moment."""
        reads, flops = self.read_bytes_per_second, self.flops_per_second
        return Limits(
            {count: max(rate, other.read_bytes_per_second[count]) for count, rate in reads.items()},
            {dtype: max(rate, other.flops_per_second[dtype]) for dtype, rate in flops.items()},
            self.threads,
        )

    def to_dict(self) -> dict[str, object]:
        """Names and values, for JSON."""
        return asdict(self)


def measure_limits(threads: int, dtypes: list[str], *, num_bytes: int = 2**28, tries: int = 15) -> Limits:
    """Reads a large buffer and multiplies square matrices.

    Args:
        threads: threads of the run; one thread is measured as well.
        dtypes: formats whose multiplications are measured.
        num_bytes: size of the buffer; much more than the caches of the processor.
        tries: how often each is measured.
    """
    before = torch.get_num_threads()
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    reads = {}
    try:
        for count in sorted({1, threads}):
            torch.set_num_threads(count)
            reads[count] = num_bytes / _least_seconds(buffer.sum, tries)
        flops = {dtype: _measure_flops(getattr(torch, dtype), tries) for dtype in dtypes}
    finally:
        torch.set_num_threads(before)
    return Limits(reads, flops, threads)


def _measure_flops(dtype: torch.dtype, tries: int) -> float:
    """Floating point operations per second of a square product."""
    size = 1_024
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    return 2.0 * size**3 / _least_seconds(lambda: left @ right, tries)


def _least_seconds(run: Callable[[], object], tries: int) -> float:
    """The shortest of several runs, after one that does not count."""
    run()
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
