"""Folders of text files, read as documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from kvmosaic.errors import InvalidDocument

SUFFIXES = (".txt", ".md")
MAX_FILES = 10_000
MAX_FILE_BYTES = 4 * 2**20
MAX_FOLDER_BYTES = 64 * 2**20


def read_folder(folder: Path) -> list[dict[str, str]]:
    """Reads the .txt and .md files of a folder, sorted by name, as `{"id", "text"}` documents.

    The id is the file's name without its ending, or the whole name where two files would share an id. Sub-folders and
    hidden files are left out.

    Raises:
        InvalidDocument: not a folder, no such file in it, too many or too large files, or a file that is not UTF-8.
    """
    paths = find_documents(folder)
    documents, total = [], 0
    for name, path in paths.items():
        text = read_document(path)
        total += len(text)
        if total > MAX_FOLDER_BYTES:
            raise InvalidDocument(
                f"the documents of {folder} are longer than {MAX_FOLDER_BYTES:,} characters; use fewer"
            )
        documents.append({"id": name, "text": text})
    return documents


def find_documents(folder: Path, pattern: str | None = None, most: int | None = None) -> dict[str, Path]:
    """Returns the document files of a folder, sorted by name, each under its id.

    Args:
        folder: where to look.
        pattern: which files, such as `**/*.md`; None: .txt and .md files that are not in sub-folders. Hidden ones are
            left out. The id of a file in a sub-folder has the sub-folder in it.
        most: maximum number; None: `MAX_FILES`.

    Raises:
        InvalidDocument: not a folder, a pattern that leads out of it, no such file, or too many.
    """
    most = MAX_FILES if most is None else most
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InvalidDocument(f"{folder} {what}; give a folder with {' or '.join(SUFFIXES)} files")
    paths = [path for path in _matching(folder, pattern) if path.is_file()]
    if not paths:
        what = f"file that matches {pattern!r:.100}" if pattern else f"{' or '.join(SUFFIXES)} file"
        way_out = "" if pattern else "; documents are such files, not in sub-folders"
        raise InvalidDocument(f"{folder} has no {what}{way_out}")
    if len(paths) > most:
        raise InvalidDocument(f"{folder} has {len(paths)} documents; at most {most} are read, use a smaller folder")
    names = {path: path.relative_to(folder).as_posix() for path in sorted(paths, key=lambda path: path.as_posix())}
    stems = Counter(name.removesuffix(path.suffix) for path, name in names.items())
    return {stem if stems[stem := name.removesuffix(path.suffix)] == 1 else name: path for path, name in names.items()}


def bundled_documents() -> Path:
    """Yields the path of the bundled folder of short documents, for the demo."""
    return Path(str(files("kvmosaic") / "bundled" / "documents"))


def read_document(path: Path) -> str:
    """The text of a document.

    Raises:
        InvalidDocument: too large, not UTF-8, empty, or it cannot be read.
    """
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise InvalidDocument(f"{path} cannot be read: {error.strerror}") from error
    if num_bytes > MAX_FILE_BYTES:
        raise InvalidDocument(f"{path} has {num_bytes:,} bytes; a document may have {MAX_FILE_BYTES:,}, split it")
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
    except OSError as error:
        raise InvalidDocument(f"{path} cannot be read: {error.strerror}") from error
    if not text:
        raise InvalidDocument(f"{path} is empty; remove it or write something into it")
    return text


def _matching(folder: Path, pattern: str | None) -> Iterator[Path]:
    if pattern is None:
        found = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
    else:
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
