"""Records of a file: the objects of JSON lines or of one JSON list, read one at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvmosaic.errors import InvalidConfig

MAX_FILE_BYTES = 2**32
MAX_RECORD_BYTES = 2**25
_BLOCK_BYTES = 2**20
_START_BYTES = 2**12
_NOT_TEXT = "unpack it if it is compressed, and write other formats as JSON lines (datasets: Dataset.to_json)"


@dataclass(frozen=True, slots=True)
class Record:
    """One object of a file."""

    number: int
    """Counted from 1."""
    line: int
    """Where it begins, counted from 1."""
    value: dict[str, object]


def read_records(path: Path) -> Generator[Record, None, None]:
    """The objects of a file in its order. Only one of them is in memory at a time.

    Close it if it is not read to its end.

    Raises:
        InvalidConfig: no such file, a file or record that is too large, not UTF-8, not JSON or cut off.
    """
    if not path.is_file():
        raise InvalidConfig(f"{path} is not a file; give the path of a .jsonl or .json file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size > MAX_FILE_BYTES:
                raise InvalidConfig(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read: split it")
            for number, (line, value) in enumerate(_values(file, path), start=1):
                if not isinstance(value, dict):
                    raise _wrong(path, line, f"a record must be an object, got {value!r:.80}")
                yield Record(number, line, value)
    except OSError as error:
        raise InvalidConfig(
            f"{path} cannot be read: {error.strerror or error}; check the path and its rights"
        ) from None


def _values(file: BinaryIO, path: Path) -> Iterator[tuple[int, object]]:
    start = file.read(_START_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    file.seek(0)
    return _list_values(_Window(file, path)) if start.startswith(b"[") else _line_values(file, path)


def _line_values(file: BinaryIO, path: Path) -> Iterator[tuple[int, object]]:
    number = 0
    while data := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(data) > MAX_RECORD_BYTES:
            raise _wrong(path, number, f"the line is longer than {MAX_RECORD_BYTES} bytes; leave the record out")
        try:
            text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            value = json.loads(text) if text.strip() else None
        except UnicodeDecodeError as error:
            raise _not_text(path, number, error) from None
        except (ValueError, RecursionError) as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise _wrong(
                path, number, f"it is not JSON ({_reason(error)}{column}); repair the line, or remove it"
            ) from None
        if text.strip():
            yield number, value


def _list_values(window: _Window) -> Iterator[tuple[int, object]]:
    window.take("[")
    if window.peek() != "]":
        yield window.line, window.value()
        while window.peek() == ",":
            window.take(",")
            window.peek()
            yield window.line, window.value()
    window.take("]")
    if window.peek():
        raise _wrong(window.path, window.line, "there is something after the end of the list; remove it")


class _Window:
    """The decoded, unread part of a file.

    ......read......|at  ...text...  |  ...file...
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.line = 1
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._has_ended = False

    def peek(self) -> str:
        """The next character that is not white space; "" at the end of the file."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._move(1)
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._fill()

    def take(self, character: str) -> None:
        """Consumes the next character, which must be this one."""
        found = self.peek()
        if found != character:
            what = f"got {found!r}" if found else "the file ends: it was cut off, load it again"
            raise _wrong(self.path, self.line, f"the list should go on with {character!r}; {what}")
        self._move(1)

    def value(self) -> object:
        """Consumes the next JSON value."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                is_long = len(self._text) - self._at > MAX_RECORD_BYTES
                if self._has_ended or is_long or isinstance(error, RecursionError):
                    raise self._damaged(error) from None
                self._fill()
                continue
            self._move(end - self._at)
            return value

    def _damaged(self, error: ValueError | RecursionError) -> InvalidConfig:
        place = error.pos if isinstance(error, json.JSONDecodeError) else self._at
        line = self.line + self._text.count("\n", self._at, place)
        return _wrong(
            self.path,
            line,
            f"the record is not JSON ({_reason(error)}), or longer than {MAX_RECORD_BYTES} characters; "
            "repair it, or load the file again if it was cut off",
        )

    def _move(self, count: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _fill(self) -> None:
        """Doubles the decoded part, so that a long record is not parsed too often."""
        data = self._file.read(max(_BLOCK_BYTES, len(self._text) - self._at))
        self._has_ended = not data
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise _not_text(self.path, self.line, error) from None
        self._text = self._text[self._at :] + text
        self._at = 0


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "lists and objects are nested too deep" if isinstance(error, RecursionError) else "a number is too long"


def _not_text(path: Path, line: int, error: UnicodeDecodeError) -> InvalidConfig:
    return _wrong(path, line, f"from here on it is not text in UTF-8 ({error.reason}); {_NOT_TEXT}")


def _wrong(path: Path, line: int, what: str) -> InvalidConfig:
    return InvalidConfig(f"{path}, line {line}: {what}")
