from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import socket
import stat
import time
from pathlib import Path

import pytest
from support.cpu_time import least_cpu_seconds
from tiers.conformance import KEYS, QUOTA, TierConformance, entry_of, listed
from tiers.faulty_files import FaultyFiles

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierUnavailable
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.disk.files import draft_name, this_host
from kvmosaic.tiers.disk.tier import DiskTier


class TestDiskTier(TierConformance):
    def open(self, place: Path, quota_bytes: int) -> Tier:
        return DiskTier(place, quota_bytes, durable=False)


ENTRY = entry_of(KEYS[0], 300)


def path_of(place: Path, key: Key) -> Path:
    return place / key[:1].hex() / f"{key.hex()}.safetensors"


def state_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_entry_is_one_file_named_by_its_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    place = tmp_path / "new" / "place"
    DiskTier(place, QUOTA).put_many({KEYS[0]: ENTRY}, Deadline())
    assert state_of(place).keys() == {place / ".kvmosaic-tier.json", path_of(place, KEYS[0])}
    assert path_of(place, KEYS[0]).read_bytes() == ENTRY
    assert json.loads((place / ".kvmosaic-tier.json").read_text()) == {"version": 1}
    assert stat.S_IMODE(path_of(place, KEYS[0]).stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["notes.txt", "zz", "AB", "ab.txt", ".hidden"])
def test_a_folder_with_files_of_others_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    before = state_of(tmp_path)
    with pytest.raises(InvalidConfig, match=r"holds what is not of a disk tier .*name a new or an empty folder"):
        DiskTier(tmp_path, QUOTA)
    assert state_of(tmp_path) == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidConfig, match="is a file; a disk tier needs a folder"):
        DiskTier(tmp_path / "file", QUOTA)


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ('{"version": 2}', "of version 2, and this program knows version 1"),
        ("", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ("{" * 4096, "is damaged"),
        ('{"version": "' + "9" * 4000 + '"}', "of version 9{20}, and"),
    ],
)
def test_a_folder_of_another_version_is_refused(tmp_path: Path, marker: str, words: str) -> None:
    DiskTier(tmp_path / "place", QUOTA).close()
    (tmp_path / "place" / ".kvmosaic-tier.json").write_text(marker)
    with pytest.raises(InvalidConfig, match=words) as caught:
        DiskTier(tmp_path / "place", QUOTA)
    assert len(str(caught.value)) < 500


def test_files_of_others_below_are_never_listed_counted_or_removed(tmp_path: Path) -> None:
    key = Key(b"\xab\xcd" * 16)
    place = tmp_path / "place"
    tier = DiskTier(place, QUOTA)
    tier.put_many({key: ENTRY}, Deadline())
    shard = path_of(place, key).parent
    strangers = [
        shard / "notes.txt",
        shard / f"{KEYS[1].hex()}.safetensors",  # of another shard
        shard / f"{key.hex().upper()}.safetensors",
        shard / f"{key.hex()}.safetensors.bak",
        shard / f"{key.hex()[:-1]}.safetensors",
        shard / f".{key.hex()}.partial",
        shard / f"{'00' * 65}.safetensors",
        place / "notes.txt",
        place / f"{key.hex()}.safetensors",
    ]
    for path in strangers:
        path.write_bytes(b"mine" * 500)
        os.utime(path, (0, 0))
    later = DiskTier(place, QUOTA, clock=lambda: time.time_ns() + 10**15)
    assert listed(later).keys() == {key}
    assert later.stat().num_bytes == len(ENTRY)
    assert later.exists_many([key, *KEYS], Deadline()) == {key}
    for each in [key, *KEYS]:
        later.put_many({each: entry_of(each, 900)}, Deadline())
    later.delete_many([key, *KEYS], Deadline())
    assert all(path.read_bytes() == b"mine" * 500 for path in strangers)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "socket", "dangling"])
def test_what_is_no_file_is_no_entry(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    tier = DiskTier(place, QUOTA)
    tier.put_many({KEYS[0]: ENTRY}, Deadline())
    path = path_of(place, KEYS[0])
    path.rename(tmp_path / "secret")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "secret")
        case "dangling":
            path.symlink_to(tmp_path / "nowhere")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
                server.bind(path.name)
    for each in (tier, DiskTier(place, QUOTA)):
        assert each.get_many(KEYS, Deadline()) == {}
        assert each.exists_many(KEYS, Deadline()) == set()
        each.touch(KEYS, Deadline())
        assert each.delete_many(KEYS, Deadline()) == set()
        each.quarantine(KEYS[0], "a test", Deadline())
        assert listed(each) == {}
        assert each.stat().num_entries == 0
    assert (tmp_path / "secret").read_bytes() == ENTRY
    assert os.path.lexists(path)


@pytest.mark.parametrize("name", ["shard", "quarantine"])
def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    tier = DiskTier(place, QUOTA)
    outside.mkdir()
    (outside / f"{KEYS[0].hex()}.safetensors").write_bytes(ENTRY)
    if name == "shard":
        path_of(place, KEYS[0]).parent.symlink_to(outside)
        assert tier.get_many(KEYS, Deadline()) == {}
        assert tier.delete_many(KEYS, Deadline()) == set()
        assert listed(DiskTier(place, QUOTA)) == {}
        with pytest.raises(TierUnavailable):
            tier.put_many({KEYS[0]: b"other"}, Deadline())
    else:
        tier.put_many({KEYS[0]: b"other"}, Deadline())
        (place / "quarantine").symlink_to(outside)
        tier.quarantine(KEYS[0], "a test", Deadline())
        assert tier.exists_many(KEYS, Deadline()) == set()
    assert state_of(outside) == {outside / f"{KEYS[0].hex()}.safetensors": ENTRY}


def test_a_file_larger_than_the_quota_is_not_read(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "place", QUOTA)
    tier.put_many({KEYS[0]: ENTRY}, Deadline())
    os.truncate(path_of(tmp_path / "place", KEYS[0]), 2**40)  # no memory is asked for
    assert tier.get_many(KEYS, Deadline()) == {}


def test_the_quarantine_keeps_the_latest_few(tmp_path: Path) -> None:
    place = tmp_path / "place"
    tier = DiskTier(place, 32_000)
    for number in range(40):
        key = Key(bytes([number]) * 8)
        tier.put_many({key: entry_of(key, 100)}, Deadline())
        tier.quarantine(key, "a test", Deadline())
    names = sorted(path.name[:2] for path in (place / "quarantine").iterdir())
    assert names == [f"{number:02x}" for number in range(24, 40)]
    tier.put_many({KEYS[0]: entry_of(KEYS[0], 1990)}, Deadline())  # almost a sixteenth of the quota
    tier.quarantine(KEYS[0], "a test", Deadline())
    assert [path.name[:64] for path in (place / "quarantine").iterdir()] == [KEYS[0].hex()]
    tier.put_many({KEYS[0]: entry_of(KEYS[0], 2010)}, Deadline())
    before = list((place / "quarantine").iterdir())
    tier.quarantine(KEYS[0], "a test", Deadline())
    assert list((place / "quarantine").iterdir()) == before, "too large for it: removed at once"
    assert tier.get_many([KEYS[0]], Deadline()) == {}
    assert tier.stat().quarantined == 42


def test_a_smaller_quota_counts_from_the_next_start(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "place", QUOTA)
    tier.put_many({key: entry_of(key, 100) for key in KEYS}, Deadline())
    tier.touch([KEYS[0]], Deadline())
    assert DiskTier(tmp_path / "place", 250).exists_many(KEYS, Deadline()) == {KEYS[0], KEYS[-1]}


def test_a_file_tells_when_its_entry_was_last_used(tmp_path: Path) -> None:
    now = 10**18
    tier = DiskTier(tmp_path / "place", QUOTA, clock=lambda: now)
    for use in (
        lambda: tier.put_many({KEYS[0]: ENTRY}, Deadline()),
        lambda: tier.get_many([KEYS[0]], Deadline()),
        lambda: tier.touch([KEYS[0]], Deadline()),
    ):
        now += 10**12
        use()
        tier.exists_many([KEYS[0]], Deadline())
        assert path_of(tmp_path / "place", KEYS[0]).stat().st_mtime_ns == now
        assert [facts.last_used for facts in listed(tier).values()] == [now]


def test_what_another_process_has_used_last_stays(tmp_path: Path) -> None:
    ours, theirs = DiskTier(tmp_path / "place", 100_000), DiskTier(tmp_path / "place", 100_000)
    ours.put_many({key: entry_of(key, 15_000) for key in KEYS[:6]}, Deadline())
    theirs.get_many([KEYS[0]], Deadline())
    theirs.touch([KEYS[1]], Deadline())
    ours.put_many({KEYS[6]: entry_of(KEYS[6], 20_000)}, Deadline())
    assert ours.exists_many(KEYS, Deadline()) == {*KEYS[:2], *KEYS[3:7]}


def test_what_others_write_counts_before_a_sixteenth_of_the_quota_is_written(quick_folder: Path) -> None:
    tiers = [DiskTier(quick_folder / "place", 100_000, durable=False) for _ in range(3)]
    most = 0
    for number in range(600):
        key = Key(number.to_bytes(2, "big") * 4)
        tiers[number % 3].put_many({key: bytes(1000)}, Deadline())
        most = max(most, sum(len(data) for data in state_of(quick_folder).values()))
    assert 100_000 < most <= 100_000 * (1 + 3 / 16) + 1000


def test_drafts_of_processes_that_are_gone_are_removed_and_others_are_not(tmp_path: Path) -> None:
    place = tmp_path / "place"
    tier = DiskTier(place, QUOTA)
    tier.put_many({KEYS[0]: ENTRY}, Deadline())
    drafts = [path_of(place, KEYS[0]).with_name(f".{KEYS[0].hex()}.{number:016x}.partial") for number in range(3)]
    for path, age in zip(drafts, (0, 500, 700), strict=True):
        path.write_bytes(b"half an en")
        os.utime(path, (time.time() - age,) * 2)
    assert listed(DiskTier(place, QUOTA)).keys() == {KEYS[0]}
    assert [path.exists() for path in drafts] == [True, True, False]


def test_a_key_that_is_no_key_is_an_error_of_the_caller(tmp_path: Path) -> None:
    for key in (b"", bytes(65)):
        with pytest.raises(ValueError, match="a key has 1 to 64 bytes"):
            DiskTier(tmp_path / "place", QUOTA).put_many({Key(key): ENTRY}, Deadline())


def test_a_closed_tier_says_so(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "place", QUOTA)
    tier.close()
    with pytest.raises(TierUnavailable, match="is closed"):
        tier.get_many(KEYS, Deadline())
    assert tier.stat().failures == 1


def test_ten_thousand_entries_are_ready_in_about_a_second(quick_folder: Path) -> None:
    tier = DiskTier(quick_folder / "place", 2**30, durable=False)
    keys = [Key(random.Random(number).randbytes(32)) for number in range(10_000)]
    tier.put_many({key: bytes(key) for key in keys}, Deadline())
    assert DiskTier(quick_folder / "place", 2**30).stat().num_entries == 10_000
    assert least_cpu_seconds(lambda: DiskTier(quick_folder / "place", 2**30)) < 2.0, "half a second of most CPUs"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no place where nothing can be made")
def test_a_place_where_no_folder_can_be_made_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cannot be made there; name another place"):
        DiskTier(Path("/proc/kvmosaic/cache"), QUOTA)


OTHER_HOST = "0123456789abcdef"


def draft_in(place: Path, key: Key, host: str, num_bytes: int, age: float = 0.0) -> Path:
    path = path_of(place, key).with_name(draft_name(key.hex(), host))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(num_bytes))
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_draft_is_dead_when_its_lock_is_free_on_this_host_or_it_is_old(tmp_path: Path) -> None:
    place = tmp_path / "place"
    DiskTier(place, QUOTA).close()
    dead = draft_in(place, KEYS[0], this_host(), 10)
    alive, slow = (draft_in(place, KEYS[1], this_host(), 10, age) for age in (0, 700))
    elsewhere = draft_in(place, KEYS[2], OTHER_HOST, 10)
    old_elsewhere = draft_in(place, KEYS[3], OTHER_HOST, 10, 700)
    with alive.open("rb") as one, slow.open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        tier = DiskTier(place, QUOTA)
        assert [path.exists() for path in (dead, alive, slow, elsewhere, old_elsewhere)] == [
            False,
            True,
            True,
            True,
            False,
        ]
    listed(tier)
    assert [path.exists() for path in (alive, slow, elsewhere)] == [False, False, True]


def test_where_files_cannot_be_locked_drafts_are_dead_when_they_are_old(tmp_path: Path) -> None:
    place = tmp_path / "place"
    files = FaultyFiles(lambda number, name: errno.ENOLCK if name == "lock" else None)
    tier = DiskTier(place, QUOTA, files=files)
    assert tier.put_many({KEYS[0]: ENTRY}, Deadline()) == {KEYS[0]}
    drafts = [draft_in(place, KEYS[1], this_host(), 10, age) for age in (0, 700)]
    listed(tier)
    assert [path.exists() for path in drafts] == [True, False]


def test_an_entry_and_its_draft_are_never_more_than_the_quota(tmp_path: Path) -> None:
    place, most = tmp_path / "place", 0

    def look(number: int, name: str) -> None:
        nonlocal most
        if name == "rename":
            most = max(most, sum(path.stat().st_size for path in place.glob("??/*")))

    tier = DiskTier(place, QUOTA, files=FaultyFiles(look))
    for version in range(4):
        for key in KEYS[:3]:
            assert tier.put_many({key: entry_of(key, 400, version)}, Deadline()) == {key}
        assert tier.put_many({KEYS[0]: entry_of(KEYS[0], QUOTA, version)}, Deadline()) == {KEYS[0]}
        assert tier.put_many({KEYS[0]: entry_of(KEYS[0], QUOTA, version + 1)}, Deadline()) == {KEYS[0]}
    assert 0 < most <= QUOTA


def test_a_file_larger_than_the_quota_makes_no_other_entry_leave(tmp_path: Path) -> None:
    place = tmp_path / "place"
    tier = DiskTier(place, QUOTA)
    tier.put_many({key: entry_of(key, 100) for key in KEYS[:5]}, Deadline())
    os.truncate(path_of(place, KEYS[0]), 2**40)
    for each in (tier, DiskTier(place, QUOTA)):
        assert each.exists_many(KEYS, Deadline()) == set(KEYS[1:5])
        assert each.stat().num_bytes == 400
    assert not path_of(place, KEYS[0]).exists()
