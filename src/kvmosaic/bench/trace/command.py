"""Run of `kvmosaic bench --trace`: simulates, serves, prints tables, writes files."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvmosaic.bench.progress import ProgressBar, Watcher
from kvmosaic.bench.results import facts, save_report
from kvmosaic.bench.trace.prompts import PromptWriter
from kvmosaic.bench.trace.replay import FIRST_BLOCK, PREFIX_ONLY, VARIANTS, ReplayRow, Variant
from kvmosaic.bench.trace.report import ServedRow, TraceReport, save_plot
from kvmosaic.bench.trace.simulation import NAME as CLAIRVOYANT
from kvmosaic.bench.trace.simulation import SimulatedCache, clairvoyant, simulate
from kvmosaic.bench.trace.trace import Trace, read_trace
from kvmosaic.errors import InvalidConfig, ServerError
from kvmosaic.threads import this_machine

if TYPE_CHECKING:
    from kvmosaic.bench.trace.engine_replay import EngineReplay
    from kvmosaic.bench.trace.server_replay import ServerReplay

SERVED_REQUESTS = 200
"""Requests that a model or server answers, unless the caller names a number."""
SERVED_BLOCK_TOKENS = 16
TINY = "random-tiny"
_INTERRUPTED = "Interrupted: what came later was not measured."
_BOUNDED = "The simulated caches were full, and older blocks were evicted: their size is bounded, whatever the trace."
_NO_DOCUMENTS = "The trace does not tell documents from other text: only prefix caching can be replayed."


@dataclass(frozen=True, slots=True)
class TraceRun:
    """What to replay."""

    trace: Path
    requests: int | None = None
    """First requests of the trace; None: all are simulated, and `SERVED_REQUESTS` are served."""
    cache_shares: tuple[float, ...] = ()
    evictions: tuple[str, ...] = ("lru",)
    model: str | None = None
    """Model that answers, too."""
    url: str | None = None
    """Server that answers, too."""
    block_tokens: int = SERVED_BLOCK_TOKENS
    """Words of a full block when it is served."""
    capacity: str = "1GiB"
    """Memory for each of the model's pools."""
    num_threads: int | None = None

    @property
    def command(self) -> str:
        """The command, with names instead of paths."""
        model = [Path(self.model).name] if self.model else []
        shares = [f"--cache-share {share:g}" for share in self.cache_shares]
        evictions = [f"--eviction {name}" for name in self.evictions] if self.cache_shares else []
        requests = [f"--requests {self.requests}"] if self.requests else []
        served = [f"--block-tokens {self.block_tokens}"] if self.model or self.url else []
        url = ["--url URL"] if self.url else []
        trace = f"--trace {self.trace.resolve().name}"
        return " ".join(["kvmosaic bench", *model, trace, *requests, *shares, *evictions, *served, *url])


@dataclass(slots=True)
class _Figures:
    """What was measured so far."""

    rows: list[ReplayRow] = field(default_factory=list)
    served: list[ServedRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, row: ReplayRow) -> None:
        """Adds a row.

        Raises:
            KeyboardInterrupt: its replay was interrupted.
        """
        if row.num_requests:
            self.rows.append(row)
        _check_complete(row)


def bench_trace(run: TraceRun, output: Path | None, *, as_json: bool = False) -> TraceReport:
    """Replays a trace, prints the figures, and writes JSON, Markdown and a plot into `output` if it is given.

    Raises:
        InvalidTrace: a file that is no trace, or cannot be replayed in this size.
        KVMosaicError: the model cannot be loaded, or the server refuses.
    """
    notices, console = Console(stderr=True), Console()
    with ProgressBar(notices) as bar:
        report = replay_trace(run, bar)
    if as_json:
        console.file.write(report.to_json())
    else:
        console.print(report.to_tables())
    if output is not None:
        save_report(report, output, report.name, lambda: save_plot(report, output), notices)
    return report


def replay_trace(run: TraceRun, watcher: Watcher) -> TraceReport:
    """Simulates a trace, and has its first requests answered if a model or server is named.

    An interrupt ends it with what was measured so far.

    Raises:
        InvalidTrace, KVMosaicError: see `bench_trace`.
    """
    begin = time.monotonic()
    if run.model is not None and run.url is not None:
        raise InvalidConfig("a replay is answered by a model or by a server; leave MODEL or --url out")
    watcher.stage(f"reading {run.trace.name}")
    trace = read_trace(run.trace, run.requests)
    figures = _Figures()
    if not trace.has_documents:
        figures.notes.append(_NO_DOCUMENTS)
    with ExitStack() as stack:
        served = trace.first(run.requests or SERVED_REQUESTS)
        scaled = PromptWriter(served, run.block_tokens)
        server = _opened(run, served, scaled, watcher, stack)  # first of all: it may be absent
        try:
            _simulate_all(run, trace, watcher, figures)
            if server is not None:
                _serve(server, served, scaled, watcher, figures)
        except KeyboardInterrupt:
            if not figures.rows:
                raise
            figures.notes.append(_INTERRUPTED)
        except ServerError as error:
            figures.notes.append(f"The server failed, and the rest was not measured: {error}")
    if any(row.was_bounded for row in figures.rows):
        figures.notes.append(_BOUNDED)
    return TraceReport(
        trace=trace.facts(),
        options=_options(run, figures),
        machine=facts(run.num_threads or this_machine().threads),
        rows=figures.rows,
        served=figures.served,
        notes=figures.notes,
        seconds=time.monotonic() - begin,
    )


def _options(run: TraceRun, figures: _Figures) -> dict[str, Any]:
    served_by = Path(run.model).name if run.model else "a server" if run.url else None
    return {
        "command": run.command,
        "requests": run.requests,
        "cache_shares": list(run.cache_shares),
        "evictions": list(run.evictions),
        "served_by": served_by,
        "served_requests": max((row.served.num_requests for row in figures.served), default=0),
        "block_tokens": run.block_tokens,
    }


def _simulate_all(run: TraceRun, trace: Trace, watcher: Watcher, figures: _Figures) -> None:
    """Adds the rows of all simulations.

    Raises:
        KeyboardInterrupt: with the rows so far.
    """
    writer = PromptWriter(trace)
    block_size = SimulatedCache.block_size_for(trace)
    caches = [SimulatedCache(share, eviction, block_size) for share in run.cache_shares for eviction in run.evictions]
    variants = _variants(trace)
    limited = FIRST_BLOCK if trace.has_documents else PREFIX_ONLY
    watcher.total((len(variants) + len(caches)) * len(trace.requests))
    for variant in variants:
        figures.add(simulate(trace, writer, variant, SimulatedCache(block_size=block_size), watcher))
    for cache in caches:
        figures.add(simulate(trace, writer, limited, cache, watcher))
    if trace.has_documents:
        figures.rows += [
            clairvoyant(trace, SimulatedCache(share, CLAIRVOYANT, block_size)) for share in run.cache_shares
        ]


def _variants(trace: Trace) -> tuple[Variant, ...]:
    return VARIANTS if trace.has_documents else (PREFIX_ONLY,)


def _serve(
    server: EngineReplay | ServerReplay, trace: Trace, scaled: PromptWriter, watcher: Watcher, figures: _Figures
) -> None:
    """Adds the rows of requests that are answered.

    Raises:
        KeyboardInterrupt, ServerError: with the rows so far.
    """
    full = PromptWriter(trace)
    cache = SimulatedCache(block_size=SimulatedCache.block_size_for(trace))
    variants = _variants(trace)
    known = {row.variant: row for row in figures.rows if _is_same(row, trace)}
    watcher.total((2 * len(variants) - len(known)) * len(trace.requests))
    for variant in variants:
        simulated = known.get(variant.name) or simulate(trace, full, variant, cache, watcher)
        _check_complete(simulated)
        served = server.replay(trace, scaled, variant, watcher)
        if served.num_requests:
            figures.served.append(ServedRow(served, simulated))
        _check_complete(served)


def _is_same(row: ReplayRow, trace: Trace) -> bool:
    """Whether a simulation without a limit was of just these requests."""
    return row.cache == str(SimulatedCache()) and row.num_requests == len(trace.requests)


def _check_complete(row: ReplayRow) -> None:
    if not row.is_complete:
        raise KeyboardInterrupt


def _opened(
    run: TraceRun, trace: Trace, writer: PromptWriter, watcher: Watcher, stack: ExitStack
) -> EngineReplay | ServerReplay | None:
    """The model or server that answers, ready; None if none is named.

    Raises:
        ModelError, ServerError: it cannot be loaded, or reached.
    """
    if run.url is not None:
        from kvmosaic.bench.trace.server_replay import ServerReplay

        watcher.stage("looking for the server")
        server = ServerReplay(run.url)
        server.check()
        return server
    if run.model is None:
        return None
    from kvmosaic.bench.models import model_folder
    from kvmosaic.bench.trace.engine_replay import EngineReplay, save_tiny_model
    from kvmosaic.model.quiet import quiet_libraries

    quiet_libraries()
    watcher.stage(f"loading {Path(run.model).name}")
    scratch = Path(stack.enter_context(TemporaryDirectory(prefix="kvmosaic-bench-")))
    folder = save_tiny_model(scratch / TINY, writer) if run.model == TINY else model_folder(run.model, scratch)
    num_words = sum(writer.num_tokens(request) for request in trace.requests)
    return stack.enter_context(EngineReplay(folder, run.capacity, num_words, run.num_threads))
