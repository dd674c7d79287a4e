"""Text of files: PDF, HTML, Markdown, DOCX and plain text, with marks of pages and headings.

PDF, HTML and DOCX are read by libraries of the extra `files`, in a process of its own with limits on memory and time:
a file that is made to exhaust them harms nothing else.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import PurePath
from tempfile import TemporaryFile
from typing import NamedTuple

from kvmosaic.errors import InvalidDocument, MissingExtra, pip_install

TEXT_SUFFIXES = (".txt", ".md", ".markdown")
LIBRARIES: dict[str, tuple[str, ...]] = {
    ".pdf": ("pypdfium2",),
    ".html": ("markdownify",),
    ".htm": ("markdownify",),
    ".docx": ("mammoth", "markdownify"),
}
"""Modules that read files with these suffixes."""
SUFFIXES = (*TEXT_SUFFIXES, *LIBRARIES)
REFUSED = 3
"""Exit code of the worker: the reason is on standard output."""
REFUSED_LIMITS = 4
"""Exit code of the worker: too much memory or time."""
WALL_SECONDS = 120.0
"""Timeout for one file, which may wait for other work of the machine."""


class FileText(NamedTuple):
    """What a file says; the title is that of a web page."""

    text: str
    title: str = ""


def is_readable(filename: str) -> bool:
    """Whether files with this suffix are read."""
    return suffix_of(filename) in SUFFIXES


def suffix_of(filename: str) -> str:
    """Returns the suffix of a file's name, in lower case."""
    return PurePath(filename).suffix.lower()


def extract_text(content: bytes, filename: str) -> FileText:
    """Returns text and title of a file; its suffix says what it is, and a file without a known one must be UTF-8.

    Pages of a PDF begin with a line such as `[page 3]`; headings of HTML and DOCX are those of Markdown.

    Args:
        content: the whole file.
        filename: its name, for the suffix and for errors.

    Raises:
        InvalidDocument: it cannot be read, has no text, or needs too much memory or time.
        MissingExtra: it needs a library that is not installed.
    """
    suffix = suffix_of(filename)
    if suffix in LIBRARIES:
        missing = [name for name in LIBRARIES[suffix] if find_spec(name) is None]
        if missing:
            raise MissingExtra(
                f"{filename!r:.300} cannot be read, {' and '.join(missing)} must be installed first; "
                f"{pip_install('files')}, or send its text"
            )
        title, _, text = _extracted(content, suffix, filename).partition("\n")
    else:
        title, text = "", _decoded(content, filename)
    if not text.strip():
        why = "; a scanned PDF needs text recognition (OCR) first" if suffix == ".pdf" else ""
        raise InvalidDocument(f"{filename!r:.300} has no text{why}")
    return FileText(text, title)


def _decoded(content: bytes, filename: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidDocument(
            f"{filename!r:.300} is not UTF-8 text (byte {error.start}); files that are read: {', '.join(SUFFIXES)}"
        ) from None
    if "\0" in text:
        raise InvalidDocument(f"{filename!r:.300} holds a NUL character; remove it, or send a text file")
    return text


def _extracted(content: bytes, suffix: str, filename: str) -> str:
    """Runs the worker on one file: a line with its title, and its text, bounded by the limits of the worker."""
    with TemporaryFile() as source, TemporaryFile() as target:
        source.write(content)
        source.seek(0)
        command = (sys.executable, "-P", "-m", "kvmosaic.extraction.worker", suffix)
        try:
            code = subprocess.run(  # noqa: S603 - our own module, with one of four suffixes
                command, stdin=source, stdout=target, stderr=subprocess.DEVNULL, timeout=WALL_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = REFUSED_LIMITS
        target.seek(0)
        text = target.read().decode("utf-8", "replace")
    if code == 0:
        return text
    if code == REFUSED:
        raise InvalidDocument(f"{filename!r:.300} cannot be read: {text:.300}")
    raise InvalidDocument(
        f"{filename!r:.300} needs more memory or time than one file may (1 GiB, 30 s); split it, or send its text"
    )
