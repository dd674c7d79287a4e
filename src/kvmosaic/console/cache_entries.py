"""Entries of a tier for people: opened so that looking changes nothing, listed, and held against their checksums."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvmosaic.cache.keys import Key
from kvmosaic.config.llm import MAX_SECRET_CHARACTERS, MIN_SECRET_CHARACTERS, is_secret_text
from kvmosaic.console.text import one_line, printable, shrinking, size_text
from kvmosaic.entries import (
    Checksum,
    ClaimedHeader,
    EntryHeader,
    check_entry,
    num_claimed_bytes,
    num_file_header_bytes,
    read_claimed_header,
)
from kvmosaic.errors import DamagedEntry, InvalidConfig, InvalidEntry, TierUnavailable
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
    """All entries of a tier, least recently used first: reading them all in this order keeps the LRU order."""
    with notices.status("looking into the tier"):
        return sorted(tier.scan(Deadline()), key=lambda info: info.last_used)


KEY_DIGITS = 12
MODEL_DIGITS = 8


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry with its header."""

    info: EntryInfo
    header: EntryHeader | None
    """None if it cannot be read."""
    problem: str = ""


def _listed(tier: Tier, infos: Sequence[EntryInfo], name: str | None) -> Iterator[Listed]:
    """The entries that are still there; with `name` those with this in one of their names, ignoring case."""
    for info in infos:
        try:
            claims = claims_of(tier, info.key)
        except InvalidEntry as error:
            if name is None:
                yield Listed(info, None, str(error))
            continue
        if claims is not None and (name is None or any(name.lower() in each.lower() for each in claims.header.names)):
            yield Listed(info, claims.header)


def list_entries(url: str, name: str | None, limit: int, as_json: bool) -> None:
    """Prints the entries of a tier, most recently used first; `limit` of them, or all of them if it is 0.

    Raises:
        KVMosaicError: the tier cannot be opened, or fails.
    """
    if name is not None and not name.strip():
        raise InvalidConfig("--name is empty; give a part of a name, or leave it out")
    console, notices = Console(), Console(stderr=True)
    with opened(url) as tier:
        infos = all_entries(tier, notices)[::-1]
        shown = islice(_listed(tier, infos, name), limit or None)
        if as_json:
            for entry in shown:
                print(json.dumps(entry_fields(entry)), flush=True)
            return
        entries = list(shown)
    console.print(entry_table(entries, time.time()) if entries else "no entry")
    total = sum(info.num_bytes for info in infos)
    notices.print(f"{len(entries):,} of {len(infos):,} entries, {size_text(total)} in all", style="dim")


def entry_table(entries: list[Listed], now: float) -> Table:
    """Returns one row per entry; an unreadable one shows the error instead."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("key", no_wrap=True)
    table.add_column("names", max_width=36)
    for heading in ("tokens", "size"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("codec", "model", "tenant"):
        table.add_column(heading, no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    for entry in entries:
        key, size, header = entry.info.key.hex()[:KEY_DIGITS], size_text(entry.info.num_bytes), entry.header
        if header is None:
            problem = shrinking(entry.problem)
            problem.stylize("red")
            table.add_row(key, problem, "", size, "", "", "", "")
            continue
        table.add_row(
            key,
            shrinking(", ".join(header.names) or "–"),
            f"{header.num_tokens:,}",
            size,
            header.codec,
            printable(header.fingerprint[:MODEL_DIGITS]),
            shrinking(header.tenant or "–"),
            age_text(now - header.created),
        )
    return table


def entry_fields(entry: Listed) -> dict[str, object]:
    """Returns one entry as fields for JSON."""
    fields: dict[str, object] = {
        "key": entry.info.key.hex(),
        "bytes": entry.info.num_bytes,
        "last_used": entry.info.last_used or None,
    }
    if (header := entry.header) is None:
        return fields | ({"problem": entry.problem} if entry.problem else {})
    return fields | {
        "names": list(header.names),
        "tokens": header.num_tokens,
        "codec": header.codec,
        "dtype": header.dtype,
        "model": header.fingerprint,
        "tenant": header.tenant,
        "start": header.start,
        "created": header.created,
        "compute_seconds": header.compute_seconds,
    }


def age_text(seconds: float) -> str:
    """Returns an age as one number: "12 s", "3 min", "5 h", "40 d"."""
    seconds = max(0.0, seconds)
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:,.0f} d"


MAX_LINES = 100
"""Maximum number of bad entries that are listed; more are only counted."""


@dataclass(slots=True)
class VerifyResult:
    """Results of checking entries."""

    good: int = 0
    good_bytes: int = 0
    gone: int = 0
    """Evicted during the check."""
    damaged: dict[Key, str] = field(default_factory=dict)
    """Reasons why entries are damaged."""
    foreign: dict[Key, str] = field(default_factory=dict)
    """Reasons why entries cannot be checked here: another secret, or another version."""

    def check(self, key: Key, entry: Entry, seal: Checksum) -> None:
        """Checks one entry and records the result."""
        try:
            check_entry(entry, key, seal)
        except InvalidEntry as error:
            self.note(key, error)
            return
        self.good += 1
        self.good_bytes += len(entry)

    def note(self, key: Key, error: InvalidEntry) -> None:
        """Records a bad entry."""
        (self.damaged if isinstance(error, DamagedEntry) else self.foreign)[key] = str(error)

    def show(self, notices: Console) -> None:
        """Prints the bad entries, with reasons."""
        lines = [f"damaged {key.hex()}: {one_line(why, 400)}" for key, why in islice(self.damaged.items(), MAX_LINES)]
        if len(self.damaged) > MAX_LINES:
            lines.append(f"… {len(self.damaged) - MAX_LINES:,} more are damaged")
        reasons = Counter(self.foreign.values())
        lines += [f"{count:,} foreign: {one_line(why, 400)}" for why, count in reasons.most_common(MAX_LINES)]
        for line in lines:
            notices.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _warnings_silenced() -> Iterator[None]:
    log = logging.getLogger("kvmosaic")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def verify(url: str, variable: str | None, quarantine: bool, as_json: bool) -> bool:
    """Checks every entry of a tier, and quarantines damaged ones if requested; returns whether none is damaged.

    Raises:
        KVMosaicError: the tier cannot be opened, or fails.
    """
    console, notices = Console(), Console(stderr=True)
    seal, result = seal_from(variable), VerifyResult()
    with _warnings_silenced(), opened(url) as tier:  # quarantined entries are reported below
        _check(tier, all_entries(tier, notices), seal, result, notices)
        if quarantine:
            for key, reason in result.damaged.items():
                tier.quarantine(key, reason, Deadline(CALL_SECONDS))
    result.show(notices)
    if as_json:
        fields = {
            "good": result.good,
            "good_bytes": result.good_bytes,
            "damaged": {key.hex(): reason for key, reason in result.damaged.items()},
            "foreign": {key.hex(): reason for key, reason in result.foreign.items()},
            "quarantined": len(result.damaged) * quarantine,
        }
        print(json.dumps(fields))
    else:
        aside = " and put aside" if quarantine and result.damaged else ""
        console.print(
            f"{result.good:,} entries ({size_text(result.good_bytes)}) are as they were written, "
            f"{len(result.damaged):,} damaged{aside}, {len(result.foreign):,} of another secret or version",
            style="red" if result.damaged else "green",
            highlight=False,
            soft_wrap=True,
        )
    return not result.damaged


def _check(tier: Tier, infos: Sequence[EntryInfo], seal: Checksum, result: VerifyResult, notices: Console) -> None:
    """Reads entries one by one, and records in `result` what they are.

    Raises:
        TierUnavailable: the tier fails, not only for this entry.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=notices, transient=True, disable=not notices.is_terminal) as bar:
        task = bar.add_task("checking", total=sum(info.num_bytes for info in infos))
        for info in infos:
            try:
                entry = whole_entry(tier, info.key)
            except InvalidEntry as error:
                result.note(info.key, error)
                continue
            except TierUnavailable as error:
                if not tier.exists_many([info.key], Deadline(CALL_SECONDS)):
                    raise
                result.damaged[info.key] = f"it cannot be read, though the tier answers: {error}"
                continue
            if entry is None:
                result.gone += 1
            else:
                result.check(info.key, entry, seal)
            bar.advance(task, info.num_bytes)
