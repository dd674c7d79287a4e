"""Commands that put a running server to sleep and wake it, over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from kvmosaic.console.server_call import fields_of_server, no_kvmosaic
from kvmosaic.errors import InvalidConfig, ServerError


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
