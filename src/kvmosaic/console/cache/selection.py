"""Selection for a command: tiers, opened so that reading does not change them, and entries by name, model or use."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvmosaic.cache.keys import Key
from kvmosaic.config.llm import MAX_SECRET_CHARACTERS, MIN_SECRET_CHARACTERS, is_secret_text
from kvmosaic.entries import (
    Checksum,
    ClaimedHeader,
    EntryHeader,
    num_claimed_bytes,
    num_file_header_bytes,
    read_claimed_header,
)
from kvmosaic.errors import InvalidConfig, InvalidEntry
from kvmosaic.tiers import MAX_ENTRY_BYTES, Deadline, Entry, EntryInfo, Tier, open_tier, parse_tier_url
from kvmosaic.tiers.breaker import peek
from kvmosaic.tiers.disk.files import MARKER

SECRET_VARIABLE = "KVMOSAIC_CHUNK_SECRET"  # noqa: S105  the name of a variable
CALL_SECONDS = 60.0
"""Timeout of one call to a tier; no request waits for it."""
_NO_QUOTA = 2**50
_FIRST_BYTES = 2**16
"""Most headers are shorter, so that one call is enough."""
_SMALL_BYTES = 2**24
"""Entries up to this size are read whatever their header says; no header is longer."""


@contextmanager
def opened(url: str) -> Iterator[Tier]:
    """Opens the tier of a URL, and closes it at the end.

    A disk tier has no quota here, so that nothing is evicted, and needs none in its URL.

    Raises:
        InvalidConfig: no such tier, or one that cannot be listed. TierUnavailable: it fails.
    """
    scheme, _, rest = url.strip().partition(":")
    if scheme.lower() == "host" or url.strip().lower().startswith("memory:"):
        raise InvalidConfig(
            f"a {scheme.lower()} tier is memory of one process, and gone with it; look at what outlives a process: "
            "disk:, redis:, s3:, gs:, az: or file:"
        )
    if scheme.lower() == "disk" and "quota=" not in rest:
        url = f"{url.strip()}{'&' if '?' in rest else '?'}quota={_NO_QUOTA}"
    spec = parse_tier_url(url)
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
    if secret is not None and not is_secret_text(secret):
        raise InvalidConfig(
            f"the secret in the environment variable {name[:100]} has {len(secret):,} characters; give it "
            f"{MIN_SECRET_CHARACTERS} to {MAX_SECRET_CHARACTERS}, or unset it to have none"
        )
    return secret


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
    """Returns all bytes of an entry; None if it is gone. Not a use, where the tier supports that.

    Of an entry larger than its header says, reads only one byte more, so that its checksum fails.

    Raises:
        InvalidEntry: a large one whose header cannot be read. TierUnavailable: the tier fails.
    """
    start = peek(tier, key, _SMALL_BYTES, deadline=Deadline(CALL_SECONDS))
    if start is None or len(start) < _SMALL_BYTES:
        return start
    return peek(tier, key, min(num_claimed_bytes(start), MAX_ENTRY_BYTES) + 1, deadline=Deadline(CALL_SECONDS))


def all_entries(tier: Tier, notices: Console) -> list[EntryInfo]:
    """Yields all entries of a tier, least recently used first: reading them all in this order keeps the LRU order."""
    with notices.status("looking into the tier"):
        return sorted(tier.scan(Deadline()), key=lambda info: info.last_used)


def progress_bar(notices: Console, *, is_bytes: bool = False) -> Progress:
    """Returns a progress bar in items or bytes, drawn on terminals only."""
    amount = DownloadColumn(binary_units=True) if is_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal)


MAX_DAYS = 36_500
_FINGERPRINT = re.compile(r"[0-9a-fA-F]{4,64}")


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry with its header."""

    info: EntryInfo
    header: EntryHeader | None
    """None if unreadable, or not read."""
    problem: str = ""

    @property
    def last_used(self) -> float:
        """Unix seconds of the last use, or of creation where the tier does not record uses; else 0."""
        return self.info.last_used or (self.header.created if self.header else 0.0)


@dataclass(frozen=True, slots=True)
class Selection:
    """Conditions that must all hold; without any, every entry is selected."""

    name: str | None = None
    """Part of one of its names, ignoring case."""
    model: str | None = None
    """Prefix of the fingerprint."""
    not_model: str | None = None
    older_than_days: float | None = None
    """Minimum days since the last use."""

    def __post_init__(self) -> None:
        for option, value in (("--model", self.model), ("--not-model", self.not_model)):
            if value is not None and not _FINGERPRINT.fullmatch(value):
                raise InvalidConfig(
                    f"{option} is {value[:100]!r}; give 4 or more digits of a fingerprint, as 'kvmosaic cache ls' "
                    "shows it"
                )
        if self.model is not None and self.not_model is not None:
            raise InvalidConfig("--model and --not-model exclude each other; leave one out")
        if self.name is not None and not self.name.strip():
            raise InvalidConfig("--name is empty; give a part of a name, or leave it out")
        days = self.older_than_days
        if days is not None and not 0 <= days <= MAX_DAYS:
            raise InvalidConfig(f"--older-than is {days:g}; give 0 to {MAX_DAYS} days")

    @property
    def is_empty(self) -> bool:
        """Whether there is no condition."""
        return self == Selection()

    @property
    def asks_headers(self) -> bool:
        """Whether the conditions need headers."""
        return any(value is not None for value in (self.name, self.model, self.not_model))

    def takes(self, entry: Listed, now: float) -> bool:
        """Whether an entry is selected. An unreadable one is selected only if no condition needs its header."""
        if self.older_than_days is not None and entry.last_used > now - self.older_than_days * 86_400:
            return False
        if not self.asks_headers:
            return True
        if (header := entry.header) is None:
            return False
        if self.name is not None and not any(self.name.lower() in name.lower() for name in header.names):
            return False
        if self.model is not None and not header.fingerprint.startswith(self.model.lower()):
            return False
        return self.not_model is None or not header.fingerprint.startswith(self.not_model.lower())

    def select(self, tier: Tier, infos: Iterable[EntryInfo]) -> Iterator[Listed]:
        """Yields the selected entries; reads headers only if needed."""
        now = time.time()
        for info in infos:
            asks = self.asks_headers or (self.older_than_days is not None and not info.last_used)
            entry = listed(tier, info) if asks else Listed(info, None)
            if entry is not None and self.takes(entry, now):
                yield entry


def listed(tier: Tier, info: EntryInfo) -> Listed | None:
    """Returns an entry with its header; None if it is gone.

    Raises:
        TierUnavailable: the tier fails.
    """
    try:
        claims = claims_of(tier, info.key)
    except InvalidEntry as error:
        return Listed(info, None, str(error))
    return None if claims is None else Listed(info, claims.header)
