"""A folder of text files as documents."""

from __future__ import annotations

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
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise InvalidDocument(f"{folder} {what}; give a folder with {' or '.join(SUFFIXES)} files")
    paths = sorted(
        (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")),
        key=lambda path: path.name,
    )
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise InvalidDocument(
            f"{folder} has no {' or '.join(SUFFIXES)} file; documents are such files, not in sub-folders"
        )
    if len(paths) > MAX_FILES:
        raise InvalidDocument(
            f"{folder} has {len(paths)} documents; at most {MAX_FILES} are read, use a smaller folder"
        )
    stems = [path.stem for path in paths]
    documents, total = [], 0
    for path in paths:
        text = _read_text(path)
        total += len(text)
        if total > MAX_FOLDER_BYTES:
            raise InvalidDocument(
                f"the documents of {folder} are longer than {MAX_FOLDER_BYTES:,} characters; use fewer"
            )
        documents.append({"id": path.stem if stems.count(path.stem) == 1 else path.name, "text": text})
    return documents


def bundled_documents() -> Path:
    """The folder of short documents that comes with the package, for the demo."""
    return Path(str(files("kvmosaic") / "bundled" / "documents"))


def _read_text(path: Path) -> str:
    num_bytes = path.stat().st_size
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
