"""Files to upload: their texts as lines of JSON, and their content hashes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmosaic.console.documents.client import NamedLine
from kvmosaic.console.folder import find_documents
from kvmosaic.errors import InvalidDocument
from kvmosaic.extraction import SUFFIXES, extract_text, is_readable

MAX_FILES = 1_000_000
MAX_FILE_BYTES = 2**28
HASH = "sha256"
"""Key in the metadata of a document that came from a file: the hash of that file."""
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class FileFields:
    """Fields that all uploaded files get."""

    pinned: bool = False
    ttl_seconds: int | None = None

    def values(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        pinned = {"pinned": True} if self.pinned else {}
        return pinned if self.ttl_seconds is None else {**pinned, "ttl_seconds": self.ttl_seconds}


def files_of(folder: Path, pattern: str | None) -> dict[str, Path]:
    """Returns the files of a folder and its sub-folders that can be read, by their relative paths.

    Raises:
        InvalidDocument: not a folder, no file, or a pattern that leads out of it.
    """
    found = find_documents(folder, pattern or "**/*", MAX_FILES).values()
    files = {path.relative_to(folder).as_posix(): path for path in found if pattern or is_readable(path.name)}
    if not files:
        raise InvalidDocument(f"{folder} has no file that can be read; suffixes: {', '.join(SUFFIXES)}")
    return files


def read_file(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        InvalidDocument: it cannot be read, or is too large.
    """
    if path.is_dir():
        raise InvalidDocument(f"it is a folder; upload it with kvmosaic documents sync {path}")
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise InvalidDocument(f"it has {num_bytes:,} bytes; at most {MAX_FILE_BYTES:,} are read, split it")
        return path.read_bytes()
    except OSError as error:
        raise InvalidDocument(f"it cannot be read: {error.strerror}") from error


def is_gone(path: Path) -> bool:
    """Whether there is no such file; a folder that cannot be read now does not say that."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):
        return False
    return False


def hash_of(content: bytes) -> str:
    """Returns the hash under which the server remembers the content of a file."""
    return hashlib.sha256(content).hexdigest()


def line_of(name: str, content: bytes, fields: Mapping[str, Any]) -> NamedLine:
    """Returns the document of a file: its text, its name as title, its hash; `fields` come before these.

    Raises:
        InvalidDocument: it has no text, or cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidDocument("its name is not UTF-8; rename it") from None
    text = extract_text(content, name)
    values = {"id": name, "title": Path(name).name, "text": text, "metadata": {HASH: hash_of(content)}, **fields}
    return NamedLine.of(name, values)


def json_lines(path: Path | None) -> Iterator[NamedLine]:
    """Yields the documents of a file with one JSON object per line; None: of standard input.

    Raises:
        InvalidDocument: it cannot be read, or a line is too long.
    """
    name = str(path or "standard input")
    try:
        with sys.stdin.buffer if path is None else path.open("rb") as source:
            number = 0
            while line := source.readline(MAX_FILE_BYTES):
                number += 1
                if len(line) == MAX_FILE_BYTES:
                    raise InvalidDocument(f"{name}, line {number} is longer than {MAX_FILE_BYTES:,} bytes; split it")
                if line.strip():
                    yield NamedLine(f"{name}, line {number}", line.strip())
    except OSError as error:
        raise InvalidDocument(f"{path} cannot be read: {error.strerror}") from error
