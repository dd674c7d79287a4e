"""Uploads with a progress bar: files, a folder that documents of a server are made equal to, a watched folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.console.documents.client import NamedLine, Outcome, ServerDocuments
from kvmosaic.console.documents.files import (
    HASH,
    FileFields,
    files_of,
    hash_of,
    is_gone,
    json_lines,
    line_of,
    read_file,
)
from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidConfig, InvalidDocument, KVMosaicError, MissingExtra, ServerError

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
MAX_REFUSED_LINES = 50
WATCH_SECONDS = 2.0
"""Between two looks at a watched folder."""


@dataclass(slots=True)
class UploadCounts:
    """Counts of one upload."""

    stored: int = 0
    replaced: int = 0
    unchanged: int = 0
    deleted: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons by name."""
    is_interrupted: bool = False

    def add(self, outcome: Outcome) -> None:
        """Counts what became of one document."""
        if outcome.status == "stored":
            self.stored += 1
        elif outcome.status == "replaced":
            self.replaced += 1
        else:
            self.refused[outcome.name] = outcome.reason

    @property
    def exit_code(self) -> int:
        """0; 1 if something was refused; 130 if it was interrupted."""
        return INTERRUPTED if self.is_interrupted else int(bool(self.refused))

    def show(self, as_json: bool) -> None:
        """Prints the counts, and what was refused to standard error."""
        if as_json:
            typer.echo(json.dumps(asdict(self), ensure_ascii=False))
            return
        for name, reason in list(self.refused.items())[:MAX_REFUSED_LINES]:
            typer.echo(f"refused: {one_line(name, 400)}: {one_line(reason, 400)}", err=True)
        numbers = {name: getattr(self, name) for name in ("stored", "replaced", "unchanged", "deleted")}
        told = [f"{number:,} {name}" for name, number in numbers.items() if number or name == "stored"]
        told += [f"{len(self.refused):,} refused"] if self.refused else []
        typer.echo(", ".join(told) + (" (interrupted; the same command goes on)" if self.is_interrupted else ""))


@dataclass(frozen=True, slots=True)
class FolderSync:
    """A folder, and the documents of a server that it is to be equal to."""

    folder: Path
    pattern: str | None = None
    prefix: str = ""
    """Beginning of the ids; the rest is the path in the folder."""
    delete: bool = False
    """Whether documents are deleted whose files are gone, as far as they came from files."""
    fields: FileFields = field(default_factory=FileFields)

    def gone(self, document_ids: Iterable[str]) -> list[str]:
        """Those of these documents whose files are gone; a file that the pattern leaves out is still there."""
        paths = ((each, self.folder / each.removeprefix(self.prefix).lstrip("/")) for each in document_ids)
        return sorted(each for each, path in paths if is_gone(path))


def add_files(
    server: ServerDocuments, paths: Iterable[Path], document_id: str | None, fields: FileFields
) -> UploadCounts:
    """Uploads files, each under its name, and lines of JSON as they are.

    Args:
        server: where to.
        paths: files; a .jsonl file has one document per line; "-": lines of standard input.
        document_id: id of the only file, in place of its name.
        fields: of all files, but not of lines.

    Raises:
        KVMosaicError: the server cannot be asked, or an id is given for several files.
    """
    given, counts = list(paths), UploadCounts()
    if document_id is not None and len(given) != 1:
        raise InvalidConfig(f"--id names one document, and {len(given)} files are given; leave it out")

    def lines() -> Iterator[NamedLine]:
        for path in given:
            if document_id is None and (str(path) == "-" or path.suffix.lower() in (".jsonl", ".ndjson")):
                yield from json_lines(None if str(path) == "-" else path)
                continue
            if line := _file_line(counts, path, path.name, {"id": document_id or path.name, **fields.values()}):
                yield line

    with _bar("uploading", None if any(path.suffix == ".jsonl" for path in given) else len(given)) as bar:
        _upload(server, lines(), counts, bar)
    return counts


def sync_folder(server: ServerDocuments, sync: FolderSync) -> UploadCounts:
    """Makes documents of a server equal to a folder: adds new files, replaces changed ones, deletes those gone.

    What has not changed is not sent: the server remembers the hash of each file. So the same call goes on where an
    interrupted one ended.

    Raises:
        KVMosaicError: the folder cannot be read, or the server cannot be asked.
    """
    counts = UploadCounts()
    files = {sync.prefix + name: path for name, path in files_of(sync.folder, sync.pattern).items()}
    known = _known_hashes(server, sync.prefix)

    def lines() -> Iterator[NamedLine]:
        for name, path in files.items():
            if line := _file_line(counts, path, name, sync.fields.values(), known.get(name)):
                yield line

    with _bar("uploading", len(files)) as bar:
        _upload(server, lines(), counts, bar)
        for name in sync.gone(known.keys() - files.keys()) if sync.delete else ():
            if counts.is_interrupted:
                break
            server.delete(name)
            counts.deleted += 1
    return counts


def watch_folder(server: ServerDocuments, sync: FolderSync, as_json: bool) -> None:
    """Synchronizes a folder whenever it has changed, until Ctrl-C; a server that is away is asked again.

    A file that is still being written is sent once it has not changed between two looks.
    """
    synced = last = None
    with suppress(KeyboardInterrupt):
        while True:
            try:
                now = _signature(sync)
                if now != synced and now == last:
                    counts = sync_folder(server, sync)
                    counts.show(as_json)
                    if counts.is_interrupted:
                        return
                    synced = now
                last = now
            except (ServerError, InvalidDocument) as error:
                typer.echo(f"kvmosaic: {one_line(str(error), 400)}; trying again", err=True)
            time.sleep(WATCH_SECONDS)


def _signature(sync: FolderSync) -> dict[str, tuple[int, int]]:
    """Times and sizes of all files, which change whenever one of them does."""
    found = {}
    for name, path in files_of(sync.folder, sync.pattern).items():
        try:
            status = path.stat()
        except OSError:  # deleted since it was listed
            continue
        found[name] = (status.st_mtime_ns, status.st_size)
    return found


def _known_hashes(server: ServerDocuments, prefix: str) -> dict[str, str]:
    """Hashes of the files that the server has, by id."""
    documents = server.listed(search=prefix)
    return {
        each["id"]: each["metadata"][HASH]
        for each in documents
        if each["id"].startswith(prefix) and HASH in each["metadata"]
    }


def _file_line(
    counts: UploadCounts, path: Path, name: str, fields: Mapping[str, object], known: str | None = None
) -> NamedLine | None:
    """The line to send for a file; None: it has not changed, or is refused."""
    try:
        content = read_file(path)
        if known is not None and hash_of(content) == known:
            counts.unchanged += 1
            return None
        return line_of(name, content, fields)
    except (InvalidDocument, MissingExtra) as error:
        counts.refused[_shown(name)] = _shown(str(error))
        return None


def _shown(text: str) -> str:
    """A text that may hold bytes of a file's name that are no characters, as it can be printed."""
    return text.encode("utf-8", "backslashreplace").decode()


def _upload(server: ServerDocuments, lines: Iterator[NamedLine], counts: UploadCounts, bar: Progress) -> None:
    """Sends lines and counts what became of them; Ctrl-C ends it between two batches, or leaves the last unknown."""
    try:
        for outcome in server.upload(lines):
            counts.add(outcome)
            bar.update(
                bar.task_ids[0], completed=counts.stored + counts.replaced + counts.unchanged + len(counts.refused)
            )
    except KeyboardInterrupt:
        counts.is_interrupted = True
    except KVMosaicError:
        if counts.stored or counts.replaced:
            bar.stop()
            counts.show(as_json=False)
        raise


def _bar(description: str, total: int | None) -> Progress:
    """A progress bar, drawn on terminals only."""
    notices = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)
    bar.add_task(description, total=total)
    return bar
