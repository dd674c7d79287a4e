"""Folders of files, read as documents: texts, Markdown, HTML, PDF and DOCX, also those in sub-folders."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidDocument, MissingExtra
from kvmosaic.extraction import SUFFIXES, extract_text, is_readable, suffix_of

MAX_FILES = 10_000
MAX_FILE_BYTES = 2**28
MAX_FOLDER_BYTES = 64 * 2**20
MAX_SUFFIXES = 8
logger = logging.getLogger("kvmosaic")


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """The files of a folder, by their paths in it, in that order."""

    readable: dict[str, Path]
    empty: dict[str, Path]
    """Without a byte: no documents."""
    skipped: dict[str, int]
    """How many are not read, by suffix, and how many are empty; hidden ones are not counted."""


def read_folder(folder: Path) -> list[dict[str, str]]:
    """Reads the files of a folder as documents; see `find_files` and `document_of`.

    A file that cannot be read is left out, with a warning, if there is another one. So are files of other kinds.

    Raises:
        InvalidDocument: not a folder, no file that can be read, too many, or too long together.
    """
    found = find_files(folder)
    documents, refused, total = [], list[str](), 0
    for name, path in found.readable.items():
        try:
            document = document_of(name, read_file(path))
        except (InvalidDocument, MissingExtra) as error:
            refused.append(str(error))
            continue
        total += len(document["text"])
        if total > MAX_FOLDER_BYTES:
            raise InvalidDocument(
                f"the documents of {folder} are longer than {MAX_FOLDER_BYTES:,} characters; use fewer"
            )
        documents.append(document)
    if not documents:
        raise InvalidDocument(refused[0] if refused else f"all documents of {folder} are empty")
    for told in (*refused, *skipped_kinds(found.skipped)):
        logger.warning("left out: %s", told)
    return documents


def find_files(folder: Path, pattern: str | None = None, most: int | None = None) -> FolderFiles:
    """The document files of a folder and its sub-folders.

    Args:
        folder: where to look.
        pattern: which files, such as `**/*.md`, all of which are read; None: all. Hidden ones are left out.
        most: maximum number; None: `MAX_FILES`.

    Raises:
        InvalidDocument: not a folder, a pattern that leads out of it, no such file, or too many.
    """
    most = MAX_FILES if most is None else most
    if not folder.is_dir():
        raise InvalidDocument(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; give a folder")
    readable, empty, skipped = dict[str, Path](), dict[str, Path](), Counter[str]()
    found = (path for path in _matching(folder, pattern or "**/*") if path.is_file())
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in found):
        num_bytes = 1
        with suppress(OSError):  # why it cannot be read is said where it is
            num_bytes = path.stat().st_size
        if not pattern and not is_readable(name):
            skipped[suffix_of(name) or "without a suffix"] += 1
        elif num_bytes:
            readable[name] = path
        else:
            empty[name] = path
            skipped["empty"] += 1
    if not readable and not empty:
        what = f"that matches {pattern!r:.100}" if pattern else f"that can be read; suffixes: {', '.join(SUFFIXES)}"
        raise InvalidDocument(f"{folder} has no file {what}")
    if len(readable) > most:
        raise InvalidDocument(f"{folder} has {len(readable)} documents; at most {most} are read, use a smaller folder")
    return FolderFiles(readable, empty, dict(skipped))


def document_of(name: str, content: bytes) -> dict[str, str]:
    """The document of a file: its name as id, its title or else the file's name, its text.

    Raises:
        InvalidDocument: it has no text, or cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    said = extract_text(content, name)
    return {"id": name, "title": said.title or Path(name).name, "text": said.text.strip()}


def skipped_kinds(skipped: Mapping[str, int]) -> list[str]:
    """A line about files that are not read, such as "3 .png, 1 .py; read are .txt"; none without such files."""
    told = ", ".join(f"{number:,} {suffix}" for suffix, number in Counter(skipped).most_common(MAX_SUFFIXES))
    return [f"{one_line(told, 400)}; read are {', '.join(SUFFIXES)}"] if skipped else []


def bundled_documents() -> Path:
    """Yields the path of the bundled folder of short documents, for the demo."""
    return Path(str(files("kvmosaic") / "bundled" / "documents"))


def read_file(path: Path) -> bytes:
    """The content of a file.

    Raises:
        InvalidDocument: it cannot be read, or is too large.
    """
    if path.is_dir():
        raise InvalidDocument(
            "it is a folder: upload the outermost one with kvmosaic documents sync, and --server as here"
        )
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_FILE_BYTES:
            raise InvalidDocument(f"it has {num_bytes:,} bytes; at most {MAX_FILE_BYTES:,} are read, split it")
        return path.read_bytes()
    except OSError as error:
        raise InvalidDocument(f"it cannot be read: {error.strerror}") from error


def _matching(folder: Path, pattern: str) -> Iterator[Path]:
    if not pattern.strip() or Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        raise InvalidDocument(f"the pattern {pattern!r:.100} leads out of the folder; write one such as '**/*.md'")
    try:
        found = list(folder.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise InvalidDocument(f"{pattern!r:.100} is no pattern of files: {error}") from error
    inside = folder.resolve()
    for path in found:  # a link must not lead out of the folder
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.resolve().is_relative_to(inside):
            yield path
