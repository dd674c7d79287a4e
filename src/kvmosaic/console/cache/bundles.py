"""Export and import of tier entries, as bundle files for another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console

from kvmosaic.cache.keys import Key
from kvmosaic.console.cache.selection import (
    CALL_SECONDS,
    Selection,
    all_bytes,
    all_entries,
    opened,
    progress_bar,
    seal_from,
)
from kvmosaic.console.cache.verify import VerifyResult, good_entries
from kvmosaic.console.text import printable, size_text
from kvmosaic.errors import InvalidConfig, InvalidEntry
from kvmosaic.tiers import Deadline, Entry
from kvmosaic.tiers.bundle import Bundle, Member, write_bundle
from kvmosaic.tiers.redis.parts import slices
from kvmosaic.tiers.url import TIER_KINDS

_AT_ONCE = 256


def export_bundle(url: str, path: Path, selection: Selection, variable: str | None, as_json: bool) -> bool:
    """Writes the selected, intact entries of a tier to a file; returns whether none was damaged.

    Raises:
        InvalidConfig: no entry is selected. An existing bundle of this name stays.
        KVMosaicError: the tier cannot be opened, or fails; or the file cannot be written.
    """
    console, notices = Console(), Console(stderr=True)
    _check_order(path, "export TIER_URL FILE")
    seal = seal_from(variable)
    with opened(url) as tier:
        infos = all_entries(tier, notices)
        if not selection.is_empty:
            infos = [entry.info for entry in selection.select(tier, infos)]
        if not infos:
            which = "the tier has no entries" if selection.is_empty else "the tier has no such entries"
            raise InvalidConfig(f"{which}, so {path} is not written")
        findings = VerifyResult()
        try:
            contents = write_bundle(path, _some(good_entries(tier, infos, seal, findings, notices, "exporting"), path))
        finally:
            findings.show(notices)
    if as_json:
        fields = {
            "file": str(path),
            "entries": contents.num_entries,
            "bytes": contents.num_bytes,
            "damaged": len(findings.damaged),
            "foreign": len(findings.foreign),
        }
        print(json.dumps(fields))
    else:
        left_out = f"; {len(findings.damaged):,} damaged and {len(findings.foreign):,} foreign ones were left out"
        console.print(
            f"{printable(str(path))} has {contents.num_entries:,} entries ({size_text(contents.num_bytes)})"
            f"{left_out if findings.damaged or findings.foreign else ''}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return not findings.damaged


def _some(entries: Iterable[tuple[Key, Entry]], path: Path) -> Iterator[tuple[Key, Entry]]:
    """Yields the entries; if there are none, nothing is written, in particular not over an earlier bundle."""
    is_empty = True
    for entry in entries:
        is_empty = False
        yield entry
    if is_empty:
        raise InvalidConfig(f"no entry of the tier can be exported, so {path} is not written")


def _read(bundle: Bundle, member: Member, findings: VerifyResult) -> Entry | None:
    """Returns an entry of a bundle; None, and a finding, for one that cannot be used."""
    try:
        return all_bytes(lambda num_bytes: bundle.read(member, num_bytes))
    except InvalidEntry as error:
        findings.note(member.key, error)
        return None


def _check_order(path: Path, order: str) -> None:
    """Checks the order of the arguments: both are texts, and easily swapped."""
    kind = str(path).partition(":")[0].lower()
    if kind in TIER_KINDS and ":" in str(path) and not path.exists():
        raise InvalidConfig(f"{path} is a tier and no file; write kvmosaic cache {order}")


def import_bundle(path: Path, url: str, variable: str | None, as_json: bool) -> bool:
    """Puts the entries of a file into a tier, each after its checksum was checked; existing ones stay as they are.

    Returns:
        Whether all of them are in the tier now.

    Raises:
        InvalidBundle: the file is not what `export_bundle` writes. KVMosaicError: the tier cannot be opened, or fails.
    """
    console, notices = Console(), Console(stderr=True)
    _check_order(path, "import FILE TIER_URL")
    seal, findings = seal_from(variable), VerifyResult()
    num_known = num_stored = num_refused = 0
    with Bundle(path) as bundle, opened(url, to_write=True) as tier, progress_bar(notices, is_bytes=True) as bar:
        max_bytes = tier.stat().quota_bytes
        task = bar.add_task("importing", total=bundle.contents.num_bytes)
        for member in bundle.members:
            if tier.exists_many([member.key], Deadline(CALL_SECONDS)):
                num_known += 1
            elif max_bytes is not None and member.num_bytes > max_bytes:
                num_refused += 1
            elif (entry := _read(bundle, member, findings)) is not None and findings.check(member.key, entry, seal):
                is_stored = member.key in tier.put_many({member.key: entry}, Deadline(CALL_SECONDS))
                num_stored += is_stored
                num_refused += not is_stored
            bar.advance(task, member.num_bytes)
        num_there = sum(
            len(tier.exists_many([member.key for member in some], Deadline(CALL_SECONDS)))
            for some in slices(bundle.members, _AT_ONCE)
        )
    num_left = num_known + num_stored - num_there
    findings.show(notices)
    if as_json:
        fields = {
            "stored": num_stored,
            "evicted": num_left,
            "already_there": num_known,
            "refused": num_refused,
            "damaged": len(findings.damaged),
            "foreign": len(findings.foreign),
        }
        print(json.dumps(fields))
    else:
        parts = [f"{num_stored:,} entries were stored", f"{num_known:,} were there already"]
        parts += [f"{num_refused:,} are larger than the tier takes, or took too long"] if num_refused else []
        parts += [f"{num_left:,} of these had to leave for others: its quota is too small"] if num_left else []
        parts += [f"{len(findings.damaged):,} are damaged"] if findings.damaged else []
        parts += [f"{len(findings.foreign):,} are of another secret or version"] if findings.foreign else []
        console.print(", ".join(parts), highlight=False, soft_wrap=True)
    return not (findings.damaged or findings.foreign or num_refused or num_left)
