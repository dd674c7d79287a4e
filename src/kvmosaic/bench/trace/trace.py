"""Traces: recorded requests whose texts are blocks known by an id and a length only, and the reader of their files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from kvmosaic.errors import InvalidTrace

TraceFormat = Literal["ragpulse", "mooncake"]

BLOCK_TOKENS = 512
"""Tokens of a full block, in both formats."""
MAX_LINE_BYTES = 2**20
MAX_LINES = 2_000_000
MAX_BLOCK_TOKENS = 2**16
MAX_BLOCKS = 2**16
"""Of one part of a request."""
MAX_ID = 2**63 - 1
MAX_TIME = 1e12
MAX_PROMPT_TOKENS = 10**7
_MILLISECOND = 1e-3
REQUESTS = "0_trace.jsonl"
_LENGTHS = {
    "1_sys_prompt.jsonl": "sys_prompt_id",
    "2_passages.jsonl": "passage_id",
    "3_history.jsonl": "history_id",
    "4_user_input.jsonl": "user_input_id",
    "5_web_search.jsonl": "web_search_id",
}
"""The files with the lengths of blocks, and their field with the id."""
_REST = ("history", "web_search", "user_input")


class TraceBlock(NamedTuple):
    """A block of text: equal ids are equal texts."""

    id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, in the order of its prompt: system text, documents, then everything else.

    A trace that does not tell documents from other text has it all in `rest`.
    """

    seconds: float
    """Since the beginning of the trace."""
    system: tuple[TraceBlock, ...]
    documents: tuple[TraceBlock, ...]
    """One block each."""
    rest: tuple[TraceBlock, ...]
    """History, results of a web search, and the question."""

    @property
    def num_document_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(block.num_tokens for block in self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(block.num_tokens for part in (self.system, self.documents, self.rest) for block in part)


@dataclass(frozen=True, slots=True)
class Trace:
    """A recorded trace, in the order of its timestamps."""

    name: str
    format: TraceFormat
    requests: tuple[TraceRequest, ...]

    @property
    def has_documents(self) -> bool:
        """Whether any request tells its documents from other text."""
        return any(request.documents for request in self.requests)

    @property
    def distinct_document_tokens(self) -> int:
        """Tokens of all documents, each counted once."""
        return _distinct_tokens(block for request in self.requests for block in request.documents)

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all blocks, each counted once."""
        parts = ((request.system, request.documents, request.rest) for request in self.requests)
        return _distinct_tokens(block for three in parts for part in three for block in part)

    def first(self, count: int | None) -> Trace:
        """The first requests of the trace; None: all."""
        return self if count is None else Trace(self.name, self.format, self.requests[:count])

    def facts(self) -> dict[str, Any]:
        """Numbers for reports."""
        return {
            "name": self.name,
            "format": self.format,
            "requests": len(self.requests),
            "prompt_tokens": sum(request.num_tokens for request in self.requests),
            "document_tokens": sum(request.num_document_tokens for request in self.requests),
            "distinct_document_tokens": self.distinct_document_tokens,
            "distinct_documents": len({block.id for request in self.requests for block in request.documents}),
            "distinct_system_texts": len({tuple(block.id for block in each.system) for each in self.requests}),
        }


def _distinct_tokens(blocks: Any) -> int:
    return sum({block.id: block.num_tokens for block in blocks}.values())


@dataclass(frozen=True, slots=True)
class Line:
    """One object of a file, with its place for messages."""

    file: str
    number: int
    fields: Mapping[str, Any]

    def fail(self, what: str) -> NoReturn:
        """Raises InvalidTrace with the place of this line."""
        raise InvalidTrace(f"{self.file}, line {self.number}: {what}")

    def field(self, name: str, expected: str) -> Any:
        """The value of a field.

        Raises:
            InvalidTrace: it is missing.
        """
        if name not in self.fields:
            self.fail(f"{name!r} is missing; expected {expected}")
        return self.fields[name]

    def whole(self, name: str, low: int, high: int) -> int:
        """A field with a whole number in a range.

        Raises:
            InvalidTrace: anything else.
        """
        value = self.field(name, f"a whole number from {low} to {high}")
        if not _is_whole(value, low, high):
            self.fail(f"{name} is {value!r:.80}; expected a whole number from {low} to {high}")
        return int(value)

    def seconds(self, unit: float) -> float:
        """The field `timestamp`, a number or a text of digits, in seconds.

        Raises:
            InvalidTrace: anything else.
        """
        value = self.field("timestamp", "a number")
        if isinstance(value, str) and len(value) <= 20 and value.isascii() and value.isdigit():
            value = int(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MAX_TIME or not math.isfinite(value):
            self.fail(f"timestamp is {value!r:.80}; expected a number from 0 to {MAX_TIME:.0e}")
        return float(value) * unit

    def ids(self, name: str, values: object) -> Sequence[int]:
        """Checks a list of block ids.

        Raises:
            InvalidTrace: it is something else, or too long.
        """
        if not isinstance(values, list) or len(values) > MAX_BLOCKS:
            self.fail(f"{name} is {values!r:.80}; expected a list of at most {MAX_BLOCKS} block ids")
        for value in values:
            if not _is_whole(value, 0, MAX_ID):
                self.fail(f"{name} has the block id {value!r:.80}; expected a whole number from 0 to {MAX_ID}")
        return values


def json_lines(path: Path) -> Iterator[Line]:
    """The objects of a file with one JSON object per line; empty lines are skipped.

    Raises:
        InvalidTrace: the file cannot be read, a line is too long or is no JSON object, or there are too many.
    """
    try:
        with path.open("rb") as file:
            for number in range(1, MAX_LINES + 2):
                text = file.readline(MAX_LINE_BYTES + 1)
                if not text:
                    return
                if number > MAX_LINES:
                    raise InvalidTrace(f"{path.name} has more than {MAX_LINES} lines; replay a part of it")
                if text.strip():
                    yield _line(path.name, number, text)
    except OSError as error:
        raise InvalidTrace(f"{path.name} cannot be read: {error.strerror or type(error).__name__}") from None


def _line(file: str, number: int, text: bytes) -> Line:
    if len(text) > MAX_LINE_BYTES:
        raise InvalidTrace(f"{file}, line {number}: it is longer than {MAX_LINE_BYTES} bytes; expected one request")
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        shown = text[:80].decode("utf-8", "replace").strip()
        raise InvalidTrace(f"{file}, line {number}: {shown!r} is no JSON object; expected one object per line")
    return Line(file, number, fields)


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def read_mooncake(path: Path) -> list[TraceRequest]:
    """Reads the requests of a file.

    Raises:
        InvalidTrace: no such trace; the message names line and value.
    """
    return [_mooncake_request(line) for line in json_lines(path)]


def _mooncake_request(line: Line) -> TraceRequest:
    length = line.whole("input_length", 1, MAX_PROMPT_TOKENS)
    ids = line.ids("hash_ids", line.field("hash_ids", "a list of block ids"))
    if len(ids) != -(-length // BLOCK_TOKENS):
        line.fail(
            f"hash_ids has {len(ids)} blocks for input_length {length}; expected {-(-length // BLOCK_TOKENS)} blocks "
            f"of {BLOCK_TOKENS} tokens"
        )
    blocks = [TraceBlock(number, BLOCK_TOKENS) for number in ids]
    blocks[-1] = TraceBlock(ids[-1], length - BLOCK_TOKENS * (len(ids) - 1))
    return TraceRequest(line.seconds(_MILLISECOND), (), (), tuple(blocks))


def read_ragpulse(path: Path) -> list[TraceRequest]:
    """Reads the requests of a file; those with the lengths of its blocks are in the same folder.

    Raises:
        InvalidTrace: a file that is missing or is no such trace; the message names file, line and value.
    """
    blocks: dict[int, TraceBlock] = {}
    for name, field in _LENGTHS.items():
        beside = path.parent / name
        if not beside.is_file():
            raise InvalidTrace(
                f"{name} is missing beside {path.name}; a RAGPulse trace has {', '.join((REQUESTS, *_LENGTHS))}"
            )
        for line in json_lines(beside):
            number = line.whole(field, 0, MAX_ID)
            length = line.whole("token_length", 1, MAX_BLOCK_TOKENS)
            if blocks.setdefault(number, TraceBlock(number, length)).num_tokens != length:
                line.fail(f"block {number} has {length} tokens here and {blocks[number].num_tokens} before")
    return [_ragpulse_request(line, blocks) for line in json_lines(path)]


def _ragpulse_request(line: Line, blocks: Mapping[int, TraceBlock]) -> TraceRequest:
    parts = line.field("hash_ids", "the blocks of the request by part")
    if not isinstance(parts, dict):
        line.fail(f"hash_ids is {parts!r:.80}; expected an object with sys_prompt, passages_ids and so on")
    rest = tuple(block for name in _REST for block in _part(line, parts, name, blocks))
    request = TraceRequest(
        line.seconds(1.0),
        _part(line, parts, "sys_prompt", blocks),
        _part(line, parts, "passages_ids", blocks),
        rest,
    )
    if not rest:
        line.fail(f"the request has no question; expected blocks in one of {', '.join(_REST)}")
    if request.num_tokens > MAX_PROMPT_TOKENS:
        line.fail(f"the prompt has {request.num_tokens} tokens; at most {MAX_PROMPT_TOKENS} can be replayed")
    return request


def _part(
    line: Line, parts: Mapping[str, object], name: str, blocks: Mapping[int, TraceBlock]
) -> tuple[TraceBlock, ...]:
    ids = line.ids(name, parts.get(name, []))
    missing = next((number for number in ids if number not in blocks), None)
    if missing is not None:
        line.fail(f"{name} has the block id {missing}, which no file of lengths has; are the files of one version?")
    return tuple(blocks[number] for number in ids)


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
