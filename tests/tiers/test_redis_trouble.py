"""The Redis tier while its server is killed, hung, slow, full, flushed, or written by others."""

from __future__ import annotations

import random
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from support.programs import installed
from support.redis import RedisServer, Wire
from support.server import wait_until
from tiers.conformance import KEYS, entry_of, is_marked, marked

from kvmosaic.cache import Key
from kvmosaic.errors import InvalidConfig, TierError, TierFull, TierUnavailable
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.redis import Command, RedisTier, Session

KEY = KEYS[0]
MIB = 2**20
PATIENT = "timeout=10&connect_timeout=10"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def wire(server: RedisServer) -> Iterator[Wire]:
    wire = Wire(str(server.socket))
    yield wire
    wire.close()


def open_tier(place: RedisServer | Wire, options: str = "") -> RedisTier:
    """Patient with a server that is only slow, as on a busy machine."""
    return open_hasty_tier(place, f"&{PATIENT}{options}")


def open_hasty_tier(place: RedisServer | Wire, options: str = "") -> RedisTier:
    """Waits as long as a tier does that nobody has told how long."""
    url = place.url if isinstance(place, RedisServer) else f"redis://127.0.0.1:{place.port}/0"
    return RedisTier.from_url(f"{url}?part=65536{options}")


def name_of(key: Key) -> str:
    return f"kvmosaic:{{{key.hex()}}}"


def test_a_server_that_is_killed_is_a_tier_error_and_a_new_one_is_used_at_once(server: RedisServer) -> None:
    tier = open_tier(server)
    for _ in range(3):
        assert tier.put_many({KEY: entry_of(KEY, 1000)}, Deadline(5)) == {KEY}
        server.kill()
        with pytest.raises(TierUnavailable, match="fails"):
            tier.get_many([KEY], Deadline(5))
        with pytest.raises(TierUnavailable):
            tier.put_many({KEY: entry_of(KEY, 1000)}, Deadline(5))
        server.start()
        assert tier.get_many([KEY], Deadline(5)) == {}
    tier.close()


@pytest.mark.parametrize("at_bytes", [0, 3, 100, 70_000, 1_000_000])
def test_a_connection_cut_anywhere_gives_an_error_or_the_entry(wire: Wire, at_bytes: int) -> None:
    entry = entry_of(KEY, 2 * MIB)
    writer = open_tier(wire)
    writer.put_many({KEY: entry}, Deadline(10))
    wire.cut_after = at_bytes
    tier = open_tier(wire)
    with pytest.raises(TierUnavailable):
        tier.get_many([KEY], Deadline(10))
    wire.cut_after = None
    assert tier.get_many([KEY], Deadline(10)) == {KEY: entry}


def test_a_write_that_is_cut_is_never_seen_and_what_it_leaves_expires(server: RedisServer, wire: Wire) -> None:
    tier = open_tier(wire)
    watcher = open_tier(server)
    entry = entry_of(KEY, MIB)
    for cut_after in range(0, 200, 7):  # replies are short: this is anywhere up to RENAME
        wire.cut_after = cut_after
        try:
            tier.put_many({KEY: entry}, Deadline(10))
        except TierUnavailable:
            assert watcher.get_many([KEY], Deadline(10)) in ({}, {KEY: entry})
    wire.cut_after = None
    assert tier.put_many({KEYS[1]: entry_of(KEYS[1], 3 * MIB)}, Deadline(10)) == {KEYS[1]}
    with server.client() as client:
        drafts = list(client.scan_iter("kvmosaic:{*}:*"))
        assert drafts and all(0 < client.ttl(draft) <= 60 for draft in drafts)
        assert client.ttl(name_of(KEYS[1])) == -1


def test_a_draft_that_redis_evicts_in_the_middle_never_becomes_the_entry(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmosaic.tiers.redis._WINDOW_BYTES", 2**17)
    tier = open_tier(server)
    tier.put_many({KEY: b"before"}, Deadline(10))
    real = Session.ask
    with server.client() as client:
        for evicted in (1, 2, 3):
            window = 0

            def ask(session: Session, *commands: Command, evicted: int = evicted) -> list[object]:
                nonlocal window
                replies = real(session, *commands)
                if "HSET" in (command[0] for command in commands):
                    window += 1
                    if window == evicted:
                        client.delete(str(commands[1][1]))
                return replies

            with monkeypatch.context() as patch:
                patch.setattr(Session, "ask", ask)
                stored = tier.put_many({KEY: entry_of(KEY, 350_000)}, Deadline(10))
            assert window == 3 and not stored
            assert tier.get_many([KEY], Deadline(10)) == {KEY: b"before"}
        assert all(0 < client.ttl(draft) <= 60 for draft in client.scan_iter("kvmosaic:{*}:*"))


@pytest.mark.parametrize("how", ["replaced", "grown", "gone"])
def test_an_entry_that_changes_during_a_read_is_read_whole_or_not_at_all(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr("kvmosaic.tiers.redis._WINDOW_BYTES", 2**17)
    tier, other = open_tier(server), open_tier(server)
    old, new = (entry_of(KEY, 350_000, version) for version in range(2))
    real = Session.ask
    with server.client() as client:
        for moment in range(1, 10):  # two questions, and two for each of three windows
            tier.put_many({KEY: old}, Deadline(10))
            asked = most = 0

            def ask(session: Session, *commands: Command, moment: int = moment) -> list[object]:
                nonlocal asked, most
                asked += 1
                if asked == moment:
                    if how == "replaced":
                        other.put_many({KEY: new}, Deadline(10))
                    else:
                        client.hset(name_of(KEY), "2/6", bytes(MIB)) if how == "grown" else client.delete(name_of(KEY))
                replies = real(session, *commands)
                if ("HMGET", name_of(KEY)) in (command[:2] for command in commands) and isinstance(replies[-1], list):
                    most = max(most, *(len(value or b"") for value in replies[-1][0]))
                return replies

            with monkeypatch.context() as patch:
                patch.setattr(Session, "ask", ask)
                found = tier.get_many([KEY], Deadline(10))
            assert most <= 2**16
            if how == "replaced":
                assert found == {KEY: new if moment < 9 else old}
            else:
                assert found in ({}, {KEY: old})


@pytest.mark.parametrize("has_connection", [True, False])
def test_a_hung_server_costs_one_pause_and_is_used_again_when_it_goes_on(
    server: RedisServer, has_connection: bool
) -> None:
    tier = open_hasty_tier(server)
    entries = {key: entry_of(key, 300_000) for key in KEYS}
    with open_tier_closing(server) as writer:
        writer.put_many(entries, Deadline(10))
    if has_connection:
        tier.get_many(KEYS, Deadline(10))
    server.hang()
    for call in (
        lambda: tier.get_many(KEYS, Deadline(30)),
        lambda: tier.put_many(entries, Deadline(30)),
        lambda: tier.exists_many(KEYS, Deadline(30)),
    ):
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="does not answer"):
            call()
        assert time.monotonic() - start < 15, "not the deadline"
    server.go_on()

    def is_used_again() -> bool:
        try:
            return tier.get_many(KEYS, Deadline(10)) == entries
        except TierUnavailable:  # on a busy machine, a server that goes on may be late once more
            return False

    wait_until(is_used_again)


class open_tier_closing:  # noqa: N801
    def __init__(self, place: RedisServer | Wire) -> None:
        self.tier = open_tier(place)

    def __enter__(self) -> RedisTier:
        return self.tier

    def __exit__(self, *_: object) -> None:
        self.tier.close()


def test_a_server_that_falls_silent_in_the_middle_of_an_entry_costs_one_pause(wire: Wire) -> None:
    tier = open_tier(wire)
    tier.put_many({KEY: entry_of(KEY, 2 * MIB)}, Deadline(10))
    wire.silent_after = 300_000
    reader = open_hasty_tier(wire)
    start = time.monotonic()
    with pytest.raises(TierUnavailable, match="does not answer"):
        reader.get_many([KEY], Deadline(60))
    assert time.monotonic() - start < 30, "not the deadline"


def test_a_server_that_drips_is_ended_by_the_deadline_and_opens_the_breaker(wire: Wire) -> None:
    tier = open_tier(wire)
    tier.put_many({KEY: entry_of(KEY, 200_000), KEYS[1]: b"short"}, Deadline(10))
    breaker = Breaker(open_tier(wire), in_background=False)
    wire.piece, wire.delay = 100, 0.01
    start = time.monotonic()
    found = breaker.get_many([KEYS[1], KEY], Deadline(3))  # it is never silent for long
    assert time.monotonic() - start < 15, "all would take 20 s"
    assert KEY not in found
    assert breaker.is_open
    wire.piece, wire.delay = 2**16, 0.0
    assert open_tier(wire).get_many([KEY], Deadline(10)) == {KEY: entry_of(KEY, 200_000)}


def test_a_place_where_nobody_answers_costs_the_connect_timeout() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = [socket.socket() for _ in range(4)]
        for other in others:  # fills the backlog: the next connect is not answered
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        tier = RedisTier.from_url(f"redis://127.0.0.1:{full.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(TierUnavailable, match="does not answer"):
            tier.get_many([KEY], Deadline(60))
        assert time.monotonic() - start < 30, "not the deadline"
        for other in others:
            other.close()


def test_behind_a_breaker_a_hung_server_is_free_and_comes_back(server: RedisServer) -> None:
    breaker = Breaker(open_hasty_tier(server))
    breaker.put_many({KEY: b"entry"}, Deadline(5))
    server.hang()
    with pytest.raises(TierUnavailable):
        breaker.get_many([KEY], Deadline(5))
    start = time.monotonic()
    for _ in range(1000):
        with pytest.raises(TierUnavailable):
            breaker.get_many([KEY], Deadline(5))
    assert time.monotonic() - start < 30, "a pause of each would be a hundred seconds"
    server.go_on()
    wait_until(lambda: not breaker.is_open)
    assert breaker.get_many([KEY], Deadline(5)) == {KEY: b"entry"}
    breaker.close()


def test_no_memory_left_is_full_and_leaves_nothing_behind(server: RedisServer) -> None:
    tier = open_tier(server)
    entry = entry_of(KEY, 2 * MIB)
    tier.put_many({KEY: entry}, Deadline(10))
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + MIB)
        for key in KEYS[1:4]:
            with pytest.raises(TierFull, match=r"has no memory left .* raise its maxmemory"):
                tier.put_many({key: entry_of(key, 20 * MIB)}, Deadline(10))
            assert not list(client.scan_iter(f"{name_of(key)}*"))
        assert tier.get_many(KEYS, Deadline(10)) == {KEY: entry}
        assert tier.delete_many([KEY], Deadline(10)) == {KEY}
    assert tier.put_many({KEYS[1]: entry_of(KEYS[1], MIB)}, Deadline(10)) == {KEYS[1]}


def test_what_no_memory_is_left_for_expires_even_if_the_server_cannot_be_told_to_clean_up(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmosaic.tiers.redis._WINDOW_BYTES", 2**18)
    tier = open_tier(server)
    tier.put_many({KEYS[2]: entry_of(KEYS[2], MIB)}, Deadline(10))  # a connection takes memory, too
    real = Session.ask

    def ask(session: Session, *commands: Command) -> list[object]:
        if "UNLINK" in (command[0] for command in commands):
            raise TimeoutError
        return real(session, *commands)

    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 2 * MIB)
        with monkeypatch.context() as patch:
            patch.setattr(Session, "ask", ask)
            with pytest.raises(TierUnavailable):
                tier.put_many({KEY: entry_of(KEY, 4 * MIB)}, Deadline(10))
        [draft] = client.scan_iter(f"{name_of(KEY)}*")
        assert 0 < client.ttl(draft) <= 60
        client.delete(draft)  # as if it had expired
        assert tier.put_many({KEYS[1]: entry_of(KEYS[1], MIB // 4)}, Deadline(10)) == {KEYS[1]}


def test_redis_that_evicts_by_itself_means_misses_only(server: RedisServer) -> None:
    tier = open_tier(server)
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", "10mb")
    keys = [Key(bytes([i]) * 32) for i in range(60)]
    for key in keys:
        assert tier.put_many({key: entry_of(key, 500_000)}, Deadline(10)) <= {key}
        found = tier.get_many(keys, Deadline(10))
        assert all(bytes(entry) == entry_of(key, 500_000) for key, entry in found.items())
    assert 0 < len(tier.get_many(keys, Deadline(10))) < 30
    assert tier.exists_many(keys, Deadline(10)) == tier.get_many(keys, Deadline(10)).keys()


def test_a_part_that_vanishes_or_changes_is_a_miss(server: RedisServer) -> None:
    tier = open_tier(server)
    with server.client() as client:
        for part, value in product(("version", *(f"{i}/4" for i in range(4))), (None, b"", b"x", bytes(MIB))):
            tier.put_many({KEY: entry_of(KEY, 200_000)}, Deadline(10))
            assert client.hexists(name_of(KEY), part)
            client.hdel(name_of(KEY), part) if value is None else client.hset(name_of(KEY), part, value)
            assert not tier.get_many([KEY], Deadline(10))
            assert not tier.exists_many([KEY], Deadline(10))


def test_garbage_under_our_names_is_a_miss_and_is_overwritten(server: RedisServer) -> None:
    tier = open_tier(server)
    name = name_of(KEY)
    version = {"version": "0" * 31 + "2"}
    with server.client() as client:
        for garbage in (
            b"",
            b"garbage",
            b"\xff" * MIB,
            [b"a"],
            {"a": b"b"},
            version,
            {**version, "a": b"b", "c": b"d"},
            {"version": b"\xff" * MIB, "0/1": b"entry"},
            {**version, "0/2": b"a", "1/2": b"longer"},
            {**version, "0/2": b"longer", "1/2": b""},
            {**version, "0/3": b"ab", "1/3": b"a", "2/3": b"a"},
        ):
            client.delete(name)
            if isinstance(garbage, bytes):
                client.set(name, garbage)
            else:
                client.hset(name, mapping=garbage) if isinstance(garbage, dict) else client.rpush(name, *garbage)
            client.set("kvmosaic:{not hex}", b"garbage")
            assert tier.get_many([KEY], Deadline(10)) == {}
            assert tier.exists_many([KEY], Deadline(10)) == set()
            assert tier.put_many({KEY: b"entry"}, Deadline(10)) == {KEY}
            assert tier.get_many([KEY], Deadline(10)) == {KEY: b"entry"}
            client.flushall()


def test_clients_that_write_the_same_keys_under_load_read_no_mixture_and_leave_no_drafts(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmosaic.tiers.redis._WINDOW_BYTES", 2**16)
    tiers = [open_tier(server) for _ in range(2)]
    problems: list[str] = []

    def walk(number: int) -> None:
        choose, tier = random.Random(number), tiers[number % 2]
        for version in range(14):
            some = {key: marked(key, choose.randrange(40, 150_000), version) for key in choose.sample(KEYS, 3)}
            if tier.put_many(some, Deadline(30)) != some.keys():
                problems.append("not stored")
            for key, entry in tier.get_many(KEYS, Deadline(30)).items():
                if not is_marked(key, entry):
                    problems.append(f"a wrong entry of {len(entry)} bytes")
            tier.delete_many(choose.sample(KEYS, 1), Deadline(30))

    threads = [threading.Thread(target=walk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    with server.client() as client:
        names = set(client.scan_iter("*"))
        assert names == {name_of(key).encode() for key in tiers[0].exists_many(KEYS, Deadline(30))}
        assert all(client.ttl(name) == -1 for name in names)


def test_a_server_restarted_again_and_again_under_load_gives_errors_and_misses_only(server: RedisServer) -> None:
    tier = open_tier(server)
    problems: list[str] = []
    is_over = threading.Event()

    def walk(number: int) -> None:
        choose, version = random.Random(number), 0
        while not is_over.is_set():
            version += 1
            try:
                key = choose.choice(KEYS)
                tier.put_many({key: marked(key, choose.randrange(40, 300_000), version)}, Deadline(5))
                for found, entry in tier.get_many(KEYS, Deadline(5)).items():
                    if not is_marked(found, entry):
                        problems.append(f"a wrong entry of {len(entry)} bytes")
            except TierError:
                time.sleep(0.01)
            except Exception as error:
                problems.append(repr(error))
                return

    threads = [threading.Thread(target=walk, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        time.sleep(0.1)
        server.restart()
    is_over.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert tier.put_many({KEY: b"entry"}, Deadline(5)) == {KEY}


def test_a_password_is_needed_and_never_told(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "open sesame/&")
    try:
        good = RedisTier.from_url(f"unix://:open%20sesame%2F%26@{server.socket}?{PATIENT}")
        assert good.put_many({KEY: b"entry"}, Deadline(5)) == {KEY}
        for url in (f"unix://{server.socket}?{PATIENT}", f"unix://:wrong-secret@{server.socket}?{PATIENT}"):
            tier = RedisTier.from_url(url)
            with pytest.raises(TierUnavailable, match="does not let us in") as caught:
                tier.get_many([KEY], Deadline(5))
            assert "wrong-secret" not in str(caught.value) + repr(tier.settings) + repr(tier.stat())
        assert "sesame" not in repr(good.settings) + repr(good.stat())
    finally:
        server.close()


def test_a_replica_is_read_only(server: RedisServer) -> None:
    tier = open_tier(server)
    tier.put_many({KEY: b"entry"}, Deadline(5))
    with server.client() as client:
        client.replicaof("127.0.0.1", 1)
    with pytest.raises(TierUnavailable, match="read-only replica"):
        tier.put_many({KEYS[1]: b"entry"}, Deadline(5))


def test_databases_and_prefixes_are_apart(server: RedisServer) -> None:
    tiers = [open_tier(server, options) for options in ("", "&prefix=other", "&db=3", "&prefix={kv}:x")]
    for number, tier in enumerate(tiers):
        assert tier.put_many({KEY: bytes([number])}, Deadline(5)) == {KEY}
    for number, tier in enumerate(tiers):
        assert tier.get_many([KEY], Deadline(5)) == {KEY: bytes([number])}


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://h:0", "port"),
        ("redis://h:99999", "port"),
        ("redis://:secret/word@h", "cannot be read"),
        ("redis://h/x", "whole number"),
        ("redis://h/0?db=70000", "0 to 65535"),
        ("redis://h?timeout=0", "0.01 to 60"),
        ("redis://h?timeout=1e9", "number of seconds"),
        ("redis://h?connect_timeout=61", "0.01 to 60"),
        ("redis://h?connections=0", "1 to 256"),
        ("redis://h?part=1", "from 1024"),
        ("redis://h?quota=1GiB", "no quota: Redis itself evicts.* set its maxmemory"),
        ("redis://h?prefix=*", "letters"),
        ("redis://h?prefix=", "letters"),
        ("redis://h?colour=red", "no option 'colour'"),
        ("redis://h?part=2MiB&part=1MiB", "given twice"),
        ("unix://", "needs its path"),
        ("http://h", "scheme"),
        ("redis://" + "h" * 5000, "characters"),
    ],
)
def test_a_url_that_says_nothing_sensible_is_refused_with_a_reason(url: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as caught:
        RedisTier.from_url(url)
    assert "secret" not in str(caught.value)


def test_what_a_url_says_is_used() -> None:
    settings = RedisTier.from_url(
        "rediss://us%40er:pa%2Fss@[::1]:7000/5?prefix=a:b&timeout=1.5&connections=3&part=2MiB&ca=/ca.pem"
    ).settings
    assert (settings.username, settings.password, settings.host, settings.port) == ("us@er", "pa/ss", "::1", 7000)
    assert (settings.db, settings.prefix, settings.pause_seconds) == (5, "a:b", 1.5)
    assert (settings.max_connections, settings.part_bytes, settings.ca_file) == (3, 2**21, "/ca.pem")
    assert settings.address == "rediss://[::1]:7000/5"


def test_tls_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost".split()
    new += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([installed("openssl", "openssl"), *new], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    server = RedisServer(tmp_path, *tls, "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no")
    try:
        url = f"rediss://127.0.0.1:{port}/0?{PATIENT}"
        tier = RedisTier.from_url(f"{url}&ca={certificate}")
        assert tier.put_many({KEY: entry_of(KEY, 3 * MIB)}, Deadline(20)) == {KEY}
        assert tier.get_many([KEY], Deadline(20)) == {KEY: entry_of(KEY, 3 * MIB)}
        with pytest.raises(TierUnavailable, match="certificate verify failed"):
            RedisTier.from_url(url).get_many([KEY], Deadline(20))
        tier.close()
    finally:
        server.close()
