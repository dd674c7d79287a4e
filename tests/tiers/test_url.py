from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidConfig
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.host import HostTier
from kvmosaic.tiers.url import MAX_URL_CHARACTERS, TierSpec, open_tier, parse_tier_url


@pytest.mark.parametrize(
    ("url", "kind", "address", "quota"),
    [
        ("host:4GiB", "host", "", 4 * 2**30),
        ("HOST: 512 MB", "host", "", 512 * 10**6),
        ("disk:/var/cache/kvmosaic?quota=100GiB", "disk", "/var/cache/kvmosaic", 100 * 2**30),
        ("disk:///var/cache/x?quota=1GiB", "disk", "/var/cache/x", 2**30),
        ("disk:relative/folder?quota=1000", "disk", "relative/folder", 1000),
        ("disk:/a%20b%3Fc?quota=1K&durable=no", "disk", "/a b?c", 1024),
        ("redis://localhost:6379/0", "redis", "redis://localhost:6379/0", None),
        ("redis://user:secret@cache:7000/3?timeout=1", "redis", "redis://cache:7000/3", None),
        ("rediss://:secret@cache", "redis", "rediss://cache:6379/0", None),
        ("unix:///run/redis.sock?db=1", "redis", "unix:///run/redis.sock?db=1", None),
        ("s3://bucket/prefix?secret_access_key=secret", "object", "s3://bucket/prefix", None),
        ("s3://key:sec/ret@bucket/prefix", "object", "s3://bucket/prefix", None),
        ("gs://bucket", "object", "gs://bucket", None),
        ("az://container/prefix", "object", "az://container/prefix", None),
        ("file:///mnt/share", "object", "file:///mnt/share", None),
        ("memory:", "object", "memory:", None),
    ],
)
def test_urls_are_read(url: str, kind: str, address: str, quota: int | None) -> None:
    spec = parse_tier_url(url)
    assert (spec.kind, spec.address, spec.quota_bytes) == (kind, address, quota)
    assert "secret" not in repr(spec)
    assert "sec/ret" not in repr(spec)


def test_a_disk_tier_need_not_wait_for_the_disk() -> None:
    assert parse_tier_url("disk:/x?quota=1G").durable
    assert not parse_tier_url("disk:/x?quota=1G&durable=no").durable


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("4GiB", "begins with its kind"),
        ("/var/cache", "begins with its kind"),
        ("disc:/var/cache?quota=1G", "no tier of kind 'disc'"),
        ("http://localhost", "no tier of kind 'http'"),
        ("host:", "needs a size"),
        ("host:big", "'big' is not a size"),
        ("host:0", "between 1 and"),
        ("host:-1", "not a size"),
        ("host:9999999999TiB", "between 1 and"),
        ("host:/mnt", "not at a place"),
        ("host:4GiB?pinned=yes", "no option 'pinned'; it has eviction"),
        ("host:4GiB?", "no option after its"),
        ("host:4GiB?eviction=mru", "eviction is 'mru'; choose 'lru' or 'lfu'"),
        ("disk:/x?quota=1G&eviction=", "eviction is ''; choose 'lru'"),
        ("disk:", "needs a folder"),
        ("disk:?quota=1G", "needs a folder"),
        ("disk:/x", "needs a quota: disk:/x\\?quota="),
        ("disk:/x?", "needs a quota"),
        ("disk:/x?quota", "options of a disk tier cannot be read"),
        ("disk:/x?quota=", "'' is not a size"),
        ("disk:/x?quota=lots", "'lots' is not a size"),
        ("disk:/x?quota=1G&", "options of a disk tier cannot be read"),
        ("disk:/x?quota=1G&quota=2G", "given twice"),
        ("disk:/x?quota=1G&size=3", "no option 'size'; it has quota, durable, eviction"),
        ("disk:/x?quota=1G&durable=maybe", "durable is 'maybe'; write yes or no"),
        ("disk://machine/x?quota=1G", "names a machine"),
        ("disk:~nobody-of-that-name/x?quota=1G", "no such home folder"),
        ("disk:/x%00y?quota=1G", "zero character"),
        ("redis://localhost:99999", "port"),
        ("redis://localhost/0?timeouts=3", "no option 'timeouts'"),
        ("unix:", "needs its path"),
        ("s3://", "needs a bucket: s3://bucket/prefix"),
        ("gs:///prefix", "needs a bucket"),
        ("az://?concurrency=4", "needs a container"),
        ("file://", "a folder of its own"),
        ("file:///", "a folder of its own"),
        ("disk:/" + "x" * MAX_URL_CHARACTERS, "at most 4096 are allowed"),
    ],
)
def test_each_mistake_has_its_message(url: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words) as caught:
        parse_tier_url(url)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@host:port",
        "redis://user:hun/ter2hunter2@host",
        "reddis://user:hunter2@host",
        "redis://user:hunter2@host?nothing=1",
        "redis://user:hunter2@[host",
        "disk://user:hunter2@host",
    ],
)
def test_errors_never_repeat_a_password(url: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        parse_tier_url(url)
    assert "hunter2" not in str(caught.value)


@given(st.one_of(st.text(max_size=60), st.from_regex(r"(host|disk|redis|unix|s3|file):[ -~]{0,40}", fullmatch=True)))
@example("host:²")
@example("redis://[::1")
@example("redis://\ud800")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_tier_url(text)
    except InvalidConfig:
        return
    assert isinstance(spec, TierSpec)


def test_host_and_disk_tiers_are_opened_by_url(tmp_path: Path) -> None:
    host = open_tier("host:1000")
    assert isinstance(host, HostTier)
    assert host.stat().quota_bytes == 1000
    disk = open_tier(parse_tier_url(f"disk:{tmp_path}/a%20b?quota=2000"))
    assert isinstance(disk, DiskTier)
    assert disk.stat().quota_bytes == 2000
    assert disk.stat().address == f"{tmp_path}/a b"
    for tier in (host, disk):
        tier.close()


def test_reading_urls_and_opening_files_imports_no_large_package(tmp_path: Path) -> None:
    code = f"""
import sys
from kvmosaic.tiers.url import open_tier, parse_tier_url
parse_tier_url("redis://localhost")
parse_tier_url("s3://bucket")
open_tier("disk:{tmp_path}/x?quota=1000")
print([name for name in ("torch", "redis", "obstore", "transformers", "numpy") if name in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
