"""Measurement loop: every engine answers every batch, in turn, with one row of times and memory per engine."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvmosaic.lab.bench.peers import BatchTimes, Peer
from kvmosaic.lab.bench.workloads import Workload

Progress = Callable[[str], None]
"""Called after every batch with its name."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of several times, in seconds."""

    median: float
    low: float
    high: float
    """First and third quartile."""
    mean: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        if not values:
            return None
        several = values if len(values) > 1 else [*values, *values]
        low, median, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(median, low, high, statistics.fmean(values), len(values))


@dataclass(slots=True)
class BenchRow:
    """One workload on one engine."""

    workload: str
    about: str
    peer: str
    dtype: str
    is_ours: bool
    figure: str = ""
    x: float = 0.0
    width: int = 1
    """Prompts at once."""
    first_seconds: list[float] = field(default_factory=list)
    """Per request."""
    token_seconds: list[float] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """CPU time of its process per batch."""
    num_answered: int = 0
    """Tokens of all answers."""
    num_prompt: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    kv_bytes: int | None = None
    """Maximum KV cache bytes held after a batch."""
    peak_bytes: int | None = None
    """Maximum resident memory added by a batch."""
    first_share: float | None = None
    """Minimum possible TTFT / measured TTFT; see `Limits`."""
    token_share: float | None = None

    @property
    def first(self) -> Spread | None:
        """Time to the first token."""
        return Spread.of(self.first_seconds)

    @property
    def token(self) -> Spread | None:
        """Time per token after the first one."""
        return Spread.of(self.token_seconds)

    @property
    def cpu(self) -> Spread | None:
        """CPU time per batch."""
        return Spread.of(self.cpu_seconds)

    @property
    def tokens_per_second(self) -> float:
        """Answered tokens / time, prompts included in the time."""
        return self.num_answered / sum(self.batch_seconds) if self.batch_seconds else 0.0

    def add(self, batch: BatchTimes) -> None:
        """Counts one batch."""
        self.batch_seconds.append(batch.seconds)
        for reading in batch.readings:
            self.first_seconds.append(reading.first_seconds)
            self.num_prompt.append(reading.num_prompt)
            self.num_answered += reading.num_answer
            if reading.token_seconds is not None:
                self.token_seconds.append(reading.token_seconds)
            if reading.num_computed is not None:
                self.num_computed.append(reading.num_computed)
        if batch.kv_bytes is not None:
            self.kv_bytes = max(self.kv_bytes or 0, batch.kv_bytes)


def measure(workload: Workload, peers: Sequence[Peer], progress: Progress) -> list[BenchRow]:
    """Measures one workload on several engines.

    They alternate batch by batch in rotating order, so that a busy moment of the machine affects all of them alike.
    """
    chosen = [peer for peer in peers if peer.is_ours or not workload.is_ours_only]
    rows = []
    for peer in chosen:
        width = len(workload.batches[0])
        rows.append(
            BenchRow(
                workload.name, workload.about, peer.name, peer.dtype, peer.is_ours, workload.figure, workload.x, width
            )
        )
        peer.reset()
        for prompt in workload.warm:
            peer.answer([prompt], 1)
            progress(f"{workload.name}: getting to know the documents")
    pairs = list(zip(chosen, rows, strict=True))
    for number, prompts in enumerate(workload.batches):
        turn = number % max(len(pairs), 1)
        for peer, row in pairs[turn:] + pairs[:turn]:
            forget_peak(peer.process_id)
            before, cpu_before = resident_bytes(peer.process_id), cpu_seconds(peer.process_id)
            row.add(peer.answer(prompts, workload.num_answer))
            cpu_after = cpu_seconds(peer.process_id)
            if cpu_before is not None and cpu_after is not None:
                row.cpu_seconds.append(cpu_after - cpu_before)
            after = resident_bytes(peer.process_id, peak=True)
            if before is not None and after is not None:
                row.peak_bytes = max(row.peak_bytes or 0, after - before)
            progress(f"{workload.name}: {peer.name}")
    return rows


def num_answers(workload: Workload, peers: Sequence[Peer]) -> int:
    """How often `measure` reports progress."""
    chosen = sum(peer.is_ours or not workload.is_ours_only for peer in peers)
    return chosen * (len(workload.warm) + len(workload.batches))


def resident_bytes(process_id: int, *, peak: bool = False) -> int | None:
    """Memory that a process holds now, or held at most since `forget_peak`; None where the system does not tell."""
    try:
        text = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def forget_peak(process_id: int) -> None:
    """Resets the peak to the current value; does nothing where the system does not support it."""
    try:
        Path(f"/proc/{process_id}/clear_refs").write_text("5")
    except OSError:
        return


def cpu_seconds(process_id: int) -> float | None:
    """CPU time of all threads of a process so far; None where the system does not tell."""
    if process_id == os.getpid():
        return sum(os.times()[:2])
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
