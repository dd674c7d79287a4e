"""Uploads with a progress bar: files, a folder that documents of a server are made equal to, a watched folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from kvmosaic.console.documents.client import NamedLine, Outcome, ServerDocuments
from kvmosaic.console.folder import MAX_FILE_BYTES, FolderFiles, document_of, find_files, read_file, skipped_kinds
from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidConfig, InvalidDocument, KVMosaicError, MissingExtra, ServerError, UnknownDocument
from kvmosaic.server.process.logs import progress_bar

if TYPE_CHECKING:
    from kvmosaic.server.documents.served import ServerDocuments as ServedDocuments
    from kvmosaic.server.services import Services

T = TypeVar("T")
MAX_FILES = 1_000_000
HASH = "sha256"
"""Key in the metadata of a document that came from a file: the hash of that file."""
FOLDER = "folder"
"""Key in the metadata: the name of the folder that the file was synchronized from."""


@dataclass(frozen=True, slots=True)
class FileFields:
    """Fields that all uploaded files get."""

    pinned: bool = False
    ttl_seconds: int | None = None

    def values(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        pinned = {"pinned": True} if self.pinned else {}
        return pinned if self.ttl_seconds is None else {**pinned, "ttl_seconds": self.ttl_seconds}


def is_gone(path: Path) -> bool:
    """Whether there is no such file; a folder that cannot be read now does not say that."""
    try:
        path.lstat()
    except (OSError, ValueError) as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def line_of(name: str, content: bytes, fields: Mapping[str, Any]) -> NamedLine:
    """Returns the document of a file with its hash; `fields` come before these.

    Raises:
        InvalidDocument: it has no text, or cannot be read.
        MissingExtra: it needs a library that is not installed.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidDocument("its name is not UTF-8; rename it") from None
    about = {HASH: hashlib.sha256(content).hexdigest(), **dict(fields.get("metadata", {}))}
    values = {**document_of(name, content), **fields, "metadata": about}
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


INTERRUPTED = 130
"""Exit code after Ctrl-C."""
MAX_REFUSED_LINES = 50
WATCH_SECONDS = 2.0
"""Between two looks at a watched folder."""

COUNTED = ("stored", "replaced", "unchanged", "deleted", "computed", "cached")


@dataclass(slots=True)
class UploadCounts:
    """What became of documents."""

    stored: int = 0
    replaced: int = 0
    unchanged: int = 0
    deleted: int = 0
    computed: int = 0
    cached: int = 0
    """Found computed when they were to be warmed."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Files of a folder that are no documents, by suffix."""
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

    def include(self, other: UploadCounts) -> None:
        """Adds the counts of another upload."""
        for name in COUNTED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.skipped = dict(Counter(self.skipped) + Counter(other.skipped))
        self.refused |= other.refused
        self.is_interrupted |= other.is_interrupted

    @property
    def exit_code(self) -> int:
        """0; 1 if something was refused; 130 if it was interrupted."""
        return INTERRUPTED if self.is_interrupted else int(bool(self.refused))

    def show(self, as_json: bool) -> None:
        """Prints the counts, and what was refused to standard error."""
        if as_json:
            typer.echo(json.dumps(asdict(self), ensure_ascii=False))
            return
        self.show_refused()
        typer.echo(str(self))

    def show_refused(self) -> None:
        """Prints what was refused and what was skipped to standard error: each reason once."""
        for told in skipped_kinds(self.skipped):
            typer.echo(f"skipped: {told}; for texts of other kinds: kvmosaic documents add FILE", err=True)
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            by_reason.setdefault(reason.replace(repr(name), "it"), []).append(name)
        for reason, names in list(by_reason.items())[:MAX_REFUSED_LINES]:
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            typer.echo(f"refused: {one_line(names[0], 400)}{more}: {one_line(reason, 400)}", err=True)

    def __str__(self) -> str:
        numbers = {name: getattr(self, name) for name in COUNTED}
        numbers["refused"], numbers["skipped"] = len(self.refused), sum(self.skipped.values())
        told = [f"{number:,} {name}" for name, number in numbers.items() if number] or ["nothing to do"]
        return ", ".join(told) + (" (interrupted; the same command goes on)" if self.is_interrupted else "")


@dataclass(frozen=True, slots=True)
class FolderSync:
    """A folder, and the documents of a server that it is to be equal to."""

    folder: Path
    pattern: str | None = None
    prefix: str = ""
    """Beginning of the ids; the rest is the path in the folder."""
    delete: bool = False
    """Whether documents are deleted whose files are gone, as far as they came from files of a folder of this name."""
    fields: FileFields = field(default_factory=FileFields)
    warm: bool = False
    """Whether they are computed, too."""
    system: str | None = None
    """System text of the requests that they are computed for."""

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

    with progress_bar(Console(stderr=True)) as bar:
        total = None if any(path.suffix == ".jsonl" for path in given) else len(given)
        bar.add_task("uploading", total=total)
        _upload(server, lines(), counts, bar)
    return counts


def sync_folder(server: ServerDocuments, sync: FolderSync) -> UploadCounts:
    """Makes documents of a server equal to a folder: adds new files, replaces changed ones, deletes those gone.

    What has not changed is not sent: the server remembers the hash of each file. So the same call goes on where an
    interrupted one ended.

    Raises:
        KVMosaicError: the folder cannot be read, or the server cannot be asked.
    """
    found, known = find_files(sync.folder, sync.pattern, MAX_FILES), _known_files(server, sync.prefix)
    emptied = {name: path for name, path in found.empty.items() if sync.prefix + name in known}  # their text would stay
    files = {sync.prefix + name: path for name, path in (found.readable | emptied).items()}
    counts = UploadCounts(skipped=found.skipped)
    folder = sync.folder.resolve().name
    fields = {**sync.fields.values(), "metadata": {FOLDER: folder}}

    def lines() -> Iterator[NamedLine]:
        for name, path in files.items():
            if line := _file_line(counts, path, name, fields, known.get(name, {}).get(HASH)):
                yield line

    with progress_bar(Console(stderr=True)) as bar:
        bar.add_task("uploading", total=len(files))
        _upload(server, lines(), counts, bar)
        others = [name for name in known.keys() - files.keys() if known[name].get(FOLDER, folder) == folder]
        for name in sync.gone(others) if sync.delete else ():
            if counts.is_interrupted:
                break
            server.delete(name)
            counts.deleted += 1
    if sync.warm and not counts.is_interrupted:
        counts.include(warm_documents(server, [name for name in files if name not in counts.refused], sync.system))
    return counts


def warm_documents(server: ServerDocuments, ids: Sequence[str], system: str | None) -> UploadCounts:
    """Computes documents one by one. What is cached costs nothing: the same call goes on after an interruption.

    Raises:
        KVMosaicError: the server cannot be asked.
    """
    counts, notices = UploadCounts(), Console(stderr=True)
    if not notices.is_terminal:
        typer.echo(f"computing {len(ids):,} of the documents, unless they are cached", err=True)
    with progress_bar(notices) as bar:
        task = bar.add_task("computing", total=len(ids))
        try:
            for document_id in ids:
                try:
                    is_new = server.warm(document_id, system)
                except UnknownDocument:
                    counts.refused[document_id] = "it is not stored"
                else:
                    counts.computed += is_new
                    counts.cached += not is_new
                bar.advance(task)
        except KeyboardInterrupt:
            counts.is_interrupted = True
    return counts


def watch_folder(server: ServerDocuments, sync: FolderSync, as_json: bool) -> None:
    """Synchronizes a folder whenever it has changed, until Ctrl-C; a server that is away is asked again.

    A file that is still being written is sent once it has not changed between two looks.
    """
    synced = last = told = None
    with suppress(KeyboardInterrupt):
        while True:
            try:
                now = _signature(find_files(sync.folder, sync.pattern, MAX_FILES))
                if now != synced and now == last:
                    counts = sync_folder(server, sync)
                    counts.show(as_json)
                    if counts.is_interrupted:
                        return
                    synced = now
                last, told = now, None
            except (ServerError, InvalidDocument) as error:
                if told != (told := f"kvmosaic: {one_line(str(error), 400)}; trying again"):  # not every two seconds
                    typer.echo(told, err=True)
            time.sleep(WATCH_SECONDS)


def _signature(found: FolderFiles) -> dict[str, tuple[int, int]]:
    """Times and sizes of all files, which change whenever one of them does."""
    signature = {}
    for name, path in (found.readable | found.empty).items():
        with suppress(OSError):  # deleted since it was listed
            status = path.stat()
            signature[name] = (status.st_mtime_ns, status.st_size)
    return signature


def _known_files(server: ServerDocuments, prefix: str) -> dict[str, dict[str, str]]:
    """What the server knows of the files that it has, by id."""
    documents = server.listed(search=prefix)
    return {
        each["id"]: each["metadata"] for each in documents if each["id"].startswith(prefix) and HASH in each["metadata"]
    }


def _file_line(
    counts: UploadCounts, path: Path, name: str, fields: Mapping[str, object], known: str | None = None
) -> NamedLine | None:
    """The line to send for a file; None: it has not changed, or is refused."""
    try:
        content = read_file(path)
        if known is not None and hashlib.sha256(content).hexdigest() == known:
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


class LocalDocuments(ServerDocuments):
    """The documents of this process's server, called from a thread beside its event loop."""

    def __init__(self, served: ServedDocuments, loop: asyncio.AbstractEventLoop) -> None:
        self._served = served
        self._loop = loop

    def listed(self, *, search: str = "", limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields id and metadata of all documents."""
        for each in self._served.store.documents(self._served.tenant):
            yield {"id": each.id, "metadata": each.metadata}

    def delete(self, document_id: str) -> None:
        """Deletes a document."""
        self._run(self._served.drop_deleted(self._served.store.delete(self._served.tenant, document_id)))

    def _send(self, batch: list[NamedLine]) -> Iterator[Outcome]:
        async def lines() -> AsyncIterator[bytes]:
            for each in batch:
                yield each.line + b"\n"

        from kvmosaic.web.uploads import Upload

        run = Upload(self._served)
        self._run(run.add_lines(lines()))
        for sent, result in zip(batch, run.summary.data, strict=True):
            yield Outcome(sent.name, result.status, result.error.message if result.error else "")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def add_documents(services: Services, names: Sequence[str]) -> str:
    """Stores files, and the files of folders, unless they are stored as they are now; returns what became of them.

    Where these documents have a place of their own, those whose files are gone are deleted.
    """
    from kvmosaic.server.documents.served import ServerDocuments as ServedDocuments  # imports torch
    from kvmosaic.server.model_loader import in_daemon_thread

    (tenant,) = services.tenants
    documents = LocalDocuments(ServedDocuments(services, tenant, "start"), asyncio.get_running_loop())
    paths, delete = [Path(name) for name in names], services.settings.has_own_documents
    counts = await in_daemon_thread(lambda: _added(documents, paths, delete))
    counts.show_refused()
    return str(counts)


def _added(documents: LocalDocuments, paths: Sequence[Path], delete: bool) -> UploadCounts:
    counts = UploadCounts()
    for path in paths:
        if path.is_dir():
            prefix = f"{path.resolve().name}/" if len(paths) > 1 else ""
            counts.include(sync_folder(documents, FolderSync(path, prefix=prefix, delete=delete)))
    if files := [path for path in paths if not path.is_dir()]:
        counts.include(add_files(documents, files, None, FileFields()))
    return counts
