"""A server's documents over HTTP: upload in batches, list, read, delete; and on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import typer
from rich.console import Console
from rich.table import Table

from kvmosaic.console.server_call import fields_of_server, no_kvmosaic
from kvmosaic.console.text import printable, shrinking, size_text

ROUTE = "/v1/documents"
BATCH_BYTES = 2**22
BATCH_DOCUMENTS = 500
PAGE = 500
MAX_REPLY_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class NamedLine:
    """One document as a line of JSON, and its name for reports."""

    name: str
    line: bytes

    @classmethod
    def of(cls, name: str, fields: Mapping[str, Any]) -> NamedLine:
        """Makes the line of a document's fields."""
        return cls(name, json.dumps(fields, ensure_ascii=False).encode())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a document: stored, replaced, or refused with a reason."""

    name: str
    status: str
    reason: str = ""


class ServerDocuments:
    """The documents of one server, for one key.

    Every method raises InvalidConfig for an address or key that cannot be one, and ServerError if the server cannot be
    asked or refuses.
    """

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout`: longest wait for a reply, in seconds."""
        self.url = url
        self._timeout = timeout

    def upload(self, lines: Iterable[NamedLine]) -> Iterator[Outcome]:
        """Sends documents in batches; yields what became of each. Nothing is sent that is not asked for."""
        batch, num_bytes = list[NamedLine](), 0
        for line in lines:
            if batch and (num_bytes + len(line.line) > BATCH_BYTES or len(batch) == BATCH_DOCUMENTS):
                yield from self._send(batch)
                batch, num_bytes = [], 0
            batch.append(line)
            num_bytes += len(line.line) + 1
        if batch:
            yield from self._send(batch)

    def listed(self, *, search: str = "", limit: int | None = None) -> Iterator[dict[str, Any]]:
        """Yields documents without their texts, the newest first.

        Args:
            search: part of their ids or titles.
            limit: maximum number; None: all.
        """
        num_left, after = limit, None
        while num_left is None or num_left > 0:
            query = {"limit": PAGE if num_left is None else min(PAGE, num_left), "search": search[:256]}
            page = self._ask("GET", f"?{urlencode(query if after is None else {**query, 'after': after})}")
            found = page.get("data")
            if not isinstance(found, list) or not all(isinstance(each, dict) and _id_of(each) for each in found):
                raise no_kvmosaic(self.url)
            yield from found
            after = page.get("next_after")
            if not after or not found:
                return
            num_left = None if num_left is None else num_left - len(found)

    def read(self, document_id: str, version: int | None = None) -> dict[str, Any]:
        """Returns a document with its text."""
        document = self._ask("GET", _path(document_id) + ("" if version is None else f"?version={version}"))
        if not isinstance(document.get("text"), str):
            raise no_kvmosaic(self.url)
        return document

    def delete(self, document_id: str) -> None:
        """Deletes a document."""
        if self._ask("DELETE", _path(document_id)).get("deleted") is not True:
            raise no_kvmosaic(self.url)

    def _send(self, batch: list[NamedLine]) -> Iterator[Outcome]:
        body = b"\n".join(line.line for line in batch)
        reply = fields_of_server(
            self.url, f"{ROUTE}:batch", self._timeout, method="POST", lines=body, max_bytes=MAX_REPLY_BYTES
        )
        results = reply.get("data")
        if not isinstance(results, list) or len(results) != len(batch):
            raise no_kvmosaic(self.url)
        for sent, result in zip(batch, results, strict=True):
            error = result.get("error") or {}
            yield Outcome(sent.name, str(result.get("status")), str(error.get("message", "")))

    def _ask(self, method: Any, path: str) -> dict[str, Any]:
        return fields_of_server(self.url, ROUTE + path, self._timeout, method=method, max_bytes=MAX_REPLY_BYTES)


def _path(document_id: str) -> str:
    return "/" + quote(document_id, safe="")


def _id_of(document: Mapping[str, Any]) -> bool:
    return isinstance(document.get("id"), str) and isinstance(document.get("metadata"), dict)


def show_list(documents: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Prints documents as a table, or one JSON object per line."""
    if as_json:
        for each in documents:
            typer.echo(json.dumps(each, ensure_ascii=False))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("id", no_wrap=True, overflow="ellipsis", ratio=3)
    table.add_column("title", no_wrap=True, overflow="ellipsis", ratio=2)
    for name in ("version", "size", "hits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("changed", no_wrap=True)
    for each in documents:
        table.add_row(
            shrinking(str(each["id"]) + (" (pinned)" if each.get("pinned") else "")),
            shrinking(str(each.get("title") or "")),
            str(each.get("version", "")),
            size_text(int(each.get("bytes", 0))),
            f"{int(each.get('hits', 0)):,}",
            _time_of(each.get("updated_at")),
        )
    if table.row_count:
        Console().print(table)
    else:
        typer.echo("no documents")


def show_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Prints the text of a document, or all of it as JSON."""
    typer.echo(json.dumps(document, ensure_ascii=False) if as_json else printable(str(document["text"])))


def _time_of(seconds: object) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}" if isinstance(seconds, int) else "–"
