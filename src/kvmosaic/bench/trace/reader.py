"""Reader of traces: finds the format of a file or folder."""

from __future__ import annotations

from pathlib import Path

from kvmosaic.bench.trace.json_lines import json_lines
from kvmosaic.bench.trace.mooncake import read_mooncake
from kvmosaic.bench.trace.ragpulse import REQUESTS, read_ragpulse
from kvmosaic.bench.trace.trace import Trace, TraceFormat
from kvmosaic.errors import InvalidTrace


def read_trace(path: Path, max_requests: int | None = None) -> Trace:
    """Reads a trace, in the order of its timestamps.

    Args:
        path: a folder of RAGPulse, its 0_trace.jsonl, or a .jsonl file of Mooncake.
        max_requests: how many of its first requests; None: all.

    Raises:
        InvalidTrace: neither of these, with file, line, value and what is expected.
    """
    file = path / REQUESTS if path.is_dir() else path
    if not file.is_file():
        what = f"the folder {path.name!r} has no {REQUESTS}" if path.is_dir() else f"there is no file {path.name!r}"
        raise InvalidTrace(f"{what}; --trace takes a folder of RAGPulse, its {REQUESTS}, or a .jsonl file of Mooncake")
    format_ = _format(file)
    requests = read_ragpulse(file) if format_ == "ragpulse" else read_mooncake(file)
    requests.sort(key=lambda request: request.seconds)
    name = path.resolve().name if path.is_dir() else file.stem if format_ == "mooncake" else file.resolve().parent.name
    return Trace(name, format_, tuple(requests)).first(max_requests)


def _format(file: Path) -> TraceFormat:
    """The format of a file, by the blocks of its first request."""
    line = next(json_lines(file), None)
    if line is None:
        raise InvalidTrace(f"{file.name} is empty; expected one request per line")
    blocks = line.field("hash_ids", "the blocks of the request: a list (Mooncake), or lists by part (RAGPulse)")
    return "mooncake" if isinstance(blocks, list) else "ragpulse"
