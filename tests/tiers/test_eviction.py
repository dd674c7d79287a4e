"""Eviction policies in tiers: those of the caches on the device, LRU by default."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.cache import Key
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import POLICIES, Candidate
from kvmosaic.tiers import Deadline, HostTier, Tier, open_tier
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.entry_index import EntryIndex

KEYS = [Key(bytes([number]) * 32) for number in range(8)]
A, B, C, D = KEYS[:4]


@dataclass(frozen=True)
class LargestFirst:
    name: ClassVar[str] = "largest"

    def rank(self, candidate: Candidate) -> float:
        return -candidate.num_bytes


@pytest.fixture(params=["host:300", "disk:{folder}?quota=300"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.param.format(folder=tmp_path / "tier")


def with_policy(url: str, name: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}eviction={name}"


def filled(tier: Tier) -> Tier:
    """A full tier: A was used often, B once, C never, and A the longest ago."""
    for key in (A, B, C):
        tier.put_many({key: bytes(100)}, Deadline())
    for key in (A, A, A, B, C, B):
        tier.get_many([key], Deadline())
    tier.put_many({C: bytes(100)}, Deadline())
    return tier


def present(tier: Tier) -> set[Key]:
    return tier.exists_many(KEYS, Deadline())


def test_lru_is_the_default(url: str) -> None:
    for place in (url, with_policy(url, "lru")):
        tier = filled(open_tier(place))
        tier.put_many({D: bytes(100)}, Deadline())
        assert present(tier) == {B, C, D}
        tier.delete_many(KEYS, Deadline())


def test_lfu_keeps_what_is_used_most(url: str) -> None:
    tier = open_tier(with_policy(url, "lfu"))
    for key in (A, B, C):
        tier.put_many({key: bytes(100)}, Deadline())
    for key in (A, A, A, B, B, C):
        tier.get_many([key], Deadline())
    tier.put_many({D: bytes(100)}, Deadline())
    assert present(tier) == {A, B, D}
    tier.touch([D, D, D, D], Deadline())
    tier.put_many({C: bytes(100)}, Deadline())
    assert present(tier) == {A, C, D}
    assert tier.stat().evictions == 2


def test_replaced_entry_fits_in_its_own_place_under_any_policy(url: str) -> None:
    for name in POLICIES:
        tier = filled(open_tier(with_policy(url, name)))
        assert tier.put_many({B: bytes(120)}, Deadline()) == {B}
        assert B in present(tier)
        assert tier.stat().num_bytes <= 300
        tier.delete_many(KEYS, Deadline())


def test_policy_of_ones_own_is_an_object(tmp_path: Path) -> None:
    for tier in (HostTier(300, eviction=LargestFirst()), DiskTier(tmp_path / "tier", 300, eviction=LargestFirst())):
        for key, size in ((A, 50), (B, 120), (C, 100)):
            tier.put_many({key: bytes(size)}, Deadline())
        tier.put_many({D: bytes(90)}, Deadline())
        assert present(tier) == {A, C, D}


def test_policy_by_name_is_offered_by_tiers(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    with pytest.raises(InvalidConfig, match="choose 'lru' or 'lfu' or 'gdsf' or 'priority'"):
        open_tier(with_policy(url, "largest"))
    monkeypatch.setitem(POLICIES, "largest", LargestFirst)
    tier = open_tier(with_policy(url, "largest"))
    tier.put_many({A: bytes(50)}, Deadline())
    tier.put_many({B: bytes(200)}, Deadline())
    tier.put_many({C: bytes(60)}, Deadline())
    assert present(tier) == {A, C}


def test_entry_of_no_bytes_has_a_rank() -> None:
    class PerByte:
        name = "per byte"

        def rank(self, candidate: Candidate) -> float:
            return candidate.hits / candidate.num_bytes

    index = EntryIndex(eviction=PerByte())
    index.add(A, 0, index.now())
    assert index.first() == A


def test_lru_order_is_exact_to_the_nanosecond() -> None:
    start = 1_800_000_000 * 10**9
    index = EntryIndex(lambda: start)
    for key in reversed(KEYS):
        index.add(key, 1, index.now())
    index.use(KEYS[-1], index.now())
    index.add(KEYS[0], 1, start - 1)  # as of another process
    order = []
    while (key := index.first()) is not None:
        order.append(key)
        index.drop(key)
    assert order == [KEYS[0], *reversed(KEYS[1:-1]), KEYS[-1]]


@pytest.mark.parametrize("name", [*POLICIES, "largest"])
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "use", "drop", "evict"]), st.sampled_from(KEYS), st.integers(0, 9)),
        max_size=200,
    )
)
def test_index_agrees_with_a_sorted_list(name: str, calls: list[tuple[str, Key, int]]) -> None:
    policy = POLICIES.get(name, LargestFirst)()
    numbers = itertools.count()
    index = EntryIndex(lambda: 0, policy)
    records: dict[Key, tuple[int, int, int, int]] = {}
    for call, key, value in calls:
        now = index.now() * 10**9
        hits = records[key][2] if key in records else 0
        if call == "add":
            index.add(key, value, now)
            records[key] = (value, now, hits, next(numbers))
        elif call == "use":
            index.use(key, now)
            if key in records:
                records[key] = (records[key][0], now, hits + 1, next(numbers))
        elif call == "drop":
            index.drop(key)
            records.pop(key, None)
        elif (first := index.first()) is not None:
            ranks = {
                key: (policy.rank(Candidate(used / 1e9, 0, hits=hits, num_bytes=max(size, 1))), number)
                for key, (size, used, hits, number) in records.items()
            }
            assert first == min(ranks, key=ranks.__getitem__)
            index.drop(first)
            del records[first]
        index.check_invariants()
        assert index.num_bytes == sum(size for size, *_ in records.values())
    assert set(index) == set(records)


def test_gdsf_keeps_small_entries_and_evicts_in_the_end_what_is_not_used_any_more(url: str) -> None:
    tier = open_tier(with_policy(url, "gdsf"))
    for key, size in ((A, 150), (B, 50), (C, 100)):
        tier.put_many({key: bytes(size)}, Deadline())
    tier.put_many({D: bytes(100)}, Deadline())
    assert present(tier) == {B, C, D}, "A was the largest"
    for _ in range(3):
        tier.get_many([B], Deadline())
    for key in KEYS[4:] * 20:
        tier.put_many({key: bytes(100)}, Deadline())
        tier.get_many([key], Deadline())
    assert B not in present(tier)
