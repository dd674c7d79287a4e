"""Records of a file: the objects of JSON lines or of one JSON list, read one at a time, and their checked fields."""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvmosaic.errors import InvalidConfig, InvalidDocument
from kvmosaic.prompt.separator import check_unicode

MAX_ITEMS = 100_000


@dataclass(frozen=True, slots=True)
class JSONField:
    """A value inside a record. Everything it is asked for is checked.

    Raises:
        InvalidConfig: from every method, where the value is not what is asked for; the message begins with its name.
    """

    name: str
    """Its path: `context[3].title`; empty for the record itself."""
    value: object

    def member(self, *names: str) -> JSONField:
        """The first of these members of an object that is there."""
        members = self._members()
        for name in names:
            if members.get(name) is not None:
                return JSONField(f"{self.name}.{name}" if self.name else name, members[name])
        raise self.wrong(f"there is no {' or '.join(map(repr, names))}")

    def has(self, *names: str) -> bool:
        """Whether all of these members are there, with a value."""
        return all(self._members().get(name) is not None for name in names)

    def items(self) -> list[JSONField]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.wrong(f"it must be a list, got {self.value!r:.80}")
        if len(self.value) > MAX_ITEMS:
            raise self.wrong(f"it has {len(self.value)} items; at most {MAX_ITEMS} are allowed")
        return [JSONField(f"{self.name}[{index}]", item) for index, item in enumerate(self.value)]

    def pair(self) -> tuple[JSONField, JSONField]:
        """The items of a list of two."""
        items = self.items()
        if len(items) != 2:
            raise self.wrong(f"it must have 2 items, got {len(items)}")
        return items[0], items[1]

    def text(self) -> str:
        """A text; it may be empty. Lines end with a line feed only."""
        if not isinstance(self.value, str):
            raise self.wrong(f"it must be a text, got {self.value!r:.80}")
        try:
            check_unicode(self.value, InvalidDocument)
        except InvalidDocument as error:
            raise self.wrong(str(error)) from None
        return self.value.replace("\r\n", "\n").replace("\r", "\n")

    def filled_text(self) -> str:
        """A text that says something."""
        text = self.text()
        if not text.strip():
            raise self.wrong("it is empty; leave the record out")
        return text

    def texts(self) -> tuple[str, ...]:
        """A list of texts that say something, at least one of them."""
        texts = tuple(item.filled_text() for item in self.items())
        if not texts:
            raise self.wrong("it is empty; leave the record out")
        return texts

    def label(self) -> str:
        """A short text or a whole number, as ids are."""
        if isinstance(self.value, int) and not isinstance(self.value, bool):
            return str(self.value)
        return self.filled_text()

    def is_true(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong(f"it must be true or false, got {self.value!r:.80}")
        return self.value

    def unpacked(self) -> JSONField:
        """The value that a text holds as JSON, as in tables whose cells cannot hold lists; any other value itself."""
        if not isinstance(self.value, str):
            return self
        try:
            return JSONField(self.name, json.loads(self.value))
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"it is a text that is not JSON: {error}") from None

    def wrong(self, what: str) -> InvalidConfig:
        """An error about this value."""
        return InvalidConfig(f"{self.name}: {what}" if self.name else what)

    def _members(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"it must be an object, got {self.value!r:.80}")
        return self.value


SHORT_ANSWER = "Answer the question from the documents, in a few words and nothing else."
"""The system text of questions that are answered in a few words."""


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """The file of a record, its number, and the tokens of a piece."""

    path: Path
    number: int
    """Of the record, counted from 1."""
    piece_tokens: int | None = None
    """What long texts without passages are cut into; None: what the format thinks best."""

    def id_of(self, record: JSONField, *names: str) -> str:
        """The id that the record has under one of these names, or else its number."""
        return record.member(*names).label() if any(map(record.has, names)) else str(self.number)


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
