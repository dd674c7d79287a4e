"""Folders of files, read as documents: texts, Markdown, HTML, PDF and DOCX, also those in sub-folders."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
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


def read_folder(folder: Path) -> list[dict[str, str]]:
    """Reads the files of a folder, sorted by name, as `{"id", "text"}` documents; see `find_documents`.

    A file that cannot be read is left out, with a warning, if there is another one. So are files of other kinds.

    Raises:
        InvalidDocument: not a folder, no file that can be read, too many, or too long together.
    """
    documents, refused, total = [], list[str](), 0
    for name, path in find_documents(folder).items():
        try:
            text = read_document(path)
        except (InvalidDocument, MissingExtra) as error:
            refused.append(str(error))
            continue
        total += len(text)
        if total > MAX_FOLDER_BYTES:
            raise InvalidDocument(
                f"the documents of {folder} are longer than {MAX_FOLDER_BYTES:,} characters; use fewer"
            )
        documents.append({"id": name, "text": text})
    if not documents:
        raise InvalidDocument(refused[0])
    for told in (*refused, *skipped_kinds(count_skipped(folder))):
        logger.warning("left out: %s", told)
    return documents


def find_documents(folder: Path, pattern: str | None = None, most: int | None = None) -> dict[str, Path]:
    """Returns the document files of a folder, sorted by name, each under its id.

    The id is the path in the folder without its suffix, or with it where two files would share an id.

    Args:
        folder: where to look.
        pattern: which files, such as `**/*.md`; None: all that can be read. Hidden ones are left out.
        most: maximum number; None: `MAX_FILES`.

    Raises:
        InvalidDocument: not a folder, a pattern that leads out of it, no such file, or too many.
    """
    most = MAX_FILES if most is None else most
    if not folder.is_dir():
        raise InvalidDocument(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}; give a folder")
    found = (path for path in _matching(folder, pattern or "**/*") if path.is_file())
    paths = [path for path in found if pattern or is_readable(path.name)]
    if not paths:
        what = f"that matches {pattern!r:.100}" if pattern else f"that can be read; suffixes: {', '.join(SUFFIXES)}"
        raise InvalidDocument(f"{folder} has no file {what}")
    if len(paths) > most:
        raise InvalidDocument(f"{folder} has {len(paths)} documents; at most {most} are read, use a smaller folder")
    names = {path: path.relative_to(folder).as_posix() for path in sorted(paths, key=lambda path: path.as_posix())}
    stems = Counter(name.removesuffix(path.suffix) for path, name in names.items())
    return {stem if stems[stem := name.removesuffix(path.suffix)] == 1 else name: path for path, name in names.items()}


def count_skipped(folder: Path) -> Counter[str]:
    """Counts the files of a folder that are not read, by suffix; hidden ones are not counted."""
    names = (path.name for path in _matching(folder, "**/*") if path.is_file())
    return Counter(suffix_of(name) or "without a suffix" for name in names if not is_readable(name))


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


def read_document(path: Path) -> str:
    """The text of a document.

    Raises:
        InvalidDocument: too large, empty, of another format, or it cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    return extract_text(read_file(path), path.name).text.strip()


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
