"""A disk that fails at any call: errors have their names, nothing wrong is read, and it goes on afterwards."""

from __future__ import annotations

import contextlib
import errno
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.tiers import HandClock
from tiers.conformance import KEYS, entry_of, listed
from tiers.faulty_files import CALLS, FaultyFiles

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError, TierFull, TierUnavailable
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.disk.files import is_draft
from kvmosaic.tiers.disk.tier import DiskTier

ROOMY, TIGHT = 100_000, 1000


class Story:
    """Calls of every kind, some of which fail; knows what may be there afterwards."""

    def __init__(self, folder: Path, files: FaultyFiles, quota: int) -> None:
        self.folder, self.files, self.quota = folder, files, quota
        self.may: dict[Key, set[bytes]] = {key: set() for key in KEYS}
        self.must: dict[Key, bytes] = {}
        self.errors: list[tuple[str, TierError]] = []
        self.tier: DiskTier | None = None

    def tell(self) -> Story:
        try:
            self.tier = DiskTier(self.folder, self.quota, files=self.files)
        except TierError as error:
            self.errors.append(("open", error))
            return self
        for index, key in enumerate(KEYS[:5]):
            self.put({key: entry_of(key, 240 + index)})
        self.put({KEYS[0]: entry_of(KEYS[0], 100, 1), KEYS[5]: entry_of(KEYS[5], 300)})
        self.get(KEYS)
        for name in ("exists_many", "touch"):
            self.call(name, KEYS)
        self.call("quarantine", KEYS[2], "a test")
        self.must.pop(KEYS[2], None)
        for key in KEYS[3:5]:
            self.must.pop(key, None)
            self.call("delete_many", [key])
        self.get(KEYS[:4])
        return self

    def call(self, name: str, *arguments: object) -> object:
        try:
            return getattr(self.tier, name)(*arguments, Deadline(30))
        except TierError as error:
            self.errors.append((name, error))
            return None

    def put(self, entries: dict[Key, bytes]) -> None:
        for key, entry in entries.items():
            self.may[key].add(entry)
            self.must.pop(key, None)
        stored = self.call("put_many", entries)
        if isinstance(stored, set):
            self.must.update({key: entries[key] for key in stored})

    def get(self, keys: list[Key]) -> None:
        for key in keys:
            found = self.call("get_many", [key])
            if isinstance(found, dict):
                assert all(entry in self.may[key] for entry in found.values())
                assert key not in self.must or self.quota == TIGHT or found[key] == self.must[key]
            else:
                self.must.pop(key, None)  # what cannot be read may be put aside

    def check(self, *, drafts_may_stay: bool = False) -> None:
        """What must be true when the disk works again, for this tier and for one that is opened now."""
        self.files.fault = lambda number, name: None
        tiers = [DiskTier(self.folder, self.quota), *([self.tier] if self.tier else [])]
        for tier in tiers:
            listed(tier)
            tier.check_invariants()
            found = tier.get_many(KEYS, Deadline())
            assert all(entry in self.may[key] for key, entry in found.items())
            if self.quota == ROOMY:
                assert {key: found.get(key) for key in self.must} == self.must
            stat = tier.stat()
            assert (stat.num_entries, stat.num_bytes) == (len(found), sum(len(entry) for entry in found.values()))
            assert stat.num_bytes <= self.quota
        if not drafts_may_stay:
            assert [path for path in self.folder.rglob("*") if is_draft(path.name)] == []
        for tier in tiers:
            assert tier.put_many({KEYS[7]: entry_of(KEYS[7], 200)}, Deadline()) == {KEYS[7]}
            assert tier.get_many([KEYS[7]], Deadline()) == {KEYS[7]: entry_of(KEYS[7], 200)}


@pytest.fixture
def folder(quick_folder: Path) -> Path:
    return quick_folder / "tier"


def num_calls_without_faults(folder: Path, quota: int) -> int:
    story = Story(folder, FaultyFiles(), quota).tell()
    assert story.errors == []
    story.check()
    num_calls = story.files.num_calls
    shutil.rmtree(folder)
    return num_calls


NUMBERS = (errno.ENOSPC, errno.EIO, errno.EACCES)


def open_files(folder: Path) -> list[str]:
    """What this process has open of a folder; other files are closed whenever garbage is collected."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed by another thread
            found.append(str(descriptor.readlink()))
    return [name for name in found if name.startswith(f"{folder.resolve()}/")]


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("quota", [ROOMY, TIGHT])
def test_each_call_fails_once(folder: Path, quota: int, number: int) -> None:
    """Each number at every third call, so that each call fails with one of them."""
    num_calls = num_calls_without_faults(folder, quota)
    assert num_calls > 200
    for index in range(1 + NUMBERS.index(number), num_calls + 1, len(NUMBERS)):
        failed: list[str] = []

        def fault(call: int, name: str, index: int = index, failed: list[str] = failed) -> int | None:
            if call == index:
                failed.append(name)
                return number
            return None

        story = Story(folder, FaultyFiles(fault), quota).tell()
        for name, error in story.errors:
            expected = TierFull if number == errno.ENOSPC and name == "put_many" else TierUnavailable
            assert type(error) is expected, f"{name}, call {index} ({failed}): {error!r}"
        story.check(drafts_may_stay=failed == ["remove"])
        assert open_files(folder) == [], f"call {index} ({failed}) leaves a file open"
        shutil.rmtree(folder)


@pytest.mark.parametrize("quota", [ROOMY, TIGHT])
def test_each_call_does_its_work_and_fails_all_the_same(folder: Path, quota: int) -> None:
    for index in range(1, num_calls_without_faults(folder, quota) + 1, 2):
        story = Story(folder, FaultyFiles(lambda call, name, i=index: -errno.EIO if call == i else None), quota).tell()
        story.check(drafts_may_stay=True)
        shutil.rmtree(folder)


SELDOM = [pytest.param(number, marks=pytest.mark.slow) for number in (errno.EACCES, errno.EROFS, errno.EMFILE)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, *SELDOM])
@pytest.mark.parametrize("name", CALLS)
def test_a_kind_of_call_fails_from_now_on(folder: Path, name: str, number: int) -> None:
    for start in (0, 40, 80, 160):
        story = Story(folder, FaultyFiles(lambda call, n, s=start: number if n == name and call > s else None), ROOMY)
        story.tell()
        story.check(drafts_may_stay=name in ("open", "remove"))
        shutil.rmtree(folder)


def test_all_calls_fail_from_now_on(folder: Path) -> None:
    for start in range(0, num_calls_without_faults(folder, TIGHT), 4):
        story = Story(folder, FaultyFiles(lambda call, name, s=start: errno.EIO if call > s else None), TIGHT).tell()
        story.check(drafts_may_stay=True)
        shutil.rmtree(folder)


def test_the_operating_system_may_write_less_than_it_was_given(folder: Path) -> None:
    story = Story(folder, FaultyFiles(), ROOMY)
    DiskTier(folder, ROOMY).close()
    story.files.fault = lambda call, name: "short" if name == "write" else None
    story.tell()
    assert story.errors == []
    story.check()


def test_a_disk_that_is_full_keeps_what_it_has(tmp_path: Path) -> None:
    """A real limit: no file of this process may be larger than 1000 bytes."""
    tier = DiskTier(tmp_path / "place", ROOMY, durable=False)
    tier.put_many({KEYS[0]: entry_of(KEYS[0], 900)}, Deadline())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(TierFull, match="smaller than what is free"):
            tier.put_many({KEYS[1]: entry_of(KEYS[1], 1100)}, Deadline())
        assert tier.put_many({KEYS[2]: entry_of(KEYS[2], 800)}, Deadline()) == {KEYS[2]}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tier.get_many(KEYS, Deadline()).keys() == {KEYS[0], KEYS[2]}
    assert [path for path in (tmp_path / "place").rglob("*") if is_draft(path.name)] == []


def test_a_small_disk_is_full_at_last(tmp_path: Path) -> None:
    """A real one, of 256 KiB, where this process may mount it."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")
    try:
        tier = DiskTier(place / "tier", 2**30)
        stored: set[Key] = set()
        with pytest.raises(TierFull):
            for number in range(10):
                key = Key(bytes([number]) * 32)
                stored |= tier.put_many({key: entry_of(key, 60_000)}, Deadline())
        assert len(stored) >= 2
        found = tier.get_many(stored, Deadline())
        assert found == {key: entry_of(key, 60_000) for key in stored}
        tier.delete_many(stored, Deadline())
        assert tier.put_many({KEYS[0]: entry_of(KEYS[0], 60_000)}, Deadline()) == {KEYS[0]}
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        assert tier.get_many(KEYS, Deadline()) == {KEYS[0]: entry_of(KEYS[0], 60_000)}
        with pytest.raises(TierUnavailable, match="Read-only"):
            tier.put_many({KEYS[1]: b"x"}, Deadline())
        with pytest.raises(TierUnavailable, match="Read-only"):
            tier.delete_many([KEYS[0]], Deadline())
        reader = DiskTier(place / "tier", 2**30)
        assert reader.get_many(KEYS, Deadline()).keys() == {KEYS[0]}
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_folder_that_may_not_be_written_is_still_read() -> None:
    with tempfile.TemporaryDirectory() as home:  # not in tmp_path, whose parents nobody else may enter
        Path(home).chmod(0o755)
        _read_as_somebody_else(Path(home) / "place")


def _read_as_somebody_else(place: Path) -> None:
    DiskTier(place, ROOMY).put_many({KEYS[0]: b"entry"}, Deadline())
    code = f"""
import os, sys
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.errors import TierUnavailable
from kvmosaic.cache.keys import Key
if os.getuid() == 0:
    os.chdir("/"); os.setgid(65534); os.setuid(65534)
key = Key(bytes.fromhex("{KEYS[0].hex()}"))
tier = DiskTier("{place}", 1000)
assert bytes(tier.get_many([key], Deadline())[key]) == b"entry"
for call in (lambda: tier.put_many({{key: b"x"}}, Deadline()), lambda: tier.delete_many([key], Deadline())):
    try:
        call()
    except TierUnavailable as error:
        print(error)
"""
    folders = [path for path in [place, *place.rglob("*")] if path.is_dir()]
    for path in [*place.rglob("*"), place]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("Permission denied") == 2
    finally:
        for path in folders:
            path.chmod(0o755)


def test_a_folder_that_is_gone_is_a_miss_and_is_not_filled_again(tmp_path: Path) -> None:
    """Where a disk was mounted there may be a folder of another, smaller one."""
    place = tmp_path / "place"
    tier = DiskTier(place, ROOMY)
    tier.put_many({KEYS[0]: b"entry"}, Deadline())
    place.rename(tmp_path / "unmounted")
    place.mkdir()
    assert tier.get_many(KEYS, Deadline()) == {}
    with pytest.raises(TierUnavailable, match="is not the folder of a disk tier any more"):
        tier.put_many({KEYS[0]: b"entry"}, Deadline())
    assert list(place.iterdir()) == []
    place.rmdir()
    with pytest.raises(TierUnavailable):
        tier.put_many({KEYS[0]: b"entry"}, Deadline())
    (tmp_path / "unmounted").rename(place)
    assert tier.put_many({KEYS[1]: b"entry"}, Deadline()) == {KEYS[1]}
    assert tier.get_many(KEYS, Deadline()).keys() == {KEYS[0], KEYS[1]}


def test_a_folder_that_is_emptied_by_hand_is_used_again(tmp_path: Path) -> None:
    place = tmp_path / "place"
    tier = DiskTier(place, TIGHT)
    tier.put_many({key: entry_of(key, 100) for key in KEYS}, Deadline())
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert tier.put_many({KEYS[0]: entry_of(KEYS[0], 900)}, Deadline()) == {KEYS[0]}
    assert tier.stat().num_bytes == 900
    assert tier.stat().evictions == 0


def test_a_slow_disk_ends_at_the_deadline(tmp_path: Path) -> None:
    clock = HandClock()

    def fault(call: int, name: str) -> None:
        if name == "write":
            clock.advance(0.05)

    tier = DiskTier(tmp_path / "place", ROOMY, files=FaultyFiles(fault))
    stored = tier.put_many(dict.fromkeys(KEYS, b"entry"), Deadline(0.12, clock=clock))
    assert clock.now < 100.2
    assert 0 < len(stored) < len(KEYS)
    assert tier.exists_many(KEYS, Deadline()) == stored
    assert [path for path in (tmp_path / "place").rglob("*") if is_draft(path.name)] == []
