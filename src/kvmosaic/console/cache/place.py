"""Tiers for inspection commands: opened so that reading does not change them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.cache.keys import Key
from kvmosaic.entries import (
    Checksum,
    ClaimedHeader,
    EntryHeader,
    num_claimed_bytes,
    num_file_header_bytes,
    read_claimed_header,
)
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import MAX_ENTRY_BYTES, Deadline, Entry, EntryInfo, Tier, open_tier, parse_tier_url
from kvmosaic.tiers.disk.names import MARKER
from kvmosaic.tiers.peek import peek

SECRET_VARIABLE = "KVMOSAIC_CHUNK_SECRET"  # noqa: S105  the name of a variable
CALL_SECONDS = 60.0
"""Timeout of one call to a tier; no request waits for it."""
MIN_SECRET_CHARACTERS, MAX_SECRET_CHARACTERS = 8, 1024
_NO_QUOTA = 2**50
_FIRST_BYTES = 2**16
"""Most headers are shorter, so that one call is enough."""
_SMALL_BYTES = 2**24
"""Entries up to this size are read whatever their header says; no header is longer."""


@contextmanager
def opened(url: str, *, to_write: bool = False) -> Iterator[Tier]:
    """Opens the tier of a URL, and closes it at the end.

    A tier that is only read has no quota here, so that nothing is evicted; a disk tier needs none in its URL then.

    Args:
        url: URL of the tier.
        to_write: whether to create it if missing, and to apply its quota.

    Raises:
        InvalidConfig: no such tier, or one that cannot be listed. TierUnavailable: it fails.
    """
    scheme, _, rest = url.strip().partition(":")
    if scheme.lower() == "host" or url.strip().lower().startswith("memory:"):
        raise InvalidConfig(
            f"a {scheme.lower()} tier is memory of one process, and gone with it; look at what outlives a process: "
            "disk:, redis:, s3:, gs:, az: or file:"
        )
    if scheme.lower() == "disk" and not to_write and "quota=" not in rest:
        url = f"{url.strip()}{'&' if '?' in rest else '?'}quota={_NO_QUOTA}"
    spec = parse_tier_url(url)
    if not to_write:
        if spec.kind == "disk":
            if not Path(spec.address).is_dir():
                raise InvalidConfig(f"there is no folder {spec.address}")
            if not (Path(spec.address) / MARKER).is_file():
                raise InvalidConfig(f"{spec.address} is not the folder of a disk tier: it has no {MARKER}")
            spec = replace(spec, quota_bytes=_NO_QUOTA)
        elif spec.kind == "object" and (place := urlsplit(spec.url)).scheme == "file" and not Path(place.path).is_dir():
            raise InvalidConfig(f"there is no folder {place.path}")
    tier = open_tier(spec)
    try:
        yield tier
    finally:
        tier.close()


def seal_from(variable: str | None) -> Checksum:
    """Returns the checksum for the secret in an environment variable; without a name, in the usual one, if it is set.

    Raises:
        InvalidConfig: the named variable is not set, or its value is no secret.
    """
    return Checksum(secret_from(variable))


def secret_from(variable: str | None = None) -> str | None:
    """Returns the secret of the tiers from the environment; an argument would be visible to other users."""
    name = variable or SECRET_VARIABLE
    secret = os.environ.get(name)
    if secret is None and variable is not None:
        raise InvalidConfig(f"the environment variable {variable[:100]!r} with the secret of the tier is not set")
    if secret is not None and not MIN_SECRET_CHARACTERS <= len(secret) <= MAX_SECRET_CHARACTERS:
        raise InvalidConfig(
            f"the secret in the environment variable {name[:100]} has {len(secret):,} characters; give it "
            f"{MIN_SECRET_CHARACTERS} to {MAX_SECRET_CHARACTERS}, or unset it to have none"
        )
    return secret


def header_of(tier: Tier, key: Key) -> EntryHeader | None:
    """Returns the header of an entry; None if it is gone. See `claims_of`."""
    claims = claims_of(tier, key)
    return None if claims is None else claims.header


def claims_of(tier: Tier, key: Key) -> ClaimedHeader | None:
    """Returns the header of an entry, reading no more of it than needed; None if it is gone.

    Raises:
        InvalidEntry: it cannot be read. TierUnavailable: the tier fails.
    """
    start = peek(tier, key, _FIRST_BYTES, deadline=Deadline(CALL_SECONDS))
    if start is None:
        return None
    if len(start) == _FIRST_BYTES and (needed := num_file_header_bytes(start)) > _FIRST_BYTES:
        start = peek(tier, key, needed, deadline=Deadline(CALL_SECONDS))
        if start is None:
            return None
    return read_claimed_header(start)


def whole_entry(tier: Tier, key: Key) -> Entry | None:
    """Returns all bytes of an entry; None if it is gone. Not a use, where the tier supports that. See `all_bytes`."""
    return all_bytes(lambda num_bytes: peek(tier, key, num_bytes, deadline=Deadline(CALL_SECONDS)))


def all_bytes(read: Callable[[int], Entry | None]) -> Entry | None:
    """Returns all bytes of an entry; None if it is gone.

    Of an entry larger than its header says, reads only one byte more, so that its checksum fails.

    Args:
        read: returns at most the first n bytes of the entry; None if it is gone.

    Raises:
        InvalidEntry: a large one whose header cannot be read.
    """
    start = read(_SMALL_BYTES)
    if start is None or len(start) < _SMALL_BYTES:
        return start
    return read(min(num_claimed_bytes(start), MAX_ENTRY_BYTES) + 1)


def all_entries(tier: Tier, notices: Console) -> list[EntryInfo]:
    """Yields all entries of a tier, least recently used first: reading them all in this order keeps the LRU order."""
    with notices.status("looking into the tier"):
        return sorted(tier.scan(Deadline()), key=lambda info: info.last_used)


def progress_bar(notices: Console, *, is_bytes: bool = False) -> Progress:
    """Returns a progress bar in items or bytes, drawn on terminals only."""
    amount = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)
