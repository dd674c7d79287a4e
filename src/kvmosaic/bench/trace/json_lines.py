"""JSON lines of a trace file: bounded reading, and checks that name line, value and what is expected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvmosaic.errors import InvalidTrace

MAX_LINE_BYTES = 2**20
MAX_LINES = 2_000_000
MAX_BLOCK_TOKENS = 2**16
MAX_BLOCKS = 2**16
"""Of one part of a request."""
MAX_ID = 2**63 - 1
MAX_TIME = 1e12
MAX_PROMPT_TOKENS = 10**7


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
