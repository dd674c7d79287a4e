"""Listing of a tier: one line per entry, or totals."""

from __future__ import annotations

import json
import time
from itertools import islice

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmosaic.console.cache.selection import Listed, Selection, all_entries, listed, opened
from kvmosaic.console.text import fact_table, printable, shrinking, size_text
from kvmosaic.tiers import parse_tier_url

KEY_DIGITS = 12
MODEL_DIGITS = 8


def list_entries(url: str, selection: Selection, limit: int, as_json: bool) -> None:
    """Prints the entries of a tier, most recently used first; `limit` of them, or all of them if it is 0.

    Raises:
        KVMosaicError: the tier cannot be opened, or fails.
    """
    console, notices = Console(), Console(stderr=True)
    with opened(url) as tier:
        infos = all_entries(tier, notices)[::-1]
        readable = (entry for info in infos if (entry := listed(tier, info)) is not None)
        found = readable if selection.is_empty else selection.select(tier, infos)
        shown = islice(found, limit or None)
        if as_json:
            for entry in shown:
                print(json.dumps(entry_fields(entry)), flush=True)
            return
        entries = list(shown)
        has_more = next(found, None) is not None
    if not entries:
        console.print("no entry" if selection.is_empty else "no such entry", style="dim")
        return
    console.print(entry_table(entries, time.time()))
    if has_more:
        what = f"; the tier has {len(infos):,}" if selection.is_empty else ""
        notices.print(f"the last used {len(entries):,} are shown{what}; --limit 0 shows all", style="dim")


def show_stat(url: str, as_json: bool) -> None:
    """Prints how much is in a tier, counted now.

    Raises:
        KVMosaicError: the tier cannot be opened, or fails.
    """
    console, notices = Console(), Console(stderr=True)
    with opened(url) as tier:
        infos = all_entries(tier, notices)
        stat = tier.stat()
    quota = parse_tier_url(url).quota_bytes if "quota=" in url else None
    moments = [info.last_used for info in infos if info.last_used]
    fields = {
        "kind": stat.name,
        "address": stat.address,
        "entries": len(infos),
        "bytes": sum(info.num_bytes for info in infos),
        "quota_bytes": quota,
        "largest_bytes": max((info.num_bytes for info in infos), default=0),
        "first_used": min(moments, default=None),
        "last_used": max(moments, default=None),
    }
    if as_json:
        print(json.dumps(fields))
        return
    now = time.time()
    table = fact_table()
    total = sum(info.num_bytes for info in infos)
    share = f" of {size_text(quota)} ({total / quota:.0%})" if quota else ""
    table.add_row("tier", Text(printable(f"{stat.name} {stat.address}")))
    table.add_row("entries", f"{len(infos):,}")
    table.add_row("size", f"{size_text(total)}{share}")
    if infos:
        table.add_row("largest", size_text(max(info.num_bytes for info in infos)))
    if moments:
        table.add_row("used", f"between {age_text(now - min(moments))} and {age_text(now - max(moments))} ago")
    console.print(table)


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
