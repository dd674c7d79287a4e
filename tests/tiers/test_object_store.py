"""The object tier: on memory, on files, and over HTTP with a server that answers, hangs, cuts and fails."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from support.server import wait_until
from tiers.conformance import KEYS, TierConformance, entry_of

from kvmosaic.errors import InvalidConfig, TierFull, TierUnavailable
from kvmosaic.tiers import Deadline, Tier
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.object_store import ObjectTier

KEY = KEYS[0]


class _ObjectTierConformance(TierConformance):
    has_quota = False
    keeps_order = False
    num_walks = 6
    num_rounds = 30
    has_exact_stat = False


class TestObjectTierOnFiles(_ObjectTierConformance):
    def open(self, place: Path, quota_bytes: int) -> Tier:
        return ObjectTier.from_url(f"file://{place}")


class Patient(ThreadingHTTPServer):
    """With room for all connections at once: one that is dropped is tried again after a second, which is its limit."""

    request_queue_size = 256


class Bucket:
    """As much of S3 as the tier needs, over HTTP on loopback, with troubles on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status = 0
        """If not 0, what every request is answered with."""
        self.cut_after: int | None = None
        """Bytes after which the connection is closed in the middle of an object."""
        self.gate = threading.Event()
        """Requests wait here; set at first."""
        self.gate.set()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body if bucket.cut_after is None else body[: bucket.cut_after])
                    if bucket.cut_after is not None and len(body) > bucket.cut_after:
                        self.close_connection = True

            def handle_one(self) -> None:
                given = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                bucket.gate.wait()
                url = urlsplit(self.path)
                name = unquote(url.path)
                if bucket.status:
                    self.answer(bucket.status)
                elif self.command == "PUT":
                    bucket.objects[name] = given
                    self.answer(200, ETag='"tag"')
                elif self.command == "DELETE":
                    bucket.objects.pop(name, None)
                    self.answer(204)
                elif self.command == "POST":
                    for key in re.findall(r"<Key>(.*?)</Key>", given.decode()):
                        bucket.objects.pop(f"/bucket/{key}", None)
                    keys = re.findall(r"<Key>.*?</Key>", given.decode())
                    items = "".join(f"<Deleted>{key}</Deleted>" for key in keys)
                    self.answer(200, f"<DeleteResult>{items}</DeleteResult>".encode())
                elif "list-type" in url.query:
                    prefix = "/bucket/" + parse_qs(url.query).get("prefix", [""])[0]
                    items = "".join(
                        f"<Contents><Key>{name[8:]}</Key><Size>{len(data)}</Size><ETag>t</ETag>"
                        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                        for name, data in bucket.objects.items()
                        if name.startswith(prefix)
                    )
                    self.answer(
                        200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()
                    )
                elif name in bucket.objects:
                    modified = "Thu, 01 Jan 2026 00:00:00 GMT"
                    self.answer(200, bucket.objects[name], ETag='"tag"', Last_Modified=modified)
                else:
                    self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one  # noqa: N815

        self.server = Patient(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"s3://bucket/kv?endpoint=http://127.0.0.1:{self.server.server_port}&allow_http=true&region=local"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.gate.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    bucket = Bucket()
    yield bucket
    bucket.close()


def test_objects_over_http(bucket: Bucket) -> None:
    tier = ObjectTier.from_url(bucket.url)
    entries = {key: entry_of(key, 100_000) for key in KEYS}
    assert tier.put_many(entries, Deadline(10)) == set(KEYS)
    assert f"/bucket/kv/{KEY.hex()[:2]}/{KEY.hex()}.safetensors" in bucket.objects
    bucket.objects["/bucket/kv/README"] = b"not ours"
    assert {key: bytes(entry) for key, entry in tier.get_many(KEYS, Deadline(10)).items()} == entries
    assert tier.delete_many(KEYS[:2], Deadline(10)) == set(KEYS[:2])
    tier.quarantine(KEYS[2], "a test", Deadline(10))
    assert tier.exists_many(KEYS, Deadline(10)) == set(KEYS[3:])
    tier.close()


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_a_store_that_fails_is_a_tier_error_without_secrets(bucket: Bucket, status: int) -> None:
    tier = ObjectTier.from_url(bucket.url)
    tier.put_many({KEY: b"entry"}, Deadline(10))
    bucket.status = status
    for call in (
        lambda: tier.put_many({KEY: b"other"}, Deadline(10)),
        lambda: tier.get_many(KEYS, Deadline(10)),
        lambda: tier.exists_many(KEYS, Deadline(10)),
        lambda: tier.delete_many(KEYS, Deadline(10)),
    ):
        with pytest.raises(TierUnavailable, match="fails") as caught:
            call()
        assert "very-secret" not in str(caught.value)
        assert len(str(caught.value)) < 700
    bucket.status = 0
    assert tier.get_many([KEY], Deadline(10)) == {KEY: b"entry"}
    assert tier.stat().failures == 4
    tier.close()


def test_a_store_without_room_is_full(bucket: Bucket) -> None:
    tier = ObjectTier.from_url(bucket.url)
    bucket.status = 507
    with pytest.raises(TierFull, match="no room"):
        tier.put_many({KEY: b"entry"}, Deadline(10))
    tier.close()


@pytest.mark.parametrize("cut_after", [0, 1, 99_999])
def test_an_object_that_is_cut_is_never_returned(bucket: Bucket, cut_after: int) -> None:
    tier = ObjectTier.from_url(bucket.url)
    tier.put_many({KEY: entry_of(KEY, 100_000)}, Deadline(10))
    bucket.cut_after = cut_after
    with pytest.raises(TierUnavailable):
        tier.get_many([KEY], Deadline(10))
    tier.close()


def test_a_store_that_hangs_costs_the_deadline_and_no_threads(bucket: Bucket) -> None:
    tier = ObjectTier.from_url(bucket.url)
    tier.put_many(dict.fromkeys(KEYS, b"entry"), Deadline(10))
    bucket.gate.clear()
    ours = len([thread for thread in threading.enumerate() if "object" in thread.name])
    for _ in range(5):
        for call in (
            lambda: tier.get_many(KEYS, Deadline(0.1)),
            lambda: tier.put_many({KEY: b"other"}, Deadline(0.1)),
            lambda: tier.exists_many(KEYS, Deadline(0.1)),
        ):
            start = time.monotonic()
            with pytest.raises(TierUnavailable, match="did not answer"):
                call()
            assert time.monotonic() - start < 20, "it would hang for ever"
    assert len([thread for thread in threading.enumerate() if "object" in thread.name]) == ours
    bucket.gate.set()
    assert tier.get_many([KEY], Deadline(10))[KEY] in (b"entry", b"other"), "a put that was given up may arrive"
    tier.close()


def test_behind_a_breaker_it_comes_back(bucket: Bucket) -> None:
    breaker = Breaker(ObjectTier.from_url(bucket.url))
    breaker.put_many({KEY: b"entry"}, Deadline(10))
    bucket.gate.clear()
    with pytest.raises(TierUnavailable):
        breaker.get_many([KEY], Deadline(0.1))
    bucket.gate.set()
    wait_until(lambda: not breaker.is_open)
    assert breaker.get_many([KEY], Deadline(10)) == {KEY: b"entry"}
    breaker.close()


def test_a_store_that_is_closed_under_a_call_ends_it(bucket: Bucket) -> None:
    tier = ObjectTier.from_url(bucket.url)
    bucket.gate.clear()
    problems: list[object] = []

    def ask() -> None:
        try:
            problems.append(tier.get_many([KEY], Deadline(20)))
        except TierUnavailable as error:
            problems.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    tier.close()
    thread.join(5)
    assert not thread.is_alive()
    assert isinstance(problems[0], TierUnavailable)
    with pytest.raises(TierUnavailable, match="closed"):
        tier.get_many([KEY], Deadline(1))


def test_nobody_at_the_address_is_a_tier_error() -> None:
    tier = ObjectTier.from_url("s3://bucket?endpoint=http://127.0.0.1:1&allow_http=true&region=local")
    with pytest.raises(TierUnavailable):
        tier.get_many([KEY], Deadline(5))
    tier.close()


def test_files_of_others_are_not_entries_and_a_file_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    tier = ObjectTier.from_url(f"file://{tmp_path}")
    tier.put_many({KEY: entry_of(KEY, 100)}, Deadline(10))
    for name in ("README", "ab/cd.safetensors", "ab/ab.txt", f"00/{KEY.hex()}.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"garbage")
    assert tier.exists_many(KEYS, Deadline(10)) == {KEY}
    (tmp_path / KEY.hex()[:2] / f"{KEY.hex()}.safetensors").unlink()
    assert tier.get_many([KEY], Deadline(10)) == {}
    tier.close()


def test_memory_is_a_store_for_tests() -> None:
    tier = ObjectTier.from_url("memory:")
    buffer = bytearray(b"entry")
    assert tier.put_many({KEY: buffer}, Deadline(10)) == {KEY}
    buffer[:] = b"other"
    assert tier.get_many([KEY], Deadline(10)) == {KEY: b"entry"}
    assert tier.stat().address == "memory:///"
    tier.close()


@pytest.mark.parametrize("how", ["tier.close()", ""])
def test_a_process_that_ends_right_after_a_read_ends_well(how: str) -> None:
    program = f"""
from kvmosaic.tiers import Deadline
from kvmosaic.tiers.object_store import ObjectTier
tier = ObjectTier.from_url("memory:")
tier.put_many({{bytes(32): b"entry"}}, Deadline(10))
tier.get_many([bytes(32)], Deadline(10))
{how}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://h/x", "scheme"),
        ("s3://key:secret@bucket", "environment"),
        ("s3://bucket?quota=5GiB", "no quota; set lifecycle rules"),
        ("s3://bucket?colour=red", "no option 'colour'"),
        ("s3://bucket?region=a&region=b", "given twice"),
        ("s3://bucket?concurrency=0", "1 to 256"),
        ("s3://bucket?concurrency=1.5", "whole number"),
        ("s3://bucket?timeout=0", "0.01 to 600"),
        ("s3://bucket?connect_timeout=x", "number of seconds"),
        ("s3://" + "b" * 5000, "characters"),
        ("file:///proc/nowhere/at/all", "no object tier at"),
    ],
)
def test_a_url_that_says_nothing_sensible_is_refused_with_a_reason(url: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says) as caught:
        ObjectTier.from_url(url)
    assert "secret" not in str(caught.value)
