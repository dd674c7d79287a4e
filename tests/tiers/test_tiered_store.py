"""The tiered store moves chunks between tiers behind the engine's back, and never makes it wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.tiers import HandClock, TroubledTier

from kvmosaic.cache import Key
from kvmosaic.errors import DamagedEntry, TierFull, TierUnavailable
from kvmosaic.tiers import Entry, Fetch, TieredStore
from kvmosaic.tiers import fetch_policy as prospects_module

MEBIBYTE = 2**20


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def encode(value: str) -> bytes:
    return value.encode()


def accept(entry: Entry) -> str:
    text = bytes(entry).decode()
    if text.startswith("damaged"):
        raise DamagedEntry("its checksum is wrong")
    return text


@pytest.fixture
def make() -> Iterator[Callable[..., TieredStore[str]]]:
    made: list[TieredStore[str]] = []

    def build(
        *tiers: TroubledTier, max_pending_bytes: int = MEBIBYTE, clock: HandClock | None = None
    ) -> TieredStore[str]:
        made.append(TieredStore(tiers, max_pending_bytes=max_pending_bytes, clock=clock or HandClock()))
        return made[-1]

    yield build
    for tiered_store in made:
        for tier in tiered_store.tiers:
            tier.gate.set()
        tiered_store.close(5)


def fetched(tiered_store: TieredStore[str], wanted: Key, compute_seconds: float | None = None) -> Fetch[str]:
    fetch = tiered_store.fetch(wanted, 1000, accept, compute_seconds)
    assert fetch is not None
    end = time.monotonic() + 60
    while not fetch.is_over:
        tiered_store.wait(0.01)
        assert time.monotonic() < end
    return fetch


def store(tiered_store: TieredStore[str], number: int, value: str, num_bytes: int = 1000, **where: bool) -> bool:
    return tiered_store.store(key(number), value, num_bytes, encode, **({"persistent": True, "volatile": True} | where))


def test_a_complete_chunk_goes_to_persistent_tiers_and_one_that_leaves_to_the_others(make: Callable) -> None:
    host, disk = TroubledTier("host", is_persistent=False), TroubledTier("disk")
    tiered_store = make(host, disk)
    assert store(tiered_store, 1, "a", volatile=False)
    assert store(tiered_store, 2, "b", persistent=False)
    assert tiered_store.flush(60)
    assert (host.entries, disk.entries) == ({key(2): b"b"}, {key(1): b"a"})
    assert tiered_store.pending_bytes == 0 and tiered_store.stats.stored == 2


def test_a_fetch_asks_one_tier_after_the_other_and_goes_on_after_failures(make: Callable) -> None:
    broken, empty, last = TroubledTier("broken"), TroubledTier("empty"), TroubledTier("last")
    broken.error = TierUnavailable("down")
    last.entries[key(1)] = b"a"
    tiered_store = make(broken, empty, last)
    fetch = fetched(tiered_store, key(1))
    assert (fetch.value, fetch.tier_name) == ("a", "last")
    assert fetched(tiered_store, key(2)).value is None
    assert (tiered_store.stats.fetched, tiered_store.stats.missed) == (1, 1)


def test_many_waiters_share_one_fetch(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.entries[key(1)] = b"a"
    disk.gate.clear()
    tiered_store = make(disk)
    fetches = {id(tiered_store.fetch(key(1), 1000, accept, None)) for _ in range(20)}
    assert len(fetches) == 1
    disk.gate.set()
    assert fetched(tiered_store, key(2)).value is None
    assert [keys for what, keys in disk.calls if what == "get"].count(frozenset([key(1)])) == 1


def test_a_fetch_that_brings_its_chunk_at_this_moment_is_not_begun_again(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.entries[key(1)] = b"a"
    tiered_store = make(disk)
    found = fetched(tiered_store, key(1))
    assert tiered_store.fetch(key(1), 1000, accept, None, known=found) is found
    missed = fetched(tiered_store, key(2))
    assert tiered_store.fetch(key(2), 1000, accept, None, known=missed) is not missed


def test_what_waits_to_be_written_is_found_at_once(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    store(tiered_store, 1, "a")
    fetch = tiered_store.fetch(key(1), 1000, accept, None)
    assert fetch is not None and fetch.is_over and fetch.value == "a" and not disk.count("get")


def test_more_than_may_wait_is_dropped_and_counted(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk, max_pending_bytes=2500)
    assert [store(tiered_store, number, "a") for number in range(4)] == [True, True, False, False]
    assert tiered_store.stats.dropped == 2 and tiered_store.pending_bytes == 2000
    disk.gate.set()
    assert tiered_store.flush(60) and set(disk.entries) == {key(0), key(1)} and tiered_store.pending_bytes == 0


@pytest.mark.parametrize("error", [TierUnavailable("down"), TierFull("no room")])
def test_a_chunk_that_could_not_be_stored_is_told_so(make: Callable, error: Exception) -> None:
    disk, told = TroubledTier("disk"), []
    disk.error = error
    tiered_store = make(disk)
    tiered_store.store(key(1), "a", 10, encode, persistent=True, volatile=True, done=told.append)
    assert tiered_store.flush(60)
    disk.error = None
    tiered_store.store(key(1), "a", 10, encode, persistent=True, volatile=True, done=told.append)
    assert tiered_store.flush(60)
    time.sleep(0.05)
    assert told == [False, True] and tiered_store.stats.failed == 1


def test_an_encoder_that_fails_ends_no_thread(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    disk = TroubledTier("disk")
    tiered_store = make(disk)

    def fail(value: str) -> bytes:
        raise RuntimeError("no")

    tiered_store.store(key(1), "a", 10, fail, persistent=True, volatile=True)
    store(tiered_store, 2, "b")
    assert tiered_store.flush(60) and set(disk.entries) == {key(2)}
    assert "a chunk was not stored" in caplog.text


def test_a_damaged_entry_is_put_aside_and_the_next_tier_asked(make: Callable) -> None:
    host, disk = TroubledTier("host", is_persistent=False), TroubledTier("disk")
    host.entries[key(1)], disk.entries[key(1)] = b"damaged", b"a"
    tiered_store = make(host, disk)
    fetch = fetched(tiered_store, key(1))
    assert (fetch.value, fetch.tier_name) == ("a", "disk")
    assert host.aside == {key(1): "its checksum is wrong"} and tiered_store.stats.invalid == 1


def test_what_is_deleted_is_not_found_even_before_the_tier_knows(make: Callable) -> None:
    disk = TroubledTier("disk")
    tiered_store = make(disk)
    store(tiered_store, 1, "a")
    assert tiered_store.flush(60)
    disk.gate.clear()
    store(tiered_store, 2, "b")  # keeps the writer busy
    tiered_store.delete([key(1)])
    assert tiered_store.fetch(key(1), 1000, accept, None) is None
    disk.gate.set()
    assert tiered_store.flush(60) and set(disk.entries) == {key(2)}


def test_what_is_deleted_while_it_waits_or_is_written_does_not_come_back(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    store(tiered_store, 1, "being written")
    while not disk.calls:
        time.sleep(0.001)
    store(tiered_store, 2, "waiting")
    tiered_store.delete([key(1), key(2)])
    store(tiered_store, 3, "later")
    disk.gate.set()
    assert tiered_store.flush(60) and set(disk.entries) == {key(3)} and tiered_store.pending_bytes == 0


def test_what_is_stored_again_and_again_while_it_is_written_is_stored_and_deleted_in_order(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    store(tiered_store, 1, "first")
    while not disk.calls:
        time.sleep(0.001)
    for value in ("second", "third"):
        store(tiered_store, 1, value)
    tiered_store.delete([key(1)])
    disk.gate.set()
    assert tiered_store.flush(60) and not disk.entries and tiered_store.pending_bytes == 0


def test_a_tier_slower_than_computing_is_not_asked_again_but_looked_at_now_and_then(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = TroubledTier("disk")
    disk.entries |= {key(number): b"a" for number in range(20)}
    clock = HandClock()
    disk.get_seconds, disk.sleep = 0.05, clock.advance
    tiered_store = make(disk, clock=clock)
    for number in range(4):  # nothing was known
        assert fetched(tiered_store, key(10 + number), compute_seconds=0.01).value == "a"
    assert tiered_store.fetch(key(1), 1000, accept, 0.01) is None
    assert tiered_store.stats.skipped == 1 and disk.count("get") == 4
    assert fetched(tiered_store, key(2), compute_seconds=1.0).value == "a"
    monkeypatch.setattr(prospects_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(prospects_module, "_LOOK_SHARE", 0.0)
    tiered_store._fetch_policy._records[id(disk)].next_look = 0.0
    disk.get_seconds = 0.0
    assert tiered_store.fetch(key(3), 1000, accept, 0.01) is None, "nobody waits for a look"
    assert tiered_store.stats.looked == 1 and tiered_store.stats.fetched == 5
    while tiered_store._fetch_policy.bytes_per_second(disk) < 2e5:
        time.sleep(0.001)
    assert fetched(tiered_store, key(8), compute_seconds=0.01).value == "a", "it is known to be fast by now"


def test_nobody_waits_longer_than_it_is_worth_and_progress_renews_the_patience_of_those_behind(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    fetches = [tiered_store.fetch(key(number), 1000, accept, None) for number in range(3)]
    while not all(fetch.begun for fetch in fetches[:2]):
        time.sleep(0.001)
    for fetch in fetches[:2]:
        assert not fetch.is_settled(fetch.begun + 0.1, 0.0) and fetch.is_settled(fetch.begun + 0.2, 0.0)
        assert fetch.is_settled(fetch.begun + 0.2, fetch.begun + 0.1), "what others do is no progress of it"
    queued = fetches[2]
    assert not queued.is_settled(queued.started + 0.1, 0.0) and queued.is_settled(queued.started + 0.2, 0.0)
    assert not queued.is_settled(queued.started + 0.2, queued.started + 0.1)


def test_when_all_readers_hang_nobody_else_waits_for_them(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.entries[key(9)] = b"a"
    disk.gate.clear()
    clock = HandClock()
    tiered_store = make(disk, clock=clock)
    fetches = [tiered_store.fetch(key(number), 1000, accept, None) for number in range(2)]
    while not all(fetch.begun for fetch in fetches):
        time.sleep(0.001)
    clock.advance(0.1)
    assert tiered_store.fetch(key(8), 1000, accept, None) is not None
    clock.advance(0.1)
    assert tiered_store.fetch(key(9), 1000, accept, None) is None
    disk.gate.set()
    while not any(fetch.is_over for fetch in fetches):
        tiered_store.wait(0.01)
    assert fetched(tiered_store, key(9)).value == "a"


def test_who_is_first_in_line_is_fetched_first_and_takes_what_it_joins_along(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    blocking = [tiered_store.fetch(key(number), 1000, accept, None) for number in range(2)]
    while not all(fetch.begun for fetch in blocking):
        time.sleep(0.001)
    fetches = [
        tiered_store.fetch(key(number), 1000, accept, None, (rank,)) for number, rank in enumerate([5, 4, 9, 1], 2)
    ]
    assert tiered_store.fetch(key(4), 1000, accept, None, (0,)) is fetches[2]
    disk.gate.set()
    while not all(fetch.is_over for fetch in fetches):
        tiered_store.wait(0.01)
    asked = [next(iter(keys)) for what, keys in disk.calls if what == "get"]
    assert set(asked[2:4]) == {key(4), key(5)} and set(asked[4:]) == {key(2), key(3)}


def test_what_nobody_wants_any_more_is_not_read(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    fetches = [tiered_store.fetch(key(number), 1000, accept, None) for number in range(5)]
    while not all(fetch.begun for fetch in fetches[:2]):
        time.sleep(0.001)
    for fetch in fetches:
        tiered_store.cancel(fetch)
    assert [fetch.is_over for fetch in fetches] == [False, False, True, True, True]
    disk.gate.set()
    assert fetched(tiered_store, key(9)).value is None
    assert disk.count("get") == 3


def test_what_is_deleted_while_it_is_fetched_comes_no_more(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.entries[key(1)] = b"a"
    disk.gate.clear()
    tiered_store = make(disk)
    fetch = tiered_store.fetch(key(1), 1000, accept, None)
    while not fetch.begun:
        time.sleep(0.001)
    tiered_store.delete([key(1)])
    assert fetch.is_over
    disk.gate.set()
    assert tiered_store.flush(60) and fetch.value is None


def test_whoever_waits_is_woken_by_the_end_of_a_fetch_even_if_it_came_before(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.gate.clear()
    tiered_store = make(disk)
    first = tiered_store.fetch(key(1), 1000, accept, None)
    tiered_store.fetch(key(2), 1000, accept, None)
    tiered_store.fetch(key(3), 1000, accept, None)
    seen = tiered_store.num_ended
    tiered_store.wait(0.001, seen)
    tiered_store.cancel(tiered_store.fetch(key(3), 1000, accept, None))
    begin = time.monotonic()
    tiered_store.wait(600, seen)
    assert not first.is_over
    threading.Timer(0.05, disk.gate.set).start()
    tiered_store.wait(600)
    assert time.monotonic() - begin < 300, "it was woken"


def test_late_chunks_are_counted(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.entries[key(1)] = b"a"
    clock = HandClock()
    disk.get_seconds, disk.sleep = 0.3, clock.advance
    tiered_store = make(disk, clock=clock)
    assert fetched(tiered_store, key(1)).value == "a" and tiered_store.stats.late == 1


def test_closing_writes_what_waits_and_closes_every_tier(make: Callable) -> None:
    disk = TroubledTier("disk")
    disk.put_seconds = 0.02
    tiered_store = make(disk)
    for number in range(5):
        store(tiered_store, number, "a")
    tiered_store.close(10)
    assert len(disk.entries) == 5 and disk.is_closed
    assert not store(tiered_store, 9, "a") and tiered_store.fetch(key(1), 10, accept, None) is None
    tiered_store.close()


def test_threads_may_do_everything_at_once(make: Callable) -> None:
    host, disk = TroubledTier("host", is_persistent=False), TroubledTier("disk")
    tiered_store = make(host, disk)
    wrong: list[str] = []

    def run(seed: int) -> None:
        for number in range(60):
            chosen = (seed * 7 + number * 13) % 20
            store(tiered_store, chosen, f"value {chosen}")
            fetch = tiered_store.fetch(key(chosen), 1000, accept, None)
            while fetch is not None and not fetch.is_over:
                tiered_store.wait(0.001)
            if fetch is not None and fetch.value not in (None, f"value {chosen}"):
                wrong.append(str(fetch.value))
            if number % 9 == 0:
                tiered_store.delete([key(chosen)])

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and tiered_store.flush(10) and tiered_store.pending_bytes == 0
