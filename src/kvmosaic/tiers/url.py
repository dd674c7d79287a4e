"""Tier URLs: parsing a text such as `disk:/var/cache/kvmosaic?quota=100GiB`, and opening the tiers they name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.errors import InvalidConfig, TierError
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.disk.tier import DiskTier
from kvmosaic.tiers.host import Allocate, HostTier
from kvmosaic.tiers.settings import (
    DISK,
    HOST,
    MAX_URL_CHARACTERS,
    OBJECT_SCHEMES,
    REDIS_SCHEMES,
    RedisSettings,
    read_options,
)
from kvmosaic.tiers.tier import Deadline, Tier

EXAMPLES = "host:4GiB, disk:/var/cache/kvmosaic?quota=100GiB, redis://localhost:6379/0 or s3://bucket/prefix"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,15}):(.*)", re.DOTALL)
_GREETING_SECONDS = 0.5
_NO_KEY = Key(bytes(32))


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A parsed tier URL. Safe to print: parts that may hold a password are hidden."""

    kind: str
    """`host`, `disk`, `redis` or `object`."""
    address: str
    """The URL without passwords and options."""
    quota_bytes: int | None = None
    """Maximum bytes; None: no limit of its own."""
    durable: bool = True
    """Disk: whether each entry is synced, and so survives a power failure."""
    eviction: str = "lru"
    """Host and disk: name of the eviction policy."""
    url: str = field(default="", repr=False)
    """The whole URL."""


def parse_tier_url(url: str) -> TierSpec:
    """Parses the URL of a tier; opens nothing.

        host:SIZE[?eviction=lfu]               memory of this process
        disk:FOLDER?quota=SIZE[&durable=no]    files, with `eviction` too; %XX for special characters, ~ for home
        redis://… rediss://… unix://…          see `RedisSettings.from_url`
        s3://… gs://… az://… file://… memory:  see `ObjectTier`

    Raises:
        InvalidConfig: not a valid tier URL. The message never repeats what may hold a password.
    """
    if not isinstance(url, str) or not url.strip():
        raise InvalidConfig(f"the URL of a tier is empty; write one such as {EXAMPLES}")
    if len(url) > MAX_URL_CHARACTERS:
        raise InvalidConfig(f"the URL of a tier has {len(url)} characters; at most {MAX_URL_CHARACTERS} are allowed")
    if "\0" in url or unquote(url).find("\0") >= 0:
        raise InvalidConfig("the URL of a tier holds a zero character")
    match = _SCHEME.fullmatch(url.strip())
    if match is None:
        raise InvalidConfig(f"a tier is named by a URL that begins with its kind and a colon, such as {EXAMPLES}")
    kind, rest = match[1].lower(), match[2]
    if kind == "host":
        return _host(rest)
    if kind == "disk":
        return _disk(rest)
    if kind in REDIS_SCHEMES:
        return TierSpec("redis", RedisSettings.from_url(f"{kind}:{rest}").address, url=f"{kind}:{rest}")
    if kind in OBJECT_SCHEMES:
        _check_object_place(kind, rest)
        return TierSpec("object", _without_secrets(kind, rest), url=f"{kind}:{rest}")
    raise InvalidConfig(f"there is no tier of kind {match[1]!r}; write one such as {EXAMPLES}")


def open_tier(place: str | TierSpec, *, allocate: Allocate | None = None) -> Tier:
    """Opens the tier of a URL.

    Args:
        place: A URL (see `parse_tier_url`), or its parsed form.
        allocate: Allocates memory for the host tier, such as pinned memory; None: ordinary memory.

    Raises:
        InvalidConfig: an invalid URL, an unusable location, or a missing package.
        TierUnavailable: the folder of a disk tier fails now.
    """
    spec = parse_tier_url(place) if isinstance(place, str) else place
    if spec.kind == "host":
        return HostTier(_quota_of(spec), eviction=spec.eviction, allocate=allocate)
    if spec.kind == "disk":
        return DiskTier(spec.address, _quota_of(spec), durable=spec.durable, eviction=spec.eviction)
    if spec.kind == "redis":
        from kvmosaic.tiers.redis import RedisTier

        return RedisTier(RedisSettings.from_url(spec.url))
    from kvmosaic.tiers.object_store import ObjectTier

    return ObjectTier.from_url(spec.url)


def _quota_of(spec: TierSpec) -> int:
    if spec.quota_bytes is None:
        raise InvalidConfig(f"a {spec.kind} tier needs a quota")
    return spec.quota_bytes


def _host(rest: str) -> TierSpec:
    if not rest:
        raise InvalidConfig("a host tier needs a size: host:4GiB")
    text, mark, query = rest.partition("?")
    if rest.startswith("/"):
        raise InvalidConfig(f"a host tier is not at a place ({rest[:64]!r}); write a size, host:4GiB, or disk:FOLDER")
    options = read_options("a host tier", query, HOST)
    if mark and not options:
        raise InvalidConfig("a host tier has no option after its '?'; write host:4GiB or host:4GiB?eviction=lfu")
    return TierSpec("host", "", parse_bytes(text), url=f"host:{rest}", **options)


def _disk(rest: str) -> TierSpec:
    folder, _, query = rest.partition("?")
    if folder.startswith("//") and not folder.startswith("///"):
        raise InvalidConfig("disk:// names a machine; a folder has one slash: disk:/var/cache/kvmosaic?quota=100GiB")
    folder = unquote(folder.removeprefix("//"))
    if not folder:
        raise InvalidConfig("a disk tier needs a folder: disk:/var/cache/kvmosaic?quota=100GiB")
    options = read_options("a disk tier", query, DISK)
    if "quota_bytes" not in options:
        raise InvalidConfig(f"a disk tier needs a quota: disk:{folder[:200]}?quota=100GiB")
    return TierSpec("disk", _home(folder), url=f"disk:{rest}", **options)


def _check_object_place(kind: str, rest: str) -> None:
    """Requires a bucket or a folder: never a whole store."""
    place = rest.partition("?")[0].partition("#")[0].removeprefix("//")
    if kind == "file" and not place.strip("/"):
        raise InvalidConfig("a file tier needs a folder of its own: file:///mnt/share/kvmosaic")
    if kind in ("s3", "gs", "az") and not place.partition("/")[0]:
        what = "container" if kind == "az" else "bucket"
        raise InvalidConfig(f"an object tier needs a {what}: {kind}://{what}/prefix")


def _home(folder: str) -> str:
    try:
        return str(Path(folder).expanduser())
    except RuntimeError as error:
        raise InvalidConfig(f"{folder[:200]!r}: there is no such home folder; write the whole path") from error


def _without_secrets(kind: str, rest: str) -> str:
    place = rest.partition("?")[0].partition("#")[0]
    slashes = "//" if place.startswith("//") else ""
    return f"{kind}:{slashes}{place.removeprefix('//').rpartition('@')[2]}"


def open_tiers(places: Sequence[str | Any], *, allocate: Allocate | None = None) -> list[Tier]:
    """Opens tiers, fastest first; all of them or none.

    Args:
        places: URLs (see `open_tier`), or tiers that are open already.
        allocate: allocator of a host tier's memory; see `HostTier`.

    Raises:
        InvalidConfig: an invalid URL, an unusable location, or neither a URL nor a tier.
    """
    opened: list[Tier] = []
    try:
        for place in places:
            if isinstance(place, str):
                tier = open_tier(place, allocate=allocate)
            elif isinstance(place, Tier):
                tier = place
            else:
                raise InvalidConfig(
                    f"a tier is a URL such as 'disk:/var/cache/kvmosaic?quota=100GiB', or a Tier; got {place!r:.80}"
                )
            opened.append(Breaker(tier))
            _greet(opened[-1])
    except BaseException:
        for tier in opened:
            tier.close()
        raise
    return opened


def _greet(tier: Tier) -> None:
    """Probes a tier: if it is unreachable, its breaker logs that now, and not when the first chunk is stored."""
    with contextlib.suppress(TierError):
        tier.exists_many([_NO_KEY], Deadline(_GREETING_SECONDS))
