"""RedisSettings: address, credentials, timeouts and quota of a Redis server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from kvmosaic.config import parse_bytes
from kvmosaic.errors import InvalidConfig

MAX_PORT = 65535
MAX_DB = 65535
MIN_SECONDS, MAX_SECONDS = 0.01, 60.0
MAX_CONNECTIONS = 256
MIN_PART_BYTES, MAX_PART_BYTES = 2**10, 2**28
MAX_URL_CHARACTERS = 4096
_PREFIX = re.compile(r"(\{[\w.-]{1,32}\})?[\w.:-]{0,64}", re.ASCII)
_OPTIONS = ("db", "prefix", "quota", "connect_timeout", "timeout", "connections", "part", "ca")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Validated settings of a URL.

    Raises:
        InvalidConfig: a value out of its bounds.
    """

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
    quota_bytes: int | None = None
    """Maximum bytes of entries under this prefix, of all processes; None: Redis evicts by its `maxmemory`."""
    connect_seconds: float = 0.1
    pause_seconds: float = 0.15
    """Longest silence of the server within an answer, and longest wait for it to accept more bytes."""
    max_connections: int = 16
    part_bytes: int = 2**20
    """Entries are written and read in parts of this size."""

    def __post_init__(self) -> None:
        _check("port", self.port, 1, MAX_PORT)
        _check("db", self.db, 0, MAX_DB)
        _check("connect_timeout", self.connect_seconds, MIN_SECONDS, MAX_SECONDS)
        _check("timeout", self.pause_seconds, MIN_SECONDS, MAX_SECONDS)
        _check("connections", self.max_connections, 1, MAX_CONNECTIONS)
        _check("part", self.part_bytes, MIN_PART_BYTES, MAX_PART_BYTES)
        if not self.prefix or not _PREFIX.fullmatch(self.prefix):
            raise InvalidConfig(
                f"the prefix of a redis tier is {self.prefix!r}; use up to 64 letters, digits and . : _ - "
                "(a part in braces may be at its start)"
            )

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

        Options: `db`, `prefix`, `quota`, `connect_timeout` and `timeout` in seconds, `connections`, `part`, `ca`.

        Raises:
            InvalidConfig: another scheme, an unknown option, a value out of its bounds; never with the password.
        """
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidConfig(f"the URL of a redis tier has {len(url)} characters; at most {MAX_URL_CHARACTERS}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # its message repeats the input, which may be a password with a / in it
            raise InvalidConfig(
                "the URL of a redis tier cannot be read: its port is no number from 0 to 65535, or a bracket is open; "
                "write special characters of a password as %XX"
            ) from None
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise InvalidConfig(f"{parts.scheme!r} is not the scheme of a redis tier; use redis, rediss or unix")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in options:
            if name not in _OPTIONS:
                raise InvalidConfig(f"a redis tier has no option {name!r}; it has {', '.join(_OPTIONS)}")
        is_unix = parts.scheme == "unix"
        if is_unix and not parts.path:
            raise InvalidConfig("a redis tier on a Unix socket needs its path: unix:///run/redis.sock")
        if not is_unix and parts.path.strip("/"):
            options.setdefault("db", parts.path.strip("/"))
        defaults = cls()
        quota = options.get("quota")
        return cls(
            host=parts.hostname or defaults.host,
            port=defaults.port if port is None else port,
            path=unquote(parts.path) if is_unix else "",
            db=int(_number("db", options.get("db", "0"), whole=True)),
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            tls=parts.scheme == "rediss",
            ca_file=options.get("ca"),
            prefix=options.get("prefix", defaults.prefix),
            quota_bytes=None if quota is None else parse_bytes(quota),
            connect_seconds=_number("connect_timeout", options.get("connect_timeout", str(defaults.connect_seconds))),
            pause_seconds=_number("timeout", options.get("timeout", str(defaults.pause_seconds))),
            max_connections=int(
                _number("connections", options.get("connections", str(defaults.max_connections)), whole=True)
            ),
            part_bytes=parse_bytes(options.get("part", str(defaults.part_bytes))),
        )


def _number(name: str, text: str, *, whole: bool = False) -> float:
    if not re.fullmatch(r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
        kind = "a whole number" if whole else "a number of seconds"
        raise InvalidConfig(f"{name} of a redis tier is {text[:64]!r}; give {kind}")
    return float(text)


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:
        raise InvalidConfig(f"{name} of a redis tier must be from {lowest:g} to {highest:g}, got {value:g}")
