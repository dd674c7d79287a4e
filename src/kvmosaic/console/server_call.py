"""HTTP client for a running server, with the standard library only, and the commands that put it to sleep and wake."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

import typer

from kvmosaic.console.text import one_line
from kvmosaic.errors import InvalidConfig, ServerError, UnknownDocument
from kvmosaic.server.tenants.key_text import MAX_KEY_CHARACTERS

KEY_VARIABLE = "KVMOSAIC_API_KEY"
CONNECT_SECONDS = 10.0
"""Connection timeout: a reachable machine accepts at once, however busy its server is."""
MAX_REPLY_BYTES = 2**16
MAX_URL_CHARACTERS = 2_048
MAX_MESSAGE_CHARACTERS = 400

Method = Literal["GET", "POST", "PUT", "DELETE"]
_FOR_ADMINS = ("/sleep", "/wake_up", "/v1/documents:sleep")


def fields_of_server(
    url: str,
    path: str,
    timeout: float,
    *,
    method: Method = "POST",
    body: Mapping[str, Any] | None = None,
    lines: bytes | None = None,
    max_bytes: int = MAX_REPLY_BYTES,
) -> dict[str, Any]:
    """Returns the fields of a server's reply; empty if it is no JSON object or longer than `max_bytes`.

    Args:
        url: where the server is.
        path: of the request, with its query.
        timeout: longest wait for a part of the reply, in seconds.
        method: of the request.
        body: a body of JSON.
        lines: in its place, a body of one JSON object per line.
        max_bytes: of the reply.

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
    status, headers, reply = _call(url, place, method, path, timeout, sent, max_bytes)
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
    max_bytes: int,
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
        text = reply.read(max_bytes)
    except TimeoutError as error:
        raise ServerError(
            f"no answer from {url} within {timeout:g} s; it may still do what it was asked; wait longer with --timeout"
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
        is_given = bool(_authorization())
        whose = "that of an admin" if path.startswith(_FOR_ADMINS) else "yours"
        wanted = f"needs a key; set {KEY_VARIABLE} to {whose}"
        return f"{url} {f'does not know the API key in {KEY_VARIABLE}' if is_given else wanted}"
    if status == 403 and isinstance(error, dict) and error.get("code") == "admin_only":
        return f"the API key in {KEY_VARIABLE} is not that of an admin of {url}"
    if _is_unknown_document(status, error):
        return why
    if status in (404, 405, 501):
        return f"{url} has no {path.partition('?')[0]}: not a kvmosaic server, or an older one; look at --url"
    if status == 503:
        seconds = headers.get("retry-after", "")
        when = f" in {seconds} s" if seconds.isascii() and seconds.isdigit() and len(seconds) < 6 else " later"
        return f"{url} cannot do it now: {why} (try again{when})"
    return f"{url} refuses ({status}): {why}"


def cold_chunks(
    is_cold: bool, min_accesses: int | None, idle_seconds: float | None, others: bool
) -> dict[str, float] | None:
    """Returns the query for cold chunks, without fields that the server defaults; None: the whole server sleeps.

    Raises:
        InvalidConfig: options that do not belong together.
    """
    given = {"min_accesses": min_accesses, "idle_seconds": idle_seconds}
    numbers = {name: number for name, number in given.items() if number is not None}
    if not is_cold and numbers:
        raise InvalidConfig("--min-accesses and --idle-seconds say which chunks are cold; give --cold, too")
    if is_cold and others:
        raise InvalidConfig("--cold moves single chunks while the server works; leave out --level and --refuse")
    return numbers if is_cold else None


def sleep(url: str, level: int, refuse: bool, timeout: float) -> bool:
    """Puts a server to sleep and reports it; returns False if another client woke it before it slept.

    Raises:
        KVMosaicError: it cannot be reached, or does not do it.
    """
    path = f"/sleep?level={level}&mode={'refuse' if refuse else 'wait'}"
    if not _asked(url, path, timeout, "is_sleeping", bool):
        typer.echo(f"kvmosaic: {url} was woken before it slept", err=True)
        return False
    typer.echo(f"{url} sleeps; prompts {'are refused' if refuse else 'wait'} until `kvmosaic wake`")
    return True


def sleep_cold(url: str, cold: Mapping[str, float], timeout: float) -> None:
    """Offloads the cold chunks of a server to its tiers, and prints their number.

    Raises:
        KVMosaicError: it cannot be reached, or does not do it.
    """
    num_chunks = _asked(url, "/v1/documents:sleep", timeout, "num_chunks", int, cold)
    typer.echo(f"{num_chunks:,} {'chunk' if num_chunks == 1 else 'chunks'} of {url} moved to its tiers")


def wake(url: str, timeout: float) -> None:
    """Wakes a server, and reports it. No effect on a server that is awake.

    Raises:
        KVMosaicError: it cannot be reached, or has no memory to wake.
    """
    if _asked(url, "/wake_up", timeout, "is_sleeping", bool):
        raise ServerError(f"{url} still sleeps; try again")
    typer.echo(f"{url} is awake")


def _asked(url: str, path: str, timeout: float, field: str, kind: type, body: Mapping[str, Any] | None = None) -> Any:
    """Returns a field of a server's reply."""
    fields = fields_of_server(url, path, timeout, body=body)
    if type(fields.get(field)) is not kind:
        raise no_kvmosaic(url)
    return fields[field]
