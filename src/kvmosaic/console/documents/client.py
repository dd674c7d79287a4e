"""A server's documents over HTTP: upload in batches, list, read, delete; and on a terminal."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ssl import SSLCertVerificationError
from typing import Any, Literal
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import one_line, printable, shrinking, size_text
from kvmosaic.errors import InvalidConfig, ServerError, UnknownDocument
from kvmosaic.prompt.document import MAX_ID_CHARACTERS
from kvmosaic.server.tenants import MAX_KEY_CHARACTERS

KEY_VARIABLE = "KVMOSAIC_API_KEY"
CONNECT_SECONDS = 10.0
"""Connection timeout: a reachable machine accepts at once, however busy its server is."""
MAX_URL_CHARACTERS = 2_048
MAX_MESSAGE_CHARACTERS = 400
_WIDE = 100
"""Characters of a terminal from which on the list of documents has room for times."""
_TITLE_WIDTH = 12
_USUAL = {"version": "1", "hits": "0"}
"""Columns that are left out where all documents have this."""

Method = Literal["GET", "POST", "PUT", "DELETE"]


def fields_of_server(
    url: str,
    path: str,
    timeout: float,
    *,
    method: Method = "POST",
    body: Mapping[str, Any] | None = None,
    lines: bytes | None = None,
) -> dict[str, Any]:
    """Returns the fields of a server's reply; empty if it is no JSON object or too long.

    Args:
        url: where the server is.
        path: of the request, with its query.
        timeout: longest wait for a part of the reply, in seconds.
        method: of the request.
        body: a body of JSON.
        lines: in its place, a body of one JSON object per line.

    Raises:
        InvalidConfig: an address or a key that cannot be one.
        ServerError: it cannot be reached, or refuses.
    """
    place = _place_of(url)
    sent: tuple[bytes, str | None] = (b"", None)
    if body is not None:
        sent = json.dumps(body).encode(), "application/json"
    elif lines is not None:
        sent = lines, "application/jsonl"
    status, headers, reply = _call(url, place, method, path, timeout, sent)
    fields = _fields_of(reply)
    if status not in (200, 201):
        error = fields.get("error")
        kind = UnknownDocument if _is_unknown_document(status, error) else ServerError
        raise kind(_refusal(url, method, path, status, headers, error))
    return fields


def no_kvmosaic(url: str) -> ServerError:
    """Returns the error for a reply without the requested fields."""
    return ServerError(f"{url} answers, but not as a kvmosaic server does; look at --url")


def _place_of(url: str) -> SplitResult:
    if "@" in url:  # before any message shows it
        raise InvalidConfig(f"--url takes no user and no password; a key belongs into {KEY_VARIABLE}")
    try:
        place = urlsplit(url)
        is_whole = place.scheme in ("http", "https") and bool(place.hostname) and place.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        is_whole = False
    if not is_whole or len(url) > MAX_URL_CHARACTERS or not re.fullmatch(r"[!-~]+", url) or "?" in url or "#" in url:
        raise InvalidConfig(f"--url {one_line(url)} is no address; give one such as http://127.0.0.1:8000")
    return place


def _call(
    url: str,
    place: SplitResult,
    method: Method,
    path: str,
    timeout: float,
    sent: tuple[bytes, str | None],
) -> tuple[int, Mapping[str, str], bytes]:
    """Sends one request, a body and its type; returns status, headers (lower-case names) and body of the reply.

    Uses no proxy and follows no redirect: the key of an admin goes to the address that was given.
    """
    connect = HTTPSConnection if place.scheme == "https" else HTTPConnection
    connection = connect(place.hostname or "", place.port, timeout=min(CONNECT_SECONDS, timeout))
    headers = {"Accept": "application/json", **_authorization()}
    content, content_type = sent
    if content_type is not None:
        headers["Content-Type"] = content_type
    try:
        try:
            connection.connect()
        except TimeoutError as error:
            raise ServerError(f"nothing answers at {url}; is the server there, and is --url right?") from error
        except ConnectionRefusedError as error:
            raise ServerError(
                f"nothing listens at {url}; start a server with `kvmosaic serve`, or give --url"
            ) from error
        connection.sock.settimeout(timeout)
        connection.request(method, place.path.rstrip("/") + path, content, headers)
        reply = connection.getresponse()
        text = reply.read(MAX_REPLY_BYTES)
    except TimeoutError as error:
        raise ServerError(
            f"no answer from {url} within {timeout:g} s; it may still do what it was asked; wait longer with --timeout"
        ) from error
    except SSLCertVerificationError as error:
        raise ServerError(
            f"the certificate of {url} is not trusted ({error.verify_message}); if it is your own, name it, or that of "
            "its authority, in the environment: SSL_CERT_FILE=certificate.pem"
        ) from error
    except (OSError, HTTPException, UnicodeError) as error:
        why = one_line(str(error) or type(error).__name__, MAX_MESSAGE_CHARACTERS)
        raise ServerError(f"{url} cannot be asked: {why}; look at --url") from error
    finally:
        connection.close()
    return reply.status, {name.lower(): value for name, value in reply.getheaders()}, text


def _authorization() -> dict[str, str]:
    """Returns the header with the key. The server's own variable may hold several; any of them works."""
    key = os.environ.get(KEY_VARIABLE, "").split(",")[0].strip()
    if not key:
        return {}
    if len(key) > MAX_KEY_CHARACTERS or not re.fullmatch(r"[!-~]+", key):  # vLLM takes short ones, too
        raise InvalidConfig(
            f"the key in {KEY_VARIABLE} must be at most {MAX_KEY_CHARACTERS} printable ASCII characters without "
            "spaces, since it travels in a header"
        )
    return {"Authorization": f"Bearer {key}"}


def _fields_of(reply: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(reply)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_unknown_document(status: int, error: object) -> bool:
    return status == 404 and isinstance(error, dict) and error.get("code") == "document_not_found"


def _refusal(url: str, method: Method, path: str, status: int, headers: Mapping[str, str], error: object) -> str:
    """Returns one line about a reply that is an error, and the fix."""
    told = error.get("message") if isinstance(error, dict) else None
    why = one_line(told, MAX_MESSAGE_CHARACTERS) if isinstance(told, str) else f"it answers {status} and nothing else"
    if 300 <= status < 400:
        return f"{url} sends to another address; give that one as --url"
    if status == 401:
        wanted = f"needs a key; set {KEY_VARIABLE} to yours"
        return f"{url} {f'does not know the API key in {KEY_VARIABLE}' if _authorization() else wanted}"
    if _is_unknown_document(status, error):
        return why
    if status in (404, 405, 501):
        return f"{url} has no {path.partition('?')[0]}: not a kvmosaic server, or an older one; look at --url"
    if status == 503:
        seconds = headers.get("retry-after", "")
        when = f" in {seconds} s" if seconds.isascii() and seconds.isdigit() and len(seconds) < 6 else " later"
        return f"{url} cannot do it now: {why} (try again{when})"
    return f"{url} refuses ({status}): {why}"


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
            if not isinstance(found, list) or not all(
                isinstance(each, dict) and isinstance(each.get("id"), str) and isinstance(each.get("metadata"), dict)
                for each in found
            ):
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

    def warm(self, document_id: str, system: str | None) -> bool:
        """Computes a document for requests with this system text; returns whether it was not cached."""
        body = {} if system is None else {"system": system}
        num_computed = self._ask("POST", f"{_path(document_id)}:warm", body).get("num_computed")
        if not isinstance(num_computed, int):
            raise no_kvmosaic(self.url)
        return num_computed > 0

    def _send(self, batch: list[NamedLine]) -> Iterator[Outcome]:
        body = b"\n".join(line.line for line in batch)
        reply = fields_of_server(self.url, f"{ROUTE}:batch", self._timeout, method="POST", lines=body)
        results = reply.get("data")
        if not isinstance(results, list) or len(results) != len(batch):
            raise no_kvmosaic(self.url)
        for sent, result in zip(batch, results, strict=True):
            error = result.get("error") or {}
            yield Outcome(sent.name, str(result.get("status")), str(error.get("message", "")))

    def _ask(self, method: Any, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return fields_of_server(self.url, ROUTE + path, self._timeout, method=method, body=body)


def _path(document_id: str) -> str:
    return "/" + quote(document_id, safe="")


def show_list(documents: Iterable[Mapping[str, Any]], as_json: bool) -> None:
    """Prints documents as a table, or one JSON object per line."""
    if as_json:
        for each in documents:
            typer.echo(json.dumps(each, ensure_ascii=False))
        return
    console, table = Console(), Table(box=None, pad_edge=False, header_style="bold")
    rows = list(documents)
    names = [
        one_line(str(each["id"]), MAX_ID_CHARACTERS) + (" (pinned)" if each.get("pinned") else "") for each in rows
    ]
    at = "%Y-%m-%d" if console.width < _WIDE else "%Y-%m-%d %H:%M"
    columns = {
        "version": [str(each.get("version", "")) for each in rows],
        "size": [size_text(int(each.get("bytes", 0))) for each in rows],
        "hits": [f"{int(each.get('hits', 0)):,}" for each in rows],
        "changed": [f"{datetime.fromtimestamp(time):{at}}" if time else "–" for time in map(_changed_at, rows)],
    }
    shown = {name: texts for name, texts in columns.items() if {*texts} != {_USUAL.get(name)}}
    # ids are there to be copied: whole where there is room beside the numbers, else on several lines
    longest = max(map(cell_len, names), default=0)
    beside = sum(max(map(len, (name, *texts))) + 1 for name, texts in shown.items()) + _TITLE_WIDTH
    table.add_column("id", overflow="fold", width=max(min(longest, console.width - beside), 8))
    for name in shown:
        table.add_column(name, justify="left" if name == "changed" else "right", no_wrap=True)
    table.add_column("title")  # the one that shrinks
    for index, (name, each) in enumerate(zip(names, rows, strict=True)):
        numbers = (texts[index] for texts in shown.values())
        table.add_row(Text(name, overflow="fold"), *numbers, shrinking(str(each.get("title") or "")))
    if table.row_count:
        console.print(table)
    else:
        typer.echo("no documents")


def _changed_at(document: Mapping[str, Any]) -> int | None:
    return time if isinstance(time := document.get("updated_at"), int) else None


def show_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Prints the text of a document, or all of it as JSON."""
    typer.echo(json.dumps(document, ensure_ascii=False) if as_json else printable(str(document["text"])))
