"""Reuse reports of composed requests: built by vLLM's scheduler, sent, and shelved until the API server answers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, Literal

from kvmosaic.layout import LATER_IN_FULL, MIXED_UP, Layout, Span, composition_of
from kvmosaic.prompt.companions import like_one_before, likeness_of
from kvmosaic.sampling import ReuseReport, SegmentReuse
from kvmosaic.sampling.reuse import segment_action
from kvmosaic.vllm.contract import FIELD, Repair
from kvmosaic.vllm.scheduler.chunk_prompts import has_seen_chunks, repaired_runs

HEADER = "kvmosaic-report"
"""Name of a report among the trace headers of an output."""
MAX_REPORTS = 4096
MAX_SEGMENTS = 65_536
"""Segments of all kept reports; one takes about half a kilobyte."""
MAX_SECONDS = 600.0
_ADDED = re.compile(r"-[0-9a-f]{8}\Z")
"""Suffix that vLLM appends to request ids inside the engine."""

Source = Literal["cached", "computed", "awaited", "same"]

_NOTES: dict[Source, str] = {
    "cached": "",
    "computed": "",
    "awaited": "computed by another request",
    "same": "same document as another one here",
}


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """Source of a chunk's keys and values."""

    source: Source
    """cached: a cache hit. computed: for this request. awaited: computed for another request, which this one waited
    for. same: the same document occurs earlier in the prompt."""
    tier: str = "device"
    """For cache hits: "device", or the tier that they were loaded from."""
    seconds: float = 0.0
    """Time from the lookup until they were available."""


@dataclass(frozen=True, slots=True)
class ComposedReport:
    """Outcome of the segments of one request.

        token ids    s s s s s s s s | a a a a | b b b b b b | q q q q
                     └─ prefix_tokens ─┘   more than the system text if vLLM still has parts of the composed prompt

    All values are numbers, texts or None, so that any process can send it to any other.
    """

    layout: Layout
    repair: Repair = 0
    chunks: tuple[ChunkOutcome, ...] = ()
    """One per chunk; empty if the request was not composed."""
    prefix_tokens: int = 0
    """Tokens at the start of the prompt that hit vLLM's own prefix cache."""
    bypass: str = ""
    """Why it was answered as an ordinary prompt; empty: it was composed."""
    rest: ChunkOutcome | None = None
    """Outcome of the text before the first chunk, if there is one."""
    copied: str = ""
    """Why its documents were copied, where reading them in place was chosen."""
    cache_format: str = ""
    """Format in eight bits in which copies are kept, so that keys that were moved are rounded again; empty: none."""
    max_positions: int | None = None
    """Positions that the model was trained for, if known."""
    is_apart: bool = False
    """Whether its documents are known not to be alike; if not, they are compared."""

    def __post_init__(self) -> None:
        if self.is_composed:
            assert len(self.chunks) == len(self.lengths)

    @property
    def is_composed(self) -> bool:
        """Whether the prompt was composed from chunks; if not, it was an ordinary prompt."""
        return not self.bypass and bool(self.chunks)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each chunk."""
        return tuple(span.num_tokens for span in self.layout.spans if span.is_chunk)

    @property
    def repaired_tokens(self) -> int:
        """Tokens of chunks that were recomputed in this prompt."""
        if not self.is_composed:
            return 0
        ends = tuple(accumulate(span.num_in_prompt for span in self.layout.spans))
        repaired = repaired_runs(self.layout, self.repair)
        return sum(sum(map(len, runs)) for index, runs in repaired.items() if self.prefix_tokens < ends[index])

    def to_json(self) -> dict[str, Any]:
        """The value of the answer's field `kvmosaic`: that of our own server, plus `totals` and `bypass`."""
        reuse = ReuseReport(self.segments(), composition=self._meaning())
        segments = [
            segment.to_reply(document_id=segment.name if segment.kind == "chunk" else None)
            for segment in reuse.segments
        ]
        exact = reuse.reused_tokens
        if self.is_composed:
            exact = sum(segment.reused_tokens for segment in reuse.segments if segment.kind == "system")
        return {
            "composition": reuse.composition,
            "time_to_first_token_ms": None,  # unknown to the scheduler, which builds this
            "documents": [segment for segment in segments if segment["kind"] == "chunk"],
            "segments": segments,
            "totals": {
                "prompt_tokens": self.layout.num_tokens,
                "cached_tokens": reuse.reused_tokens,
                "composed_tokens": reuse.reused_tokens - exact,
                "recomputed_tokens": reuse.computed_tokens,
                "moved_tokens": reuse.moved_tokens,
            },
            "advice": [],
            # vLLM reads the request itself, so there are none about its fields
            "warnings": self._warnings(),
            "repair": None,  # repaired tokens are among the recomputed tokens; their time is unknown here
            "bypass": self.bypass or None,
        }

    def _warnings(self) -> list[str]:
        warnings = [f"documents were copied, not read in place: {self.copied}"] if self.copied else []
        # in shared positions they are moved to be repaired, one after the other
        is_moved = any(view.distance for view in self.layout.last.views) or (self.repair and self.layout.rules.overlaps)
        if self.cache_format and is_moved:
            warnings.append(
                f"keys of documents were moved, and rounded to {self.cache_format} once more; keys that are read in "
                "place are not"
            )
        return warnings

    def segments(self) -> tuple[SegmentReuse, ...]:
        """System text, texts, chunks and question, in prompt order; an empty system text is omitted."""
        outcomes, repaired = iter(self.chunks), repaired_runs(self.layout, self.repair)
        positions = self.layout.positions()
        rows, start = [], 0
        for index, span in enumerate(self.layout.spans):
            if span.is_companion:
                continue
            length = span.num_tokens
            of_prefix = min(max(self.prefix_tokens - start, 0), length)
            if span.is_chunk and self.is_composed:
                distance = positions[index] - span.start
                rows.append(_chunk(span, distance, of_prefix, next(outcomes), repaired.get(index, ())))
            else:
                reused = length if self._is_cached(index) else of_prefix
                rows.append(_segment(str(span.segment.kind), length, reused, name=span.segment.name))
            start += length
        return tuple(rows)

    def _is_cached(self, index: int) -> bool:
        """Whether all of a system text, or of the text after it, was cached: a cached chunk saw the former."""
        if not self.is_composed or has_seen_chunks(self.layout, index):
            return False
        is_rest_cached = self.rest is not None and self.rest.source == "cached"
        span = self.layout.spans[index]
        if span.segment.kind != "system":
            return span.is_text and is_rest_cached
        have_seen_it = self.chunks if self.layout.chunk_context != "none" else ()
        return is_rest_cached or any(chunk.source == "cached" for chunk in have_seen_it)

    def _meaning(self) -> str:
        """Describes what the prompt computed: exact attention, or which approximation."""
        if not self.is_composed:
            return "exact"
        remark = self._remark()
        meaning = composition_of(self.layout, self.max_positions, remark=remark)
        if self.repair and remark != LATER_IN_FULL:
            what = f"the first {self.repair} tokens" if isinstance(self.repair, int) else "repaired tokens"
            meaning += f"; {what} of each document see everything before them"
        return meaning

    def _remark(self) -> str:
        """What is said of documents that are alike, and have not met others of their kind."""
        documents = self.layout.chunk_token_ids
        if self.is_apart or likeness_of(documents, self.layout.companions) != "apart":
            return ""
        later = like_one_before(documents)
        whole = tuple((0, len(each)) if number in later else () for number, each in enumerate(documents))
        return LATER_IN_FULL if self.repair == whole else MIXED_UP


def _chunk(span: Span, distance: int, of_prefix: int, outcome: ChunkOutcome, repaired: Sequence[range]) -> SegmentReuse:
    """The row of a chunk, of which some tokens were recomputed."""
    length, name, again = span.num_tokens, span.segment.name, sum(map(len, repaired))
    which = f"its first {again} tokens" if repaired[:1] == (range(again),) else f"{again} of its tokens"
    if of_prefix == length:
        return _segment("chunk", length, length, name=name, distance=distance, note="composed here before")
    is_loaded = outcome.source == "cached" and outcome.tier != "device"
    notes = (
        _NOTES[outcome.source],
        f"loaded from {outcome.tier}" if is_loaded else "",
        f"{which} computed again" if again else "",
    )
    return _segment(
        *("chunk", length, of_prefix if outcome.source == "computed" else max(of_prefix, length - again)),
        name=name,
        distance=distance,
        tier=outcome.tier if is_loaded else "device",
        seconds=outcome.seconds,
        note="; ".join(filter(None, notes)),
    )


def _segment(
    kind: str, length: int, reused: int, *, distance: int = 0, tier: str = "device", seconds: float = 0.0, **other: Any
) -> SegmentReuse:
    action, milliseconds = segment_action(reused, length, distance), seconds * 1e3
    found = {"distance": distance, "reused_tokens": reused, "tier": tier if reused else None}
    return SegmentReuse(kind, length, action, milliseconds=milliseconds, **found, **other)  # type: ignore[arg-type]


class ReportShelf:
    """Reports by the id of their request: bounded by their number, by their segments and by age. Thread-safe.

    put("chatcmpl-7-1a2b3c4d", report)    as the engine names the request
    take("chatcmpl-7")                    as the front end does; the second time it is None
    """

    def __init__(
        self,
        max_reports: int = MAX_REPORTS,
        max_segments: int = MAX_SEGMENTS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept: OrderedDict[str, tuple[float, dict[str, Any]]] = OrderedDict()
        self._names: dict[str, str] = {}
        self._num_segments = 0
        self._limits = (max_reports, max_segments, max_seconds)
        self._clock = clock
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, request_id: str, report: dict[str, Any]) -> None:
        """Stores a report; replaces an earlier one of the same request."""
        max_reports, max_segments, max_seconds = self._limits
        with self._lock:
            now = self._clock()
            self._drop(request_id)
            self._kept[request_id] = (now, report)
            self._names[_ADDED.sub("", request_id)] = request_id
            self._num_segments += len(report["segments"])
            while self._kept and (
                len(self._kept) > max_reports
                or self._num_segments > max_segments
                or next(iter(self._kept.values()))[0] < now - max_seconds
            ):
                self._drop(next(iter(self._kept)))

    def take(self, request_id: str) -> dict[str, Any] | None:
        """Removes and returns a report; None if there is none, or it was dropped."""
        with self._lock:
            return self._drop(request_id) or self._drop(self._names.get(request_id, ""))

    def _drop(self, request_id: str) -> dict[str, Any] | None:
        _, report = self._kept.pop(request_id, (0.0, None))
        if report is not None:
            self._num_segments -= len(report["segments"])
            name = _ADDED.sub("", request_id)
            if self._names.get(name) == request_id:
                del self._names[name]
        return report


SHELF = ReportShelf()
"""The shelf of this process: reports arrive with the engine's outputs, and another part answers the requests."""


class ReportSender:
    """Sends each report with the first output of its request, in its `trace_headers`.

        request.trace_headers ──▶ EngineCoreOutput.trace_headers ──▶ the API server with this request
                       {…, HEADER: report}                             `shelve_reports`

    vLLM copies these headers to every output, and reads only those of tracing. Its other ways lose reports: a finished
    request's `kv_transfer_params` where the API server ends an answer at a stop string, or streams it (before 0.33);
    statistics with `--disable-log-stats`, and with several API servers, of which one receives them.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[Any, Any]] = {}
        """By id: requests without an output yet, and their own headers."""

    def send(self, request: Any, report: dict[str, Any]) -> None:
        """Adds the report to the next output of a request."""
        self._sent[request.request_id] = request, request.trace_headers
        request.trace_headers = {**(request.trace_headers or {}), HEADER: json.dumps(report)}

    def remove_delivered(self) -> None:
        """Restores the headers of requests that have an output; called in every step."""
        for request_id in [name for name, (request, _) in self._sent.items() if request.num_output_tokens]:
            request, headers = self._sent.pop(request_id)
            request.trace_headers = headers

    def forget(self, request_id: str) -> None:
        """Drops a finished request; its last output keeps the headers."""
        self._sent.pop(request_id, None)


_METHOD = "process_outputs"


def shelve_reports(state: Any, shelf: ReportShelf = SHELF) -> None:
    """Stores the reports that arrive at this process from now on; safe to call again.

    vLLM has no extension point for the outputs of its engine, so this wraps one method of one object: the output
    processor of the engine's client. An engine client without one changes nothing.
    """
    processor = getattr(getattr(state, "engine_client", None), "output_processor", None)
    process = getattr(processor, _METHOD, None)
    if process is None or hasattr(process, "__wrapped__"):
        return

    @wraps(process)
    def shelving(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            if (report := _report_in(output)) is not None:
                shelf.put(output.request_id, report)
        return process(outputs, *args, **kwargs)

    setattr(processor, _METHOD, shelving)


def _report_in(output: Any) -> dict[str, Any] | None:
    """The report of an output: the first one has it in its headers, a finished one in its own field."""
    if (text := (output.trace_headers or {}).get(HEADER)) is not None:
        report = json.loads(text)
    else:
        report = (output.kv_transfer_params or {}).get(FIELD)
    return report if isinstance(report, dict) and "segments" in report else None
