"""Performance targets of the project, computed from the measured rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmosaic.bench.limits import Limits
from kvmosaic.bench.measurement import BenchRow
from kvmosaic.bench.models import TokenCost
from kvmosaic.bench.profile import StepParts

OWN, OFF = "kvmosaic", "kvmosaic, chunk cache off"
GENERATE, VLLM, LLAMA_CPP = "transformers generate", "vLLM", "llama.cpp"
LLAMA_SERVER = "llama.cpp server"


@dataclass(frozen=True, slots=True)
class Target:
    """One wanted ratio and the measured one."""

    what: str
    wanted: float
    measured: float
    is_most: bool = False
    """Whether `wanted` is a maximum, not a minimum."""
    unit: str = "x"
    """x for ratios, s for seconds."""

    @property
    def is_reached(self) -> bool:
        """Whether the measured ratio is good enough."""
        return self.measured <= self.wanted if self.is_most else self.measured >= self.wanted


class Rows:
    """Rows by workload and engine; of several dtypes, the one that is best for the engine."""

    def __init__(self, rows: Sequence[BenchRow]) -> None:
        self._rows = rows

    def first(self, workload: str, peer: str) -> float | None:
        """Median time to the first token."""
        return min((row.first.median for row in self._of(workload, peer) if row.first), default=None)

    def mean_first(self, workload: str, peer: str) -> float | None:
        """Mean time to the first token: what counts where some documents are known and others not."""
        return min((row.first.mean for row in self._of(workload, peer) if row.first), default=None)

    def token(self, workload: str, peer: str) -> float | None:
        """Median time per token."""
        return min((row.token.median for row in self._of(workload, peer) if row.token), default=None)

    def token_in(self, workload: str, peer: str, *, is_plain: bool) -> float | None:
        """Median time per token in float32, or in the numbers of a GGUF file."""
        rows = [row for row in self._of(workload, peer) if (row.dtype == "float32") == is_plain]
        return min((row.token.median for row in rows if row.token), default=None)

    def best(self, workload: str, peer: str, dtype: str | None = None) -> BenchRow | None:
        """The row with the shortest time to the first token, in any dtype unless one is named."""
        rows = [row for row in self._of(workload, peer) if row.first_seconds and dtype in (None, row.dtype)]
        return min(rows, key=lambda row: row.first.median if row.first else 0.0, default=None)

    def _of(self, workload: str, peer: str) -> list[BenchRow]:
        return [row for row in self._rows if row.workload == workload and row.peer == peer]


def targets(
    rows: Sequence[BenchRow], limits: Limits, weights: dict[str, TokenCost], max_sharers: int, strategy: str = "shared"
) -> list[Target]:
    """Every target that the measured rows can answer; those without their rows are left out."""
    by = Rows(rows)
    found: list[Target] = []

    def add(what: str, wanted: float, above: float | None, below: float | None, *, is_most: bool = False) -> None:
        if above is not None and below:
            found.append(Target(what, wanted, above / below, is_most))

    add(
        "first token, known documents permuted: chunk cache off by on",
        40,
        by.first("permuted", OFF),
        by.first("permuted", OWN),
    )
    add(
        "the same, by the bare question and one read of keys and values",
        1.5,
        by.first("permuted", OWN),
        _question_and_read(by, limits, weights),
        is_most=True,
    )
    for peer in (VLLM, LLAMA_CPP, GENERATE):
        wanted = 20 if peer == VLLM else 1
        add(
            f"first token, permuted documents: {peer} by ours",
            wanted,
            by.first("permuted", peer),
            by.first("permuted", OWN),
        )
    for reuse, wanted in ((0.8, 3), (0.95, 8)):
        name = f"zipf-{reuse:.0%}"
        add(
            f"mean first token at {reuse:.0%} expected reuse: off by on",
            wanted,
            by.mean_first(name, OFF),
            by.mean_first(name, OWN),
        )
    add("first token, new documents: off by on", 1, by.first("fresh", OFF), by.first("fresh", OWN))
    for width in (1, 8):
        name = f"plain-{width}"
        peers = [peer for peer in (GENERATE, VLLM, LLAMA_CPP) if by.first(name, peer)]
        firsts = [by.first(name, peer) or 0.0 for peer in peers]
        tokens = [token for peer in peers if (token := by.token(name, peer))]
        best = f"best of {', '.join(peers)} by ours"
        add(f"plain prompts, {width} at once, first token: {best}", 1, min(firsts, default=None), by.first(name, OWN))
        add(
            f"plain prompts, {width} at once, time per token: {best}", 1, min(tokens, default=None), by.token(name, OWN)
        )
    shared, private = (by.best(f"{kind}-{max_sharers}", OWN) for kind in ("shared", "private"))
    if shared and private and shared.kv_bytes and private.kv_bytes:
        what = f"{max_sharers} prompts that share documents"
        add(f"{what}: memory of private copies by shared", 8, private.kv_bytes, shared.kv_bytes)
        if shared.token and private.token:
            add(f"{what}: time per token, private by shared", 1, private.token.median, shared.token.median)
    found += _server_targets(by, strategy)
    orders = by.best("orders", OWN)
    if orders is not None and len(orders.first_seconds) >= 10:
        first, last = ends_of(orders.first_seconds)
        add("new orders without end: last fifth by first fifth", 1.05, last, first, is_most=True)
    return found


def _server_targets(by: Rows, strategy: str) -> list[Target]:
    """Those against llama.cpp's server, on the same file: wall time and CPU time."""
    found: list[Target] = []

    def add(what: str, wanted: float, workload: str, reading: Callable[[BenchRow], float | None]) -> None:
        server = by.best(workload, LLAMA_SERVER)
        own = by.best(workload, OWN, server.dtype if server else None)
        above, below = (reading(row) if row else None for row in (server, own))
        if above and below:
            found.append(Target(f"{what}: {LLAMA_SERVER} by ours", wanted, above / below))

    def first(row: BenchRow) -> float | None:
        return row.first.median if row.first else None

    def token(row: BenchRow) -> float | None:
        return row.token.median if row.token else None

    def cpu(row: BenchRow) -> float | None:
        return row.cpu.median if row.cpu else None

    add(f"first token, permuted documents, {strategy} positions", 25 if strategy == "shared" else 10, "permuted", first)
    add("plain prompts, 1 at once, first token", 0.97, "plain-1", first)
    add("plain prompts, 1 at once, time per token", 0.97, "plain-1", token)
    add("plain prompts, 1 at once, CPU time", 0.97, "plain-1", cpu)
    add("plain prompts, 8 at once, time per token", 1, "plain-8", token)
    add("plain prompts, 8 at once, CPU time", 1, "plain-8", cpu)
    file, plain = (by.token_in("plain-1", OWN, is_plain=is_plain) for is_plain in (False, True))
    if found and file and plain:
        found.append(Target("plain prompts, time per token: our float32 by the file in llama.cpp", 3, plain / file))
    return found


def step_targets(parts: Sequence[StepParts]) -> list[Target]:
    """Returns the targets for the profile of our own engine."""
    found = []
    for part in parts:
        if part.name == "permuted" and part.step:
            what = f"share of a step outside the linear layers, one answer, {part.dtype}"
            found.append(Target(what, 0.1, part.beside_linear_share, is_most=True))
        if part.name.startswith("shared-") and part.width > 1 and part.attention > 0:
            name = part.name.replace("shared", "private")
            private = next((other for other in parts if (other.name, other.dtype) == (name, part.dtype)), None)
            if private is not None:
                what = f"attention of {part.width} answers, private copies by shared documents, {part.dtype}"
                found.append(Target(what, 3, private.attention / part.attention))
    return found


def ends_of(seconds: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last fifth."""
    window = max(1, len(seconds) // 5)
    first, last = sorted(seconds[:window]), sorted(seconds[-window:])
    return first[window // 2], last[window // 2]


def _question_and_read(by: Rows, limits: Limits, weights: dict[str, TokenCost]) -> float | None:
    """The bare question's time, measured in the same rounds, and that of reading all keys and values once."""
    row = by.best("permuted", OWN)
    if row is None or not row.beside_seconds:
        return None
    read = max(row.num_prompt) * weights[row.dtype].kv_bytes_per_token / limits.bandwidth
    return statistics.median(row.beside_seconds) + read
