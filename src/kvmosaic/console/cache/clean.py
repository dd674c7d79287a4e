"""Cleanup of a tier: removal of entries by age, model or quota."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from kvmosaic.config import parse_bytes
from kvmosaic.console.cache.place import CALL_SECONDS, all_entries, opened, progress_bar
from kvmosaic.console.cache.selection import Selection
from kvmosaic.console.text import size_text
from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers import Deadline, EntryInfo, Tier

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
