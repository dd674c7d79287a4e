"""Verification and cleanup of a tier: entries against their checksums; removal by age, model or quota."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.console.cache.selection import (
    CALL_SECONDS,
    Selection,
    all_entries,
    opened,
    progress_bar,
    seal_from,
    whole_entry,
)
from kvmosaic.console.text import one_line, size_text
from kvmosaic.entries import Checksum, check_entry
from kvmosaic.errors import DamagedEntry, InvalidConfig, InvalidEntry, TierUnavailable
from kvmosaic.tiers import Deadline, Entry, EntryInfo, Tier

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
    with progress_bar(notices, is_bytes=True) as bar:
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


_AT_ONCE = 64


def clean(url: str, selection: Selection, quota: str | None, dry_run: bool, as_json: bool) -> None:
    """Removes the selected entries, then least recently used ones, until the tier is within a quota.

    Raises:
        InvalidConfig: no condition is given. TierError: the tier fails.
    """
    if selection.is_empty and quota is None:
        raise InvalidConfig(
            "nothing says what is to be removed; give --quota, --older-than, --model, --not-model or --name"
        )
    max_bytes = None if quota is None else parse_bytes(quota)
    console, notices = Console(), Console(stderr=True)
    with opened(url) as tier:
        infos = all_entries(tier, notices)
        leaving: list[EntryInfo] = []
        if not selection.is_empty:
            with notices.status("asking the entries what they are"):
                leaving = [entry.info for entry in selection.select(tier, infos)]
        if max_bytes is not None:
            leaving += beyond(infos, {info.key for info in leaving}, max_bytes)
        num_removed = len(leaving) if dry_run else _remove(tier, leaving, notices)
    num_bytes, total = (sum(info.num_bytes for info in some) for some in (leaving, infos))
    if as_json:
        fields = {
            "removed": num_removed,
            "removed_bytes": num_bytes,
            "left": len(infos) - len(leaving),
            "left_bytes": total - num_bytes,
            "dry_run": dry_run,
            "keys": [info.key.hex() for info in leaving],
        }
        print(json.dumps(fields))
        return
    verb = "would remove" if dry_run else "removed"
    console.print(
        f"{verb} {num_removed:,} entries ({size_text(num_bytes)}); {len(infos) - len(leaving):,} stay "
        f"({size_text(total - num_bytes)})",
        highlight=False,
        soft_wrap=True,
    )


def beyond(infos: Sequence[EntryInfo], leaving: set[bytes], max_bytes: int) -> list[EntryInfo]:
    """Returns the least recently used entries to evict as well, so that at most `quota` bytes stay."""
    staying = [info for info in infos if info.key not in leaving]
    total, more = sum(info.num_bytes for info in staying), []
    for info in staying:
        if total <= max_bytes:
            break
        more.append(info)
        total -= info.num_bytes
    return more


def _remove(tier: Tier, leaving: Sequence[EntryInfo], notices: Console) -> int:
    removed = 0
    with progress_bar(notices) as bar:
        task = bar.add_task("removing", total=len(leaving))
        for first in range(0, len(leaving), _AT_ONCE):
            some = leaving[first : first + _AT_ONCE]
            removed += len(tier.delete_many([info.key for info in some], Deadline(CALL_SECONDS)))
            bar.advance(task, len(some))
    return removed
