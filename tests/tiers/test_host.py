from __future__ import annotations

from pathlib import Path

import pytest
from tiers.conformance import KEYS, QUOTA, TierConformance, entry_of

from kvmosaic.errors import InvalidConfig, TierFull, TierUnavailable
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.host import HostTier


class TestHostTier(TierConformance):
    num_rounds = 1500

    def open(self, place: Path, quota_bytes: int) -> Tier:
        return HostTier(quota_bytes)


class TestHostTierInMemoryOfTheCaller(TierConformance):
    num_walks = 10

    def open(self, place: Path, quota_bytes: int) -> Tier:
        return HostTier(quota_bytes, allocate=lambda num_bytes: memoryview(bytearray(num_bytes)))


def test_memory_of_the_caller_is_used_and_cannot_be_written_by_readers() -> None:
    given: list[bytearray] = []

    def allocate(num_bytes: int) -> memoryview:
        given.append(bytearray(num_bytes))
        return memoryview(given[-1])

    tier = HostTier(QUOTA, allocate=allocate)
    tier.put_many({KEYS[0]: entry_of(KEYS[0], 100)}, Deadline())
    assert given == [entry_of(KEYS[0], 100)]
    entry = tier.get_many([KEYS[0]], Deadline())[KEYS[0]]
    assert isinstance(entry, memoryview)
    assert entry.readonly
    assert entry.obj is given[0]


def test_no_memory_means_full_and_what_was_there_stays() -> None:
    limits = iter([1000, 0, 1000])

    def allocate(num_bytes: int) -> memoryview:
        if num_bytes > next(limits):
            raise MemoryError
        return memoryview(bytearray(num_bytes))

    tier = HostTier(QUOTA, allocate=allocate)
    tier.put_many({KEYS[0]: entry_of(KEYS[0], 100)}, Deadline())
    with pytest.raises(TierFull, match="no memory for an entry of 900 bytes"):
        tier.put_many({KEYS[1]: entry_of(KEYS[1], 900)}, Deadline())
    assert tier.exists_many(KEYS, Deadline()) == {KEYS[0]}
    assert tier.put_many({KEYS[1]: entry_of(KEYS[1], 900)}, Deadline()) == {KEYS[1]}
    assert tier.stat().failures == 1
    tier.check_invariants()


def test_bytes_are_kept_without_a_copy() -> None:
    tier = HostTier(QUOTA)
    entry = entry_of(KEYS[0], 100)
    tier.put_many({KEYS[0]: entry}, Deadline())
    assert tier.get_many([KEYS[0]], Deadline())[KEYS[0]] is entry


def test_a_closed_tier_is_empty_and_takes_nothing() -> None:
    tier = HostTier(QUOTA)
    tier.put_many({KEYS[0]: b"1"}, Deadline())
    tier.close()
    assert tier.get_many(KEYS, Deadline()) == {}
    with pytest.raises(TierUnavailable, match="closed"):
        tier.put_many({KEYS[0]: b"1"}, Deadline())
    assert tier.stat().num_bytes == 0


@pytest.mark.parametrize("quota", [0, -1, 2**51])
def test_a_quota_must_be_a_size(quota: int) -> None:
    with pytest.raises(InvalidConfig, match="a size must be"):
        HostTier(quota)
