"""Commands of `kvmosaic documents`: add, list, show, delete and synchronize the documents of a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvmosaic.console.options import AsFields, Timeout

documents = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="The documents that a running server stores: add, list, show, delete them, or keep a folder in step. The key, "
    "if the server has keys, is read from KVMOSAIC_API_KEY.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
Server = Annotated[
    str, typer.Option("--server", "--url", metavar="URL", help="Where it is, with its --root-path if it has one.")
]
Ids = Annotated[list[str], typer.Argument(metavar="ID", help="Ids of documents.")]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder; its sub-folders are read, too.")]
Glob = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Which files, such as '**/*.md'. Default: all that can be read."),
]
Prefix = Annotated[str, typer.Option(metavar="TEXT", help="Beginning of the ids; the rest is the file's path.")]
Delete = Annotated[
    bool, typer.Option("--delete", help="Delete documents whose files are gone; others that came from no file stay.")
]
Pin = Annotated[bool, typer.Option("--pin", help="Keep them in the cache once they are computed.")]
Ttl = Annotated[
    int | None, typer.Option("--ttl", min=1, max=31_536_000, help="Lifetime in seconds. Default: the server's.")
]
Warm = Annotated[bool, typer.Option("--warm", help="Compute them, too, so that the first question is fast.")]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="System text of the later requests, for which they are computed.")
]
LOCAL = "http://127.0.0.1:8000"


@documents.command()
def add(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Texts, Markdown, HTML, PDF, DOCX; .jsonl or -: one document per line."),
    ],
    document_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="Id of the only file. Default: its name.")
    ] = None,
    pin: Pin = False,
    ttl: Ttl = None,
    as_json: AsFields = False,
    server: Server = LOCAL,
    timeout: Timeout = 600.0,
) -> None:
    """Store files, or lines of JSON, without computing them. Exit code 1 if some are refused.

    kvmosaic documents add notes.md report.pdf

    kvmosaic documents add documents.jsonl
    """
    from kvmosaic.console.documents.client import ServerDocuments
    from kvmosaic.console.documents.sync import FileFields, add_files

    counts = add_files(ServerDocuments(server, timeout), files, document_id, FileFields(pin, ttl))
    counts.show(as_json)
    raise typer.Exit(counts.exit_code)


@documents.command("ls")
def list_documents(
    search: Annotated[str, typer.Option(metavar="TEXT", help="Part of the id or title.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Most documents that are shown; 0 shows all.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: one object per line and document.")] = False,
    server: Server = LOCAL,
    timeout: Timeout = 60.0,
) -> None:
    """List documents, the newest first."""
    from kvmosaic.console.documents.client import ServerDocuments, show_list

    show_list(ServerDocuments(server, timeout).listed(search=search, limit=limit or None), as_json)


@documents.command()
def show(
    document_id: Annotated[str, typer.Argument(metavar="ID", help="Id of a document.")],
    version: Annotated[int | None, typer.Option(min=1, max=2**31, help="An earlier text.")] = None,
    as_json: AsFields = False,
    server: Server = LOCAL,
    timeout: Timeout = 60.0,
) -> None:
    """Print the text of a document; --json prints all of it."""
    from kvmosaic.console.documents.client import ServerDocuments, show_document

    show_document(ServerDocuments(server, timeout).read(document_id, version), as_json)


@documents.command("rm")
def remove(ids: Ids, server: Server = LOCAL, timeout: Timeout = 60.0) -> None:
    """Delete documents, and what was computed from them. Exit code 1 if some are not there."""
    from kvmosaic.console.documents.client import ServerDocuments
    from kvmosaic.errors import UnknownDocument

    client, missing = ServerDocuments(server, timeout), 0
    for document_id in ids:
        try:
            client.delete(document_id)
        except UnknownDocument as error:
            missing += 1
            typer.echo(f"kvmosaic: {error}", err=True)
    typer.echo(f"{len(ids) - missing:,} deleted")
    raise typer.Exit(int(missing > 0))


@documents.command()
def warm(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of documents. Default: all.")] = None,
    system: System = None,
    as_json: AsFields = False,
    server: Server = LOCAL,
    timeout: Timeout = 600.0,
) -> None:
    """Compute stored documents now, so that the first question about them is fast. Exit code 1 if some are not there.

    Requests of others go first. Run it again after an interruption: what is computed stays.
    """
    from kvmosaic.console.documents.client import ServerDocuments
    from kvmosaic.console.documents.sync import warm_documents

    client = ServerDocuments(server, timeout)
    counts = warm_documents(client, ids or [each["id"] for each in client.listed()], system)
    counts.show(as_json)
    raise typer.Exit(counts.exit_code)


@documents.command()
def sync(
    folder: Folder,
    prefix: Prefix = "",
    glob: Glob = None,
    delete: Delete = False,
    pin: Pin = False,
    ttl: Ttl = None,
    warm: Warm = False,
    system: System = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on whenever a file has changed, until Ctrl-C.")] = False,
    as_json: AsFields = False,
    server: Server = LOCAL,
    timeout: Timeout = 600.0,
) -> None:
    """Make documents equal to a folder: new files are added, changed ones replaced. Run it again after an interruption.

    kvmosaic documents sync handbook --prefix handbook/ --delete
    """
    from kvmosaic.console.documents.client import ServerDocuments
    from kvmosaic.console.documents.sync import FileFields, FolderSync, sync_folder, watch_folder
    from kvmosaic.errors import InvalidConfig

    if system is not None and not warm:
        raise InvalidConfig("--system is that of the requests that --warm computes for; give --warm, too")
    client, fields = ServerDocuments(server, timeout), FileFields(pin, ttl)
    wanted = FolderSync(folder, glob, prefix, delete, fields, warm, system)
    if watch:
        watch_folder(client, wanted, as_json)
        return
    counts = sync_folder(client, wanted)
    counts.show(as_json)
    raise typer.Exit(counts.exit_code)
