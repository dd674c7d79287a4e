"""What every tier must do: inherit `TierConformance` in the tests of a tier, and say how to open it.

    class TestHostTier(TierConformance):
        def open(self, place: Path, quota_bytes: int) -> Tier:
            return HostTier(quota_bytes)

`place` is an empty folder: what is opened twice with the same place must be the same tier, if it is persistent.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvmosaic.cache.keys import Key
from kvmosaic.errors import DamagedEntry
from kvmosaic.tiers import Deadline, Entry, Tier
from kvmosaic.tiers.disk.folder import FileFacts
from kvmosaic.tiers.disk.tier import DiskTier

QUOTA = 1000
KEYS = [Key(bytes([number, 7]) * 16) for number in range(8)]


def entry_of(key: Key, num_bytes: int, version: int = 0) -> bytes:
    """An entry that tells whose it is, and where it is damaged: no two have the same bytes anywhere for long."""
    return random.Random(f"{key.hex()} {num_bytes} {version}").randbytes(num_bytes)


def marked(key: Key, num_bytes: int, version: int) -> bytes:
    """An entry for tests under load: cheap to make, and cheap to judge by `is_marked`."""
    unit = bytes(key) + version.to_bytes(4, "big") + num_bytes.to_bytes(4, "big")
    return (unit * (num_bytes // len(unit) + 1))[:num_bytes]


def is_marked(key: Key, entry: Entry) -> bool:
    """Whether an entry is one that `marked` made for this key, whole."""
    data = bytes(entry)
    if len(data) < len(key) + 8:
        return False
    version = int.from_bytes(data[len(key) : len(key) + 4], "big")
    return data == marked(key, len(data), version)


def listed(tier: DiskTier) -> dict[Key, FileFacts]:
    """The entries in a folder, as a tier sees them when it lists it."""
    store = tier._store
    return {
        key: facts for shard, known in store.shards().items() for key, facts in store.look_into(shard, known).items()
    }


class TierConformance:
    """Tests of one kind of tier; say what it does not promise with the flags."""

    keeps_order = True
    """Whoever was not used for the longest time leaves first, to the entry, as long as one process uses it."""
    has_quota = True
    """It never holds more than its quota."""
    has_exact_stat = True
    """`stat` is exact for what only this process writes."""
    num_walks = 20
    """Random walks of up to 40 steps."""
    num_rounds = 150
    """Rounds of each thread in tests under load."""

    def open(self, place: Path, quota_bytes: int) -> Tier:
        """Opens the tier at this place."""
        raise NotImplementedError

    @contextlib.contextmanager
    def opened(self, place: Path, quota_bytes: int = QUOTA) -> Iterator[Tier]:
        """An open tier, whose invariants hold at the end."""
        tier = self.open(place, quota_bytes)
        try:
            yield tier
            self.check(tier)
        finally:
            tier.close()

    def check(self, tier: Tier) -> None:
        """Asserts what must hold whenever nobody is using the tier."""
        getattr(tier, "check_invariants", lambda: None)()
        stat = tier.stat()
        if isinstance(tier, DiskTier):
            found = listed(tier)
            assert (stat.num_entries, stat.num_bytes) == (len(found), sum(each.num_bytes for each in found.values()))
        if self.has_quota:
            assert stat.num_bytes is not None and stat.quota_bytes is not None and stat.num_bytes <= stat.quota_bytes

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with self.opened(tmp_path / "place") as tier:
            yield tier

    def test_it_is_a_tier_and_says_what_it_is(self, tier: Tier) -> None:
        assert isinstance(tier, Tier)
        stat = tier.stat()
        assert stat.name == tier.name
        assert (stat.num_entries, stat.num_bytes) == ((0, 0) if self.has_exact_stat else (None, None))
        assert (stat.hits, stat.misses, stat.puts) == (0, 0, 0)
        assert stat.quota_bytes == (QUOTA if self.has_quota else None)

    @pytest.mark.parametrize("num_bytes", [1, 2, 63, 64, 65, 4096, 3_000_001])
    def test_an_entry_comes_back_as_it_was_put(self, tmp_path: Path, num_bytes: int) -> None:
        with self.opened(tmp_path / "place", 4_000_000) as tier:
            entry = entry_of(KEYS[0], num_bytes)
            assert tier.put_many({KEYS[0]: entry}, Deadline(30)) == {KEYS[0]}
            found = tier.get_many([KEYS[0]], Deadline(30))
            assert found.keys() == {KEYS[0]}
            assert bytes(found[KEYS[0]]) == entry
            stat = tier.stat()
            assert (stat.puts, stat.put_bytes, stat.hits, stat.misses, stat.get_bytes) == (
                1,
                num_bytes,
                1,
                0,
                num_bytes,
            )

    @pytest.mark.parametrize("num_bytes", [1, 2, 16, 20, 32, 64])
    def test_keys_of_any_length_are_apart_from_each_other(self, tier: Tier, num_bytes: int) -> None:
        keys = [Key(bytes(num_bytes)), Key(b"\xff" * num_bytes), Key(b"\n" * num_bytes), Key(b"/" * num_bytes)]
        entries = {key: entry_of(key, 50) for key in keys}
        assert tier.put_many(entries, Deadline(30)) == set(keys)
        assert {key: bytes(entry) for key, entry in tier.get_many(keys, Deadline(30)).items()} == entries

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_what_is_put_may_be_changed_afterwards(self, tier: Tier, kind: type) -> None:
        buffer = bytearray(entry_of(KEYS[0], 100))
        given = buffer if kind is bytearray else kind(memoryview(buffer)[:] if kind is memoryview else bytes(buffer))
        tier.put_many({KEYS[0]: given}, Deadline(30))
        buffer[:] = bytes(100)
        assert bytes(tier.get_many([KEYS[0]], Deadline(30))[KEYS[0]]) == entry_of(KEYS[0], 100)

    def test_a_view_of_numbers_is_stored_as_its_bytes(self, tier: Tier) -> None:
        view = memoryview(entry_of(KEYS[0], 96)).cast("H", (6, 8))
        assert tier.put_many({KEYS[0]: view}, Deadline(30)) == {KEYS[0]}
        assert bytes(tier.get_many([KEYS[0]], Deadline(30))[KEYS[0]]) == entry_of(KEYS[0], 96)

    def test_putting_again_replaces_the_entry_whole(self, tier: Tier) -> None:
        for version, num_bytes in enumerate([100, 300, 20, 20]):
            tier.put_many({KEYS[0]: entry_of(KEYS[0], num_bytes, version)}, Deadline(30))
            found = tier.get_many([KEYS[0]], Deadline(30))[KEYS[0]]
            assert bytes(found) == entry_of(KEYS[0], num_bytes, version)
            self.check(tier)

    def test_what_is_not_there_is_harmless(self, tier: Tier) -> None:
        assert tier.get_many(KEYS, Deadline(30)) == {}
        assert tier.exists_many(KEYS, Deadline(30)) == set()
        assert tier.delete_many(KEYS, Deadline(30)) == set()
        tier.touch(KEYS, Deadline(30))
        tier.quarantine(KEYS[0], "a test", Deadline(30))
        assert tier.put_many({}, Deadline(30)) == set()
        assert tier.get_many([], Deadline(30)) == {}
        assert tier.stat().misses == len(KEYS)
        assert tier.stat().failures == 0

    def test_some_of_the_keys_are_there(self, tier: Tier) -> None:
        entries = {key: entry_of(key, 30) for key in KEYS[:3]}
        assert tier.put_many(entries, Deadline(30)) == set(KEYS[:3])
        assert {key: bytes(entry) for key, entry in tier.get_many(KEYS, Deadline(30)).items()} == entries
        assert tier.exists_many(KEYS[2:], Deadline(30)) == {KEYS[2]}
        assert tier.delete_many(KEYS[1:], Deadline(30)) == {KEYS[1], KEYS[2]}
        assert tier.exists_many(KEYS, Deadline(30)) == {KEYS[0]}

    def test_an_entry_larger_than_any_of_its_key_is_damaged_and_not_given(self, tier: Tier) -> None:
        tier.put_many({key: entry_of(key, 200) for key in KEYS[:2]}, Deadline(30))
        assert bytes(tier.get_many([KEYS[0]], Deadline(30), max_bytes=200)[KEYS[0]]) == entry_of(KEYS[0], 200)
        assert tier.get_many([KEYS[2]], Deadline(30), max_bytes=1) == {}
        before = tier.stat().get_bytes
        for max_bytes in (0, 199):
            with pytest.raises(DamagedEntry, match=rf"has 200 bytes, expected at most {max_bytes}; it is not read"):
                tier.get_many([KEYS[0]], Deadline(30), max_bytes=max_bytes)
        assert tier.stat().get_bytes == before and tier.stat().failures == 0
        tier.quarantine(KEYS[0], "too large", Deadline(30))
        assert tier.get_many(KEYS[:2], Deadline(30), max_bytes=199 + 1).keys() == {KEYS[1]}
        assert tier.stat().quarantined == 1

    def test_an_entry_in_quarantine_is_found_by_nobody(self, tier: Tier) -> None:
        tier.put_many({key: entry_of(key, 30) for key in KEYS[:2]}, Deadline(30))
        tier.quarantine(KEYS[0], "a test", Deadline(30))
        assert tier.get_many(KEYS[:2], Deadline(30)).keys() == {KEYS[1]}
        assert tier.exists_many(KEYS[:2], Deadline(30)) == {KEYS[1]}
        assert tier.stat().quarantined == 1
        self.check(tier)
        tier.put_many({KEYS[0]: entry_of(KEYS[0], 40)}, Deadline(30))
        assert bytes(tier.get_many([KEYS[0]], Deadline(30))[KEYS[0]]) == entry_of(KEYS[0], 40)

    def test_an_entry_larger_than_the_quota_takes_nobodys_place(self, tier: Tier) -> None:
        if not self.has_quota:
            pytest.skip("it has no quota")
        tier.put_many({KEYS[0]: entry_of(KEYS[0], 600)}, Deadline(30))
        entries = {KEYS[1]: entry_of(KEYS[1], QUOTA + 1), KEYS[2]: entry_of(KEYS[2], 400)}
        assert tier.put_many(entries, Deadline(30)) == {KEYS[2]}
        assert tier.exists_many(KEYS, Deadline(30)) == {KEYS[0], KEYS[2]}
        assert tier.stat().evictions == 0

    def test_an_entry_as_large_as_the_quota_is_stored(self, tier: Tier) -> None:
        for version in range(3):
            assert tier.put_many({KEYS[0]: entry_of(KEYS[0], QUOTA, version)}, Deadline(30)) == {KEYS[0]}

    def test_whoever_was_not_used_for_the_longest_time_leaves_first(self, tier: Tier) -> None:
        if not self.keeps_order:
            pytest.skip("it does not keep order")
        for key in KEYS[:4]:
            tier.put_many({key: entry_of(key, 250)}, Deadline(30))
        tier.get_many([KEYS[0]], Deadline(30))
        tier.touch([KEYS[1]], Deadline(30))
        tier.exists_many([KEYS[2]], Deadline(30))  # asking is no use
        tier.put_many({KEYS[4]: entry_of(KEYS[4], 250)}, Deadline(30))
        assert tier.exists_many(KEYS, Deadline(30)) == {KEYS[0], KEYS[1], KEYS[3], KEYS[4]}
        tier.put_many({KEYS[5]: entry_of(KEYS[5], 500)}, Deadline(30))
        assert tier.exists_many(KEYS, Deadline(30)) == {KEYS[1], KEYS[4], KEYS[5]}
        assert tier.stat().evictions == 3

    def test_a_deadline_that_has_passed_does_no_harm(self, tier: Tier) -> None:
        tier.put_many({KEYS[0]: entry_of(KEYS[0], 100)}, Deadline(30))
        start = time.monotonic()
        late = Deadline(0)
        stored = tier.put_many({key: entry_of(key, 50) for key in KEYS[1:4]}, late)
        found = tier.get_many(KEYS, late)
        present = tier.exists_many(KEYS, late)
        tier.touch(KEYS, late)
        assert time.monotonic() - start < 5
        now = tier.exists_many(KEYS, Deadline(30))
        assert stored | present | found.keys() <= now
        assert all(bytes(entry) == entry_of(key, 100 if key == KEYS[0] else 50) for key, entry in found.items())
        gone = tier.delete_many(KEYS, late)
        assert tier.exists_many(KEYS, Deadline(30)) == now - gone

    def test_closing_again_is_harmless(self, tmp_path: Path) -> None:
        tier = self.open(tmp_path / "place", QUOTA)
        tier.close()
        tier.close()
        assert tier.stat().name == tier.name

    def test_entries_of_a_persistent_tier_outlive_it(self, tmp_path: Path) -> None:
        entries = {key: entry_of(key, 100) for key in KEYS}
        with self.opened(tmp_path / "place") as tier:
            tier.put_many(entries, Deadline(30))
        with self.opened(tmp_path / "place") as tier:
            found = {key: bytes(entry) for key, entry in tier.get_many(KEYS, Deadline(30)).items()}
            assert found == (entries if tier.is_persistent else {})

    def test_a_persistent_tier_that_is_opened_twice_is_one_tier(self, tmp_path: Path) -> None:
        with self.opened(tmp_path / "place") as ours, self.opened(tmp_path / "place") as theirs:
            if not ours.is_persistent:
                pytest.skip("it is not persistent")
            ours.put_many({KEYS[0]: entry_of(KEYS[0], 100)}, Deadline(30))
            assert bytes(theirs.get_many(KEYS, Deadline(30))[KEYS[0]]) == entry_of(KEYS[0], 100)
            assert theirs.exists_many(KEYS, Deadline(30)) == {KEYS[0]}
            theirs.put_many({KEYS[0]: entry_of(KEYS[0], 30, 1), KEYS[1]: entry_of(KEYS[1], 30)}, Deadline(30))
            assert bytes(ours.get_many(KEYS, Deadline(30))[KEYS[0]]) == entry_of(KEYS[0], 30, 1)
            assert theirs.delete_many([KEYS[0]], Deadline(30)) == {KEYS[0]}
            assert ours.get_many(KEYS, Deadline(30)).keys() == {KEYS[1]}
            assert ours.delete_many(KEYS, Deadline(30)) == {KEYS[1]}
            assert theirs.exists_many(KEYS, Deadline(30)) == set()

    def test_threads_never_see_a_wrong_entry(self, tmp_path: Path) -> None:
        with self.opened(tmp_path / "place") as tier:
            walk_together([tier] * 6, self.num_rounds, [QUOTA] if self.has_quota and self.has_exact_stat else [])

    def test_two_that_share_a_place_never_see_a_wrong_entry(self, tmp_path: Path) -> None:
        with self.opened(tmp_path / "place") as ours, contextlib.ExitStack() as stack:
            if not ours.is_persistent:
                pytest.skip("it is not persistent")
            theirs = self.open(tmp_path / "place", QUOTA)
            stack.callback(theirs.close)
            walk_together([ours, theirs] * 2, self.num_rounds, [])
            for tier in (theirs, ours):
                tier.put_many({KEYS[0]: entry_of(KEYS[0], QUOTA)}, Deadline(30))

    def test_it_agrees_with_its_twin_on_any_walk(self) -> None:
        suite = self

        class Walk(TierWalk):
            conformance = suite

        run_state_machine_as_test(
            Walk, settings=settings(max_examples=self.num_walks, stateful_step_count=40, deadline=None)
        )


def walk_together(tiers: list[Tier], num_rounds: int, max_bytes: list[int]) -> None:
    """Threads that put, get and delete the same few keys, each in its own tier; fails if one sees a wrong entry."""
    problems: list[str] = []

    def walk(number: int, tier: Tier) -> None:
        choose = random.Random(number)
        try:
            for version in range(num_rounds):
                key = choose.choice(KEYS)
                match choose.randrange(8):
                    case 0 | 1 | 2:
                        tier.put_many({key: marked(key, choose.randrange(40, 400), version)}, Deadline(30))
                    case 3 | 4 | 5:
                        for found, entry in tier.get_many(choose.sample(KEYS, 3), Deadline(30)).items():
                            if not is_marked(found, entry):
                                problems.append(f"thread {number} got a wrong entry of {len(entry)} bytes")
                    case 6:
                        tier.delete_many([key], Deadline(30))
                    case 7:
                        tier.touch([key], Deadline(30))
                        tier.exists_many(KEYS, Deadline(30))
                if any(tier.stat().num_bytes > most for most in max_bytes):
                    problems.append(f"{tier.stat().num_bytes} bytes are more than the quota")
        except Exception as error:  # a thread must not end in silence
            problems.append(repr(error))

    threads = [threading.Thread(target=walk, args=pair) for pair in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


class TierWalk(RuleBasedStateMachine):
    """A tier and its twin: a dictionary in the order of the last use."""

    conformance: TierConformance

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="tier")
        self.place = Path(self.folder.name) / "place"
        self.tier = self.conformance.open(self.place, QUOTA)
        self.twin: OrderedDict[Key, bytes] = OrderedDict()
        self.version = 0

    @property
    def twin_bytes(self) -> int:
        return sum(len(entry) for entry in self.twin.values())

    @rule(key=st.sampled_from(KEYS), num_bytes=st.integers(1, 1100))
    def put(self, key: Key, num_bytes: int) -> None:
        self.version += 1
        if self.conformance.has_quota and not self.conformance.keeps_order:
            num_bytes = min(num_bytes, QUOTA // len(KEYS))  # who would leave is not known
        entry = entry_of(key, num_bytes, self.version)
        is_fitting = num_bytes <= QUOTA or not self.conformance.has_quota
        assert self.tier.put_many({key: entry}, Deadline(30)) == ({key} if is_fitting else set())
        if is_fitting:
            self.twin.pop(key, None)
            while self.conformance.has_quota and self.twin_bytes + num_bytes > QUOTA:
                self.twin.popitem(last=False)
            self.twin[key] = entry

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=2), num_bytes=st.integers(1, QUOTA // len(KEYS)))
    def put_several(self, keys: set[Key], num_bytes: int) -> None:
        self.version += 1
        entries = {key: entry_of(key, num_bytes, self.version) for key in sorted(keys)}
        if self.twin_bytes + num_bytes * len(entries) > QUOTA:
            return  # who leaves while they come in one by one is not promised
        assert self.tier.put_many(entries, Deadline(30)) == keys
        for key, entry in entries.items():
            self.twin[key] = entry
        for key in sorted(keys):  # in which order several are used is not promised
            self.touch(key)

    @rule(key=st.sampled_from(KEYS))
    def get(self, key: Key) -> None:
        found = {key: bytes(entry) for key, entry in self.tier.get_many([key], Deadline(30)).items()}
        assert found == ({key: self.twin[key]} if key in self.twin else {})
        if key in self.twin:
            self.twin.move_to_end(key)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: Key) -> None:
        self.tier.touch([key], Deadline(30))
        if key in self.twin:
            self.twin.move_to_end(key)

    @rule(keys=st.sets(st.sampled_from(KEYS)))
    def delete(self, keys: set[Key]) -> None:
        assert self.tier.delete_many(keys, Deadline(30)) == keys & self.twin.keys()
        for key in keys:
            self.twin.pop(key, None)

    @rule(key=st.sampled_from(KEYS))
    def quarantine(self, key: Key) -> None:
        self.tier.quarantine(key, "a test", Deadline(30))
        self.twin.pop(key, None)

    @precondition(lambda self: self.tier.is_persistent)
    @rule()
    def open_again(self) -> None:
        self.tier.close()
        self.tier = self.conformance.open(self.place, QUOTA)

    @invariant()
    def agrees(self) -> None:
        getattr(self.tier, "check_invariants", lambda: None)()
        if self.conformance.has_exact_stat:
            stat = self.tier.stat()
            assert (stat.num_entries, stat.num_bytes) == (len(self.twin), self.twin_bytes)
        assert self.tier.exists_many(KEYS, Deadline(30)) == self.twin.keys()

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()
