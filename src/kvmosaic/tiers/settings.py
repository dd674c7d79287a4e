"""Settings in the URLs of tiers: one reader of the options of all kinds, and those of Redis and of object stores."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from kvmosaic.config import parse_bytes
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import choose

MAX_URL_CHARACTERS = 4096
REDIS_SCHEMES = ("redis", "rediss", "unix")
OBJECT_SCHEMES = ("s3", "gs", "az", "file", "memory")
_PREFIX = re.compile(r"(\{[\w.-]{1,32}\})?[\w.:-]{0,64}", re.ASCII)
_SWITCH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

_N = TypeVar("_N", int, float)
Options: TypeAlias = Mapping[str, tuple[str, Callable[[str, str], Any]]]
"""By name of an option: the field that it sets, and what reads its value, given `NAME of a KIND tier` for errors."""


def read_options(tier: str, query: str, known: Options) -> dict[str, Any]:
    """Reads `name=value&name=value`; returns fields and their values.

    Raises:
        InvalidConfig: an unknown or repeated option, or an invalid value.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True, max_num_fields=32) if query else []
    except ValueError:
        raise InvalidConfig(f"the options of {tier} cannot be read; write ?name=value&name=value") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name not in known:
            raise InvalidConfig(f"{tier} has no option {name[:64]!r}; it has {', '.join(known)}")
        to, read = known[name]
        if to in fields:
            raise InvalidConfig(f"the option {name} of {tier} is given twice")
        fields[to] = read(f"{name} of {tier}", value)
    return fields


def _within(what: str, value: _N, lowest: float, highest: float) -> _N:
    if not lowest <= value <= highest:
        raise InvalidConfig(f"{what} must be from {lowest:g} to {highest:g}, got {value:g}")
    return value


def _number(lowest: float, highest: float, *, whole: bool = False) -> Callable[[str, str], float]:
    def read(what: str, text: str) -> float:
        if not re.fullmatch(r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
            raise InvalidConfig(f"{what} is {text[:64]!r}; give {'a whole number' if whole else 'a number of seconds'}")
        return _within(what, int(text) if whole else float(text), lowest, highest)

    return read


def _size(what: str, text: str) -> int:
    return parse_bytes(text)


def _text(what: str, text: str) -> str:
    return text


def _switch(what: str, text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise InvalidConfig(f"{what.split()[0]} is {text[:64]!r}; write yes or no")
    return _SWITCH[text.lower()]


def _policy(what: str, text: str) -> str:
    choose(text[:64])
    return text


def _prefix(what: str, text: str) -> str:
    if not text or not _PREFIX.fullmatch(text):
        raise InvalidConfig(
            f"the {what} is {text!r}; use up to 64 letters, digits and . : _ - (a part in braces may be at its start)"
        )
    return text


HOST: Options = {"eviction": ("eviction", _policy)}
DISK: Options = {"quota": ("quota_bytes", _size), "durable": ("durable", _switch), **HOST}
_REDIS: Options = {
    "db": ("db", _number(0, 65535, whole=True)),
    "prefix": ("prefix", _prefix),
    "connect_timeout": ("connect_seconds", _number(0.01, 60.0)),
    "timeout": ("pause_seconds", _number(0.01, 60.0)),
    "connections": ("max_connections", _number(1, 256, whole=True)),
    "part": ("part_bytes", lambda what, text: _within(what, parse_bytes(text), 2**10, 2**28)),
    "ca": ("ca_file", _text),
}
_OBJECT: Options = {
    "concurrency": ("concurrency", _number(1, 256, whole=True)),
    "connect_timeout": ("connect_seconds", _number(0.01, 600.0)),
    "timeout": ("request_seconds", _number(0.01, 600.0)),
    "endpoint": ("endpoint", _text),
    "region": ("region", _text),
    "allow_http": ("allow_http", _text),
}


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Address, credentials and timeouts of a Redis server."""

    host: str = "localhost"
    port: int = 6379
    path: str = ""
    """Of a Unix socket; host and port are then ignored."""
    db: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str | None = None
    """CA certificates for the server's; None: those of the system."""
    prefix: str = "kvmosaic"
    """Prefix of all our names in Redis. With a part in braces at its start, all of them fall into one hash slot."""
    connect_seconds: float = 0.1
    pause_seconds: float = 0.15
    """Longest silence of the server within an answer, and longest wait for it to accept 64 KiB."""
    max_connections: int = 16
    part_bytes: int = 2**20
    """Entries are written and read in parts of this size."""

    @property
    def address(self) -> str:
        """The URL without user and password."""
        if self.path:
            return f"unix://{self.path}?db={self.db}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{host}:{self.port}/{self.db}"

    @classmethod
    def from_url(cls, url: str) -> RedisSettings:
        """Reads `redis://[user[:password]@]host[:port][/db]?option=value&…`, `rediss://…` or `unix:///path?…`.

        Options: `db`, `prefix`, `connect_timeout` and `timeout` in seconds, `connections`, `part`, `ca`.

        Raises:
            InvalidConfig: another scheme, an unknown option, a value out of its bounds; never with the password.
        """
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidConfig(f"the URL of a redis tier has {len(url)} characters; at most {MAX_URL_CHARACTERS}")
        try:
            parts = urlsplit(url)
            port = 6379 if parts.port is None else parts.port
        except ValueError:  # its message repeats the input, which may be a password with a / in it
            raise InvalidConfig(
                "the URL of a redis tier cannot be read: its port is no number from 0 to 65535, or a bracket is open; "
                "write special characters of a password as %XX"
            ) from None
        if parts.scheme not in REDIS_SCHEMES:
            raise InvalidConfig(f"{parts.scheme!r} is not the scheme of a redis tier; use redis, rediss or unix")
        _within("port of a redis tier", port, 1, 65535)
        if re.search(r"(^|&)quota=", parts.query):
            raise InvalidConfig(
                "a redis tier has no quota: Redis itself evicts, for all that is in it; set its maxmemory, and its "
                "maxmemory-policy to allkeys-lru"
            )
        options = read_options("a redis tier", parts.query, _REDIS)
        is_unix = parts.scheme == "unix"
        if is_unix and not parts.path:
            raise InvalidConfig("a redis tier on a Unix socket needs its path: unix:///run/redis.sock")
        if not is_unix and parts.path.strip("/") and "db" not in options:
            options["db"] = _REDIS["db"][1]("db of a redis tier", parts.path.strip("/"))
        return cls(
            host=parts.hostname or "localhost",
            port=port,
            path=unquote(parts.path) if is_unix else "",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls=parts.scheme == "rediss",
            **options,
        )


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Address, concurrency and timeouts of an object store."""

    address: str = "memory:///"
    concurrency: int = 16
    connect_seconds: float = 1.0
    request_seconds: float = 30.0
    endpoint: str = ""
    region: str = ""
    allow_http: str = ""

    @classmethod
    def from_url(cls, url: str) -> ObjectSettings:
        """Reads `s3://bucket/prefix?option=value&…`, `gs://…`, `az://…`, `file:///folder` or `memory:`.

        Options: `concurrency`; `connect_timeout` and `timeout` of one request in seconds; for S3 `endpoint`, `region`
        and `allow_http=true`. Credentials come from the environment, as the tools of each cloud read them.

        Raises:
            InvalidConfig: another scheme, an unknown option, or a value out of its bounds.
        """
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidConfig(f"the URL of an object tier has {len(url)} characters; at most {MAX_URL_CHARACTERS}")
        parts = urlsplit(url)
        if parts.scheme not in OBJECT_SCHEMES:
            raise InvalidConfig(
                f"{parts.scheme!r} is not the scheme of an object tier; use {', '.join(OBJECT_SCHEMES)}"
            )
        if "@" in parts.netloc:
            raise InvalidConfig("the URL of an object tier holds a name or password; give them in the environment")
        if re.search(r"(^|&)quota=", parts.query):
            raise InvalidConfig("an object tier has no quota; set lifecycle rules for its prefix, or use a disk tier")
        is_memory = parts.scheme == "memory"
        address = "memory:///" if is_memory else urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
        return cls(address, **read_options("an object tier", parts.query, _OBJECT))

    @property
    def store_options(self) -> dict[str, Any]:
        """Options for `obstore.store.from_url`, besides the address."""
        if self.address.startswith("file:"):
            return {"mkdir": True}
        if self.address.startswith("memory:"):
            return {}
        client = {
            "connect_timeout": f"{math.ceil(self.connect_seconds * 1000)}ms",
            "timeout": f"{math.ceil(self.request_seconds * 1000)}ms",
            "allow_http": self.allow_http == "true",
        }
        rest = {name: value for name in ("endpoint", "region") if (value := getattr(self, name))}
        return {"retry_config": {"max_retries": 0}, "client_options": client, **rest}
