"""What others can do to the places of the tiers, and processes that die over them: one entry is lost, and no more."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from support.redis import RedisServer
from support.server import ServeCommand, wait_until
from tiers.conformance import entry_of
from tiers.damage import DAMAGES, Damaged
from tiers.faulty_files import FaultyFiles

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError
from kvmosaic.lab.bench.measurement import forget_peak, resident_bytes
from kvmosaic.tiers import Deadline, Tier, TieredStore
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.disk.files import is_draft
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.object_store import ObjectTier
from kvmosaic.tiers.redis import RedisTier, Session

MIB = 2**20
NUM_DAMAGES = int(os.environ.get("ATTACKS", "300"))
"""Of the random ones; a long run has 10,000."""
DOCUMENTS = [f"Ferry {number} goes to Oak Island at {number} o'clock. " * 12 for number in (3, 5)]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


def path_of(place: Path, key: Key) -> Path:
    return place / key[:1].hex() / f"{key.hex()}.safetensors"


def keys_of(count: int) -> list[Key]:
    return [Key(bytes([number + 1]) * 32) for number in range(count)]


def ask(url: str) -> str:
    body = {
        "messages": [{"role": "user", "content": "When does ferry 3 go?"}],
        "documents": [{"text": text} for text in DOCUMENTS],
        "max_tokens": 6,
        "temperature": 0,
    }
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def metric(url: str, name: str) -> float:
    found = re.findall(rf"^kvmosaic:{name} (\S+)$", httpx.get(f"{url}/metrics", timeout=60).text, re.MULTILINE)
    return float(found[0])


@pytest.mark.parametrize("kind", ["disk", "file", "redis"])
def test_entries_that_grew_to_gigabytes_are_not_read_into_the_server(
    tmp_path: Path, redis: RedisServer, kind: str
) -> None:
    place = tmp_path / "place"
    patient = f"{redis.url}?timeout=10&connect_timeout=10"
    url = {"disk": f"disk:{place}?quota=8GiB&durable=no", "file": f"file://{place}", "redis": patient}[kind]
    arguments = ("--chunk-tier", url, "--chunk-loading", "always", "--repair", "none")
    with ServeCommand(*arguments, OMP_NUM_THREADS="1") as server:
        expected = ask(server.until_ready().url)
        server.stop()
        assert server.wait() == 0
    grown = grow(redis) if kind == "redis" else grow_files(place)
    assert grown == 2
    with ServeCommand(*arguments, OMP_NUM_THREADS="1") as server:
        server.until_ready()
        before = resident_bytes(server.process.pid)
        forget_peak(server.process.pid)
        assert ask(server.url) == expected
        peak = resident_bytes(server.process.pid, peak=True)
        assert before is not None and peak is not None
        print(f"{kind}: {(peak - before) / MIB:.0f} MiB more")
        assert peak - before < 200 * MIB
        tier = "object" if kind == "file" else kind
        assert metric(server.url, rf'tier_quarantined_total{{model_name="reader",tier="{tier}"}}') == grown
        assert metric(server.url, r'tier_fetches_total{model_name="reader",outcome="invalid"}') == grown
        server.stop()
        assert server.wait() == 0
    if kind != "redis":
        assert sum(path.stat().st_size for path in place.rglob("*.safetensors")) < 20 * MIB


def grow_files(place: Path) -> int:
    """Makes every entry a sparse file of 1.1 GB."""
    paths = list(place.glob("??/*.safetensors"))
    for path in paths:
        os.truncate(path, 1_100_000_000)
    return len(paths)


def grow(redis: RedisServer) -> int:
    """Gives every entry 8 parts of 32 MiB."""
    with redis.client() as client:
        names = list(client.scan_iter("kvmosaic:{*}"))
        for name in names:
            client.delete(name)
            client.hset(name, "version", f"{8 * 32 * MIB:032x}")
            for part in range(8):
                client.hset(name, f"{part}/8", bytes(32 * MIB))
        return len(names)


class Reuse:
    """40 known entries that are asked for, while new ones come that the place cannot take."""

    def __init__(self, tier: Tier) -> None:
        self.keys = keys_of(40)
        self.tiered_store: TieredStore[bytes] = TieredStore([Breaker(tier)], max_pending_bytes=2**24, loading="always")
        self.tier = tier

    def fill(self) -> None:
        for key in self.keys:
            assert self.tier.put_many({key: bytes(key)}, Deadline(30)) == {key}

    def count(self) -> int:
        """How many of the known ones are found, with a write that fails before each."""
        found = 0
        for number, key in enumerate(self.keys):
            new = Key(bytes([200, number]) * 16)
            self.tiered_store.store(new, bytes(new), 32, bytes, persistent=True, volatile=True)
            self.tiered_store.flush(30)
            fetch = self.tiered_store.fetch(key, 32, bytes, None)
            if fetch is not None:
                wait_until(lambda fetch=fetch: fetch.is_over)
                found += fetch.value == bytes(key)
        return found


def test_a_disk_that_cannot_be_written_is_still_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    is_read_only = threading.Event()
    writing = ("write", "sync", "rename", "remove", "make_folder", "set_time", "lock", "flush")

    def fault(_: int, name: str) -> int | None:
        return errno.EROFS if is_read_only.is_set() and name in writing else None

    reuse = Reuse(DiskTier(tmp_path / "place", 2**20, durable=False, files=FaultyFiles(fault)))
    reuse.fill()
    is_read_only.set()
    with caplog.at_level(logging.INFO, "kvmosaic"):
        found = reuse.count()
        print(f"{found} of 40 are reused")
        said = [record.message for record in caplog.records if "cannot be written" in record.message]
        assert found == 40 and len(said) == 1, caplog.text
        is_read_only.clear()
        wait_until(lambda: "can be written again" in caplog.text)
    reuse.tiered_store.close()


@pytest.mark.parametrize("how", ["replicas", "replica"])
def test_a_redis_that_cannot_be_written_is_still_read(redis: RedisServer, how: str) -> None:
    reuse = Reuse(RedisTier.from_url(f"{redis.url}?timeout=10&connect_timeout=10"))
    reuse.fill()
    with redis.client() as client:
        match how:
            case "replicas":
                client.config_set("min-replicas-to-write", 1)
            case "replica":
                client.replicaof("127.0.0.1", 1)
    found = reuse.count()
    print(f"{found} of 40 are reused")
    assert found == 40
    reuse.tiered_store.close()


KILLED = """
import os, signal, sys
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.disk.files import RealFiles
class Fatal(RealFiles):
    def rename(self, *names, **folders):
        os.kill(os.getpid(), signal.SIGKILL)
tier = DiskTier({place!r}, {quota}, durable=False, files=Fatal())
tier.put_many({{os.urandom(32): bytes({num_bytes})}}, Deadline())
"""


def bytes_in(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def test_writers_that_are_killed_leave_no_more_than_the_quota(tmp_path: Path) -> None:
    place, quota = tmp_path / "place", 10 * MIB
    script = KILLED.format(place=str(place), quota=quota, num_bytes=9 * quota // 10)
    other = DiskTier(place, quota, durable=False)
    worst = 0
    for number in range(10):
        status = subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode
        assert status == -9
        worst = max(worst, bytes_in(place))
        key = Key(bytes([number]) * 32)
        assert other.put_many({key: bytes(quota // 5)}, Deadline()) == {key}
        worst = max(worst, bytes_in(place))
    print(f"{worst / quota:.1f} times the quota")
    assert worst <= 1.1 * quota
    DiskTier(place, quota).close()
    assert not [path for path in place.rglob("*") if is_draft(path.name)]


def test_a_folder_in_place_of_an_entry_costs_this_entry_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(40)
    tier = DiskTier(tmp_path / "place", 2**20, durable=False)
    path = path_of(tmp_path / "place", keys[0])
    path.mkdir(parents=True)
    (path / "mine").write_text("mine")
    breaker = Breaker(tier, in_background=False)
    entries = {key: entry_of(key, 100) for key in keys}
    for _ in range(3):
        for key, entry in entries.items():
            assert breaker.put_many({key: entry}, Deadline()) == ({key} if key != keys[0] else set())
        assert breaker.put_many(entries, Deadline()) == set(keys[1:])
        assert breaker.get_many(keys, Deadline()) == {key: entries[key] for key in keys[1:]}
        assert breaker.exists_many(keys, Deadline()) == set(keys[1:])
        assert breaker.delete_many(keys[:1], Deadline()) == set()
        breaker.quarantine(keys[0], "a test", Deadline())
    assert not breaker.is_open and tier.stat().failures == 0
    assert (path / "mine").read_text() == "mine"
    assert len([record for record in caplog.records if str(path) in record.message]) == 1, caplog.text


def test_a_folder_in_place_of_an_object_costs_this_object_only(tmp_path: Path) -> None:
    keys = keys_of(8)
    tier = ObjectTier.from_url(f"file://{tmp_path / 'place'}")
    path = path_of(tmp_path / "place", keys[0])
    path.mkdir(parents=True)
    (path / "mine").write_text("mine")
    breaker = Breaker(tier, in_background=False)
    entries = {key: entry_of(key, 100) for key in keys}
    for _ in range(2):
        assert breaker.put_many(entries, Deadline()) == set(keys[1:])
        assert {key: bytes(entry) for key, entry in breaker.get_many(keys, Deadline()).items()} == {
            key: entries[key] for key in keys[1:]
        }
        assert breaker.exists_many(keys, Deadline()) == set(keys[1:])
        breaker.delete_many(keys[:1], Deadline())
    assert not breaker.is_open and tier.stat().failures == 0
    assert (path / "mine").read_text() == "mine"
    tier.close()


REPLIES: tuple[object, ...] = (None, b"x", -1, 2**70, [], [None], [[None]], [b"x", None], [[], None, b"-"], [1] * 9)


@pytest.mark.parametrize("reply", REPLIES, ids=repr)
def test_any_reply_of_redis_is_a_miss_or_an_error_of_the_tier(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, reply: object
) -> None:
    keys = keys_of(3)
    entries = {key: entry_of(key, 3000) for key in keys}
    tier = RedisTier.from_url(f"{redis.url}?part=1024&timeout=10&connect_timeout=10")
    real = Session.ask
    asked, wrong = 0, -1

    def ask(session: Session, *commands: tuple[object, ...]) -> list[object]:
        nonlocal asked
        asked += 1
        replies = real(session, *commands)  # type: ignore[arg-type]
        return [reply for _ in replies] if asked == wrong else replies

    monkeypatch.setattr(Session, "ask", ask)
    calls: tuple[Callable[[], object], ...] = (
        lambda: tier.put_many(entries, Deadline(30)),
        lambda: tier.get_many(keys, Deadline(30)),
        lambda: tier.exists_many(keys, Deadline(30)),
        lambda: tier.touch(keys, Deadline(30)),
        lambda: tier.quarantine(keys[0], "a test", Deadline(30)),
        lambda: tier.delete_many(keys[1:2], Deadline(30)),
    )
    for call in calls:
        for wrong in range(1, 12):
            asked = 0
            try:
                found = call()
            except TierError:
                continue
            if isinstance(found, dict):
                assert all(entry == entries[key] for key, entry in found.items())
            if asked < wrong:
                break
        tier.stat()
    wrong = -1
    assert tier.put_many(entries, Deadline(30)) == set(keys)
    assert tier.get_many(keys, Deadline(30)) == entries
    tier.close()


def test_no_damage_of_a_disk_tier_is_ever_used(quick_folder: Path) -> None:
    """Entries as the engine writes them, damaged in every way and asked for as the engine asks."""
    damaged = Damaged(quick_folder / "place", seed=1)
    done = damaged.run(NUM_DAMAGES, seconds=10.0 if NUM_DAMAGES <= 300 else None)
    print(json.dumps(done))
    assert all(done[kind] > 0 for kind in DAMAGES)
    assert done["wrong"] == 0
