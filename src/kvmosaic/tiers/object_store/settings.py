"""ObjectSettings: address, concurrency and timeouts of an object store."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from kvmosaic.errors import InvalidConfig

SCHEMES = ("s3", "gs", "az", "file", "memory")
MAX_URL_CHARACTERS = 4096
MAX_CONCURRENCY = 256
MIN_SECONDS, MAX_SECONDS = 0.01, 600.0
_OPTIONS = ("concurrency", "connect_timeout", "timeout", "endpoint", "region", "allow_http")


@dataclass(frozen=True, slots=True)
class ObjectSettings:
    """Address, concurrency and timeouts of an object store.

    Raises:
        InvalidConfig: a number out of its bounds.
    """

    address: str = "memory:///"
    concurrency: int = 16
    connect_seconds: float = 1.0
    request_seconds: float = 30.0
    more: Mapping[str, str] = field(default_factory=dict)
    """`endpoint`, `region` and `allow_http`, for S3."""

    def __post_init__(self) -> None:
        for name, value, lowest, highest in (
            ("concurrency", self.concurrency, 1, MAX_CONCURRENCY),
            ("connect_timeout", self.connect_seconds, MIN_SECONDS, MAX_SECONDS),
            ("timeout", self.request_seconds, MIN_SECONDS, MAX_SECONDS),
        ):
            if not lowest <= value <= highest:
                raise InvalidConfig(f"{name} of an object tier must be from {lowest:g} to {highest:g}, got {value:g}")

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
        if parts.scheme not in SCHEMES:
            raise InvalidConfig(f"{parts.scheme!r} is not the scheme of an object tier; use {', '.join(SCHEMES)}")
        if "@" in parts.netloc:
            raise InvalidConfig("the URL of an object tier holds a name or password; give them in the environment")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if "quota" in options:
            raise InvalidConfig("an object tier has no quota; set lifecycle rules for its prefix, or use a disk tier")
        for name in options:
            if name not in _OPTIONS:
                raise InvalidConfig(f"an object tier has no option {name!r}; it has {', '.join(_OPTIONS)}")
        defaults = cls()
        is_memory = parts.scheme == "memory"
        return cls(
            "memory:///" if is_memory else urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")),
            int(_number("concurrency", options.get("concurrency", str(defaults.concurrency)), whole=True)),
            _number("connect_timeout", options.get("connect_timeout", str(defaults.connect_seconds))),
            _number("timeout", options.get("timeout", str(defaults.request_seconds))),
            {name: options[name] for name in ("endpoint", "region", "allow_http") if name in options},
        )

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
            "allow_http": self.more.get("allow_http") == "true",
        }
        rest = {name: self.more[name] for name in ("endpoint", "region") if name in self.more}
        return {"retry_config": {"max_retries": 0}, "client_options": client, **rest}


def _number(name: str, text: str, *, whole: bool = False) -> float:
    if not re.fullmatch(r"[0-9]{1,9}" if whole else r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
        kind = "a whole number" if whole else "a number of seconds"
        raise InvalidConfig(f"{name} of an object tier is {text[:64]!r}; give {kind}")
    return float(text)
